"""Memory that is used again: never under a tensor in use, no more than is in use."""

from pathlib import Path

import torch

from olmo_shard.dispatch.buffer_pool import BufferPool

MIB = 2**20


def resident() -> int:
    (line,) = [t for t in Path("/proc/self/status").read_text().splitlines() if "RssAnon" in t]
    return int(line.split()[1]) * 1024


def test_memory_comes_back_once_nothing_refers_to_it():
    buffers = BufferPool(1000)
    first = buffers.empty((3, 5), torch.float32)
    first.fill_(1)
    second = buffers.empty((4,), torch.int64)
    second.fill_(2)
    assert first.sum() == 15, "two tensors in use share nothing"
    place = first.data_ptr()
    view = first[1:]
    del first
    assert buffers.empty((2,), torch.float32).data_ptr() != place, "a view is in use"
    assert view.sum() == 10
    del view
    assert buffers.empty((7, 2), torch.bfloat16).data_ptr() == place


def test_what_backward_keeps_is_in_use():
    buffers = BufferPool(1000)
    weight = torch.ones(5, requires_grad=True)
    rows = buffers.empty((3, 5), torch.float32)
    rows.fill_(2)
    out = (rows * weight).sum()
    del rows
    buffers.empty((3, 5), torch.float32).fill_(torch.nan)
    out.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [6.0] * 5
    del out


def test_no_elements():
    buffers = BufferPool(0)
    assert buffers.empty((0, 5), torch.float32).shape == (0, 5)
    assert BufferPool(1000).empty((0, 5), torch.bfloat16).shape == (0, 5)


def test_a_buffer_does_not_keep_what_its_largest_tensor_had():
    """Eight layers, one of them hot, in each step another one: 64 MiB, and 1 MiB for the others."""
    buffers = BufferPool(64 * MIB)
    before = resident()
    for step in range(16):
        sizes = [64 if layer == step % 8 else 1 for layer in range(8)]
        rows = [buffers.empty((size, MIB), torch.uint8).fill_(1) for size in sizes]
        assert resident() - before < 100 * MIB
        del rows


def test_a_child_process_writes_into_its_own_copy():
    memory = BufferPool(10)
    memory.empty((3,), torch.uint8)
    assert "/dev/zero" not in Path("/proc/self/maps").read_text(), "anonymous memory is private"
