"""The heap over NVSHMEM, against a stub of nvshmem4py: what is called, in which order, on two
ranks, and what is left when something fails. What NVSHMEM itself does needs GPUs.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from olmo_shard.dispatch.heap import nvshmem
from olmo_shard.dispatch.heap.nvshmem import NvshmemHeap, unsupported
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import HeapError
from tests.support.nvshmem_stub import (
    BOTH,
    BindingsError,
    Nvshmem,
    NvshmemError,
    NvshmemInvalid,
    installed,
)
from tests.support.ranks import mesh_of

ARENA_BYTES, NUM_FLAGS = 1000, 3
FLAGS_AT = 1024
WAY_OUT = "; on one host, parallel.symmetric_heap: torch needs no NVSHMEM"
CPU = torch.device("cpu", 0)
"""Where the stub's memory is."""


@contextmanager
def heap_on(
    rank: Runtime, pes: list[int], far: dict[int, set[int]] | None = None
) -> Iterator[tuple[NvshmemHeap, Nvshmem]]:
    """:param far: by rank, those whose memory it cannot reach."""
    stub = Nvshmem(rank.rank, pes, {0, 1} - (far or {}).get(rank.rank, set()))
    with installed(stub):
        heap = NvshmemHeap(mesh_of(rank, 2).ep, CPU, ARENA_BYTES, NUM_FLAGS)
        yield heap, stub
        heap.close()
    assert not stub.allocated


def made_case(rank: Runtime) -> None:
    with heap_on(rank, [0, 1]) as (_, stub):
        first = ["unique id"] if rank.rank == 0 else []
        assert stub.log == [
            "version",
            "agree",
            *first,
            *["gpu 0", "current", "init", "agree", "hook"],
            "agree",  # on the PEs
            "agree",  # on the room
            *["tensor", "zero", "synchronize", "agree"],
            *["ptr 0", "ptr 1"],
            "agree",  # on far ranks
        ]
        arguments = stub.init_arguments
        assert (arguments["rank"], arguments["nranks"]) == (rank.rank, 2)
        assert (arguments["uid"], arguments["initializer_method"]) == ("the id", "uid")
        stub.log.clear()


def test_memory_is_zero_everywhere_before_anyone_gets_an_address(ranks):
    ranks(2).run(made_case)


def layout_case(rank: Runtime) -> None:
    other = 1 - rank.rank
    with heap_on(rank, [0, 1]) as (heap, stub):
        (memory,) = stub.allocated
        base = memory.data_ptr()
        assert (heap.rank, heap.size) == (rank.rank, 2)
        assert (heap.arena.dtype, heap.arena.shape) == (torch.uint8, (ARENA_BYTES,))
        assert (heap.flags.dtype, heap.flags.shape) == (torch.int64, (NUM_FLAGS,))
        assert not heap.arena.any()
        assert not heap.flags.any()
        assert (heap.arena.data_ptr(), heap.flags.data_ptr()) == (base, base + FLAGS_AT)
        assert memory.numel() == FLAGS_AT + 8 * NUM_FLAGS
        arena_ptrs = {rank.rank: base, other: base + (other + 1) * 2**40}
        assert heap.arena_ptrs.tolist() == [arena_ptrs[0], arena_ptrs[1]]
        assert heap.flag_ptrs.tolist() == [each + FLAGS_AT for each in heap.arena_ptrs.tolist()]
        assert heap.pes is not None
        assert (heap.pes.dtype, heap.arena_ptrs.dtype) == (torch.int32, torch.int64)
        assert heap.flag_ptrs.dtype == torch.int64
        assert (heap.far, heap.staging) == ((), None)
        assert str(heap.bitcode).endswith("nvidia/nvshmem/lib/libnvshmem_device.bc")


def test_arena_and_flags_lie_in_one_allocation_with_the_peers_addresses(ranks):
    ranks(2).run(layout_case)


def permuted_case(rank: Runtime) -> None:
    with heap_on(rank, [1, 0]) as (heap, stub):
        assert heap.pes is not None
        assert heap.pes.tolist() == [1, 0]
        assert [step for step in stub.log if "ptr" in step] == ["ptr 1", "ptr 0"]
        assert heap.arena_ptrs[rank.rank] == heap.arena.data_ptr()
        assert heap.far == ()


def test_each_ranks_pe_is_the_one_that_nvshmem_gave_it(ranks):
    ranks(2).run(permuted_case)


def far_case(rank: Runtime) -> None:
    """Rank 1 cannot reach rank 0, which can reach it."""
    with heap_on(rank, [0, 1], far={1: {0}}) as (heap, stub):
        assert heap.far == ((), (0,))[rank.rank]
        if rank.rank == 1:
            assert heap.arena_ptrs[0] == heap.flag_ptrs[0] == 0
            assert heap.flag_ptrs[1] == heap.flags.data_ptr()
        assert heap.staging is not None
        assert (heap.staging.dtype, heap.staging.shape) == (torch.uint8, (ARENA_BYTES,))
        assert heap.staging.data_ptr() == stub.allocated[1].data_ptr()
        assert not heap.staging.any()
        stub.log.clear()
        heap.close()
        freed = [step for step in stub.log if "free" in step]
        assert freed == [f"free {ARENA_BYTES}", f"free {FLAGS_AT + 8 * NUM_FLAGS}"]


def test_a_far_peer_gives_every_rank_a_staging_area(ranks):
    ranks(2).run(far_case)


def close_case(rank: Runtime) -> None:
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    stub = Nvshmem(rank.rank, [0, 1], {0, 1})
    with installed(stub):
        heap = NvshmemHeap(group, CPU, ARENA_BYTES, NUM_FLAGS)
        stub.log.clear()
        heap.close()
        heap.close()
        size = FLAGS_AT + 8 * NUM_FLAGS
        assert stub.log == [
            *["synchronize", "agree", "barrier_all"],
            *[f"free {size}", "unhook", "finalize"],
        ]
        assert not stub.allocated
        with pytest.raises(AttributeError):
            _ = heap.arena
    dist.destroy_process_group(group)


def test_closing_waits_frees_and_finalises_once_while_the_group_is_there(ranks):
    ranks(2).run(close_case)


def refused_case(rank: Runtime, on: int, change: dict[str, Any], packages: tuple[str, ...]) -> Any:
    """The message, and the stub's log, where things are otherwise on one rank (-1: on both)."""
    stub = Nvshmem(rank.rank, [0, 1], {0, 1})
    mine = on in (rank.rank, -1)
    for name, value in change.items() if mine else ():
        setattr(stub, name, value)
    with installed(stub, packages if mine else BOTH):
        with pytest.raises(HeapError) as raised:
            NvshmemHeap(mesh_of(rank, 2).ep, CPU, ARENA_BYTES, NUM_FLAGS)
        assert not stub.allocated, "nothing is left"
    return str(raised.value), stub.log


REFUSED = {
    "a wheel": (1, {}, (), "^rank 1: nvidia-nvshmem-cu13 is not installed"),
    "the bindings": (0, {}, BOTH[:1], "^rank 0: nvshmem4py-cu13 is not installed"),
    "a host library of another version": (
        *(1, {"version": "3.8.0"}, BOTH),
        r"^rank 1: the host library of NVSHMEM in this process is 3\.8\.0, .* 3\.4\.5: they must",
    ),
    "a process that used NVSHMEM": (
        *(0, {"status": 1}, BOTH),
        "^rank 0: NVSHMEM was initialised in this process before, which it can be only once",
    ),
    "an old GPU": (
        *(1, {"capability": (6, 1)}, BOTH),
        r"^rank 1: NVSHMEM needs compute capability 7\.0, cpu:0 has 6\.1",
    ),
    "a host library that is not found": (
        *(1, {"failing": "version"}, BOTH),
        "^rank 1: NVSHMEM cannot load its host library: version went wrong",
    ),
    "no unique id": (
        *(0, {"failing": "unique id"}, BOTH),
        "^NVSHMEM cannot make a unique id: unique id went wrong",
    ),
    "an init that fails": (
        *(-1, {"failing": "init"}, BOTH),
        "^rank 0: NVSHMEM cannot initialise: init went wrong",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_on_one_rank_is_said_on_all_and_nothing_was_started(ranks, case):
    on, change, packages, message = REFUSED[case]
    for found, log in ranks(2).run(refused_case, on, change, packages):
        assert re.search(f"{message}.*{re.escape(WAY_OUT)}$", found), found
        assert not {"hook", "tensor", "finalize"} & set(log)
        assert "init" not in log or case == "an init that fails"


LATER = {
    "other processes": (
        *(-1, {"num_pes": 8}),
        r"^the 2 ranks of the group see PEs \[0, 1\] of \[8, 8\]: NVSHMEM was initialised over",
    ),
    "one that sees others": (1, {"num_pes": 8}, r"^the 2 ranks .*\[0, 1\] of \[2, 8\]"),
    "one PE twice": (1, {"pes": [0, 0]}, r"see PEs \[0, 0\] of \[2, 2\]"),
    "a full GPU": (
        *(1, {"free": 1047}),
        r"^rank 1: NVSHMEM needs 1,048 bytes \(1\.0 KiB\) on cpu:0, 1,047 bytes .* are free: lower "
        r"train\.micro_batch_tokens, or set parallel\.capacity_factor",
    ),
    "an allocation that fails": (
        *(1, {"failing": "tensor"}),
        r"^rank 1: NVSHMEM cannot allocate 1,048 bytes \(1\.0 KiB\): tensor went wrong",
    ),
}


@pytest.mark.parametrize("case", LATER)
def test_what_fails_once_nvshmem_is_up_takes_it_down_on_all_ranks(ranks, case):
    on, change, message = LATER[case]
    for found, log in ranks(2).run(refused_case, on, change, BOTH):
        assert re.search(f"{message}.*{re.escape(WAY_OUT)}$", found), found
        assert log[-2:] == ["unhook", "finalize"]
        # See [Note: all or none]: another rank may have nothing to free.
        assert not any("free" in step for step in log)
        assert ("tensor" in log) == (case == "an allocation that fails")


def staging_case(rank: Runtime) -> tuple[str, list[str]]:
    """Rank 1 has room for the arena and not for the staging area."""
    stub = Nvshmem(rank.rank, [0, 1], {rank.rank})
    with installed(stub):
        free = iter([2**30, 2**30 if rank.rank == 0 else 999])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 2**40))
            with pytest.raises(HeapError) as raised:
                NvshmemHeap(mesh_of(rank, 2).ep, CPU, ARENA_BYTES, NUM_FLAGS)
        assert not stub.allocated
    return str(raised.value), stub.log


def test_without_room_for_staging_the_arena_is_freed_on_all_ranks(ranks):
    for found, log in ranks(2).run(staging_case):
        assert re.match(r"rank 1: NVSHMEM needs 1,000 bytes .* on cpu:0, 999 bytes", found)
        assert log[-3:] == [f"free {FLAGS_AT + 8 * NUM_FLAGS}", "unhook", "finalize"]


def test_a_package_that_cannot_be_imported_is_an_error(monkeypatch):
    stub = Nvshmem(0, [0], {0})
    with installed(stub):
        assert nvshmem._ready(CPU)[1].endswith("libnvshmem_device.bc")
        monkeypatch.setitem(sys.modules, "cuda.core", None)
        with pytest.raises(HeapError, match=r"^nvshmem4py cannot be imported: .*cuda\.core"):
            nvshmem._ready(CPU)


@pytest.mark.parametrize("kind", [NvshmemError, NvshmemInvalid, BindingsError, RuntimeError])
def test_what_nvshmem_and_cuda_raise_is_explained_and_nothing_else(kind):
    stub = Nvshmem(0, [0], {0})
    with installed(stub):
        used, _ = nvshmem._ready(CPU)
        message = f"^NVSHMEM cannot dance: no floor{WAY_OUT}$"
        with pytest.raises(HeapError, match=message), nvshmem._explained(used, "dance"):
            raise kind("no floor")
        with pytest.raises(KeyError), nvshmem._explained(used, "dance"):
            raise KeyError("a bug")


def test_what_is_unsupported_is_known_before_anything_is_allocated():
    gpu = torch.device("cuda", 0)
    stub = Nvshmem(0, [0], {0})
    assert unsupported(CPU) == "NVSHMEM is for GPUs, this is a run on cpu"
    with installed(stub) as library:
        assert unsupported(gpu) is None
        stub.capability = (7, 0)
        assert unsupported(gpu) is None
        stub.capability = (6, 9)
        assert str(unsupported(gpu)).startswith("NVSHMEM needs compute capability 7.0, cuda:0 has")
        stub.capability = (9, 0)
        (library / "libnvshmem_device.bc").unlink()
        assert "holds no NVSHMEM bitcode" in str(unsupported(gpu))
    with installed(stub, packages=()):
        assert str(unsupported(gpu)).startswith("nvidia-nvshmem-cu13 is not installed")
    assert not stub.log
