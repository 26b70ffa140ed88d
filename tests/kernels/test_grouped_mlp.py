"""The expert layout and the grouped SwiGLU against per-pair loops in FP64. Runs in CI."""

import pytest
import torch
import torch.nn.functional as F

from olmo_shard.kernels.expert_layout import expert_layout
from olmo_shard.kernels.grouped_mlp import grouped_mlp


def test_layout_of_the_documented_example():
    local_expert = torch.tensor([[1, 0], [1, -1], [0, -1]], dtype=torch.int32)
    layout = expert_layout(local_expert, 2)
    assert layout.slot_P.tolist() == [1, 4, 0, 2]
    assert layout.row_P.tolist() == [0, 2, 0, 1]
    assert layout.counts == [2, 2]


def test_mlp_of_the_documented_example():
    layout = expert_layout(torch.tensor([[0]], dtype=torch.int32), 1)
    y = grouped_mlp(
        torch.tensor([[2.0]]),
        torch.tensor([0.5]),
        torch.tensor([[[1.0], [3.0]]]),
        torch.tensor([[[5.0]]]),
        layout,
    )
    assert y.item() == pytest.approx(26.42, abs=0.01)


def routes(counts: list[int], rows: int, slots: int) -> torch.Tensor:
    """A [rows, slots] table in which expert i has counts[i] rows, no row twice the same expert."""
    table = torch.full((rows, slots), -1, dtype=torch.int32)
    used = torch.zeros(rows, dtype=torch.long)
    for expert, count in enumerate(counts):
        free = torch.nonzero(used < slots).flatten()[-count:] if count else []
        for row in free:
            table[row, used[row]] = expert
            used[row] += 1
    return table


# Hidden 36 and expert width 20 break every usual alignment; groups of 1, 7, 0 and 13 rows.
@pytest.mark.parametrize("counts", [[1, 7, 0, 13], [0, 0, 0, 0], [13, 13, 13, 13]])
def test_outputs_and_gradients_equal_a_loop_in_fp64(counts):
    torch.manual_seed(0)
    rows, width, hidden, slots = 13, 36, 20, 4
    table = routes(counts, rows, slots)
    x = torch.randn(rows, width, requires_grad=True)
    weights = torch.rand(rows, slots, requires_grad=True)
    w_gate_up = torch.randn(4, 2 * hidden, width, requires_grad=True)
    w_down = torch.randn(4, width, hidden, requires_grad=True)
    layout = expert_layout(table, 4)
    assert layout.counts == counts
    y = grouped_mlp(x, weights.flatten()[layout.slot_P], w_gate_up, w_down, layout)

    leaves = (x, weights, w_gate_up, w_down)
    x64, weights64, w_gate_up64, w_down64 = (t.detach().double().requires_grad_() for t in leaves)
    y64 = torch.zeros(rows, width, dtype=torch.float64)
    for row in range(rows):
        for slot in range(slots):
            expert = int(table[row, slot])
            if expert >= 0:
                gate, up = (w_gate_up64[expert] @ x64[row]).chunk(2)
                hidden64 = F.silu(gate) * up * weights64[row, slot]
                y64[row] = y64[row] + w_down64[expert] @ hidden64
    out_gradient = torch.randn(rows, width)
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-4)
    if sum(counts):
        y64.backward(out_gradient.double())
    y.backward(out_gradient)
    for mine, reference in zip(leaves, (x64, weights64, w_gate_up64, w_down64), strict=True):
        expected = torch.zeros_like(mine).double() if reference.grad is None else reference.grad
        assert mine.grad is not None
        peak = max(1e-9, expected.abs().max().item())
        assert (mine.grad.double() - expected).abs().max().item() <= 2e-6 * peak


@pytest.mark.parametrize("how", ["stride-0", "transposed", "sliced"])
def test_gradients_that_are_not_contiguous(how):
    torch.manual_seed(1)
    table = routes([3, 4], 5, 2)
    layout = expert_layout(table, 2)
    w_gate_up, w_down = torch.randn(2, 8, 6), torch.randn(2, 6, 4)
    weight_P = torch.rand(7)
    incoming = {
        "stride-0": torch.ones(1, 1).expand(5, 6),
        "transposed": torch.randn(6, 5).T,
        "sliced": torch.randn(5, 12)[:, ::2],
    }[how]

    def gradient(dy: torch.Tensor) -> torch.Tensor:
        x = torch.arange(30.0).view(5, 6).div(30).requires_grad_()
        grouped_mlp(x, weight_P, w_gate_up, w_down, layout).backward(dy)
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(incoming), gradient(incoming.contiguous()))


def test_twenty_runs_are_bitwise_equal():
    torch.manual_seed(2)
    layout = expert_layout(routes([9, 9, 9], 9, 3), 3)
    arguments = torch.randn(9, 16), torch.rand(27), torch.randn(3, 24, 16), torch.randn(3, 16, 12)
    first = grouped_mlp(*arguments, layout)
    assert all(torch.equal(first, grouped_mlp(*arguments, layout)) for _ in range(20))


def test_bf16_accumulates_in_fp32():
    """63 small pairs on a large one: a bf16 sum would lose each of them."""
    slots = 64
    table = torch.arange(slots, dtype=torch.int32)[None]
    layout = expert_layout(table, slots)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    w_gate_up = torch.full((slots, 2, 8), 0.25, dtype=torch.bfloat16)
    w_down = torch.full((slots, 8, 1), 1.0, dtype=torch.bfloat16)
    weights = torch.full((slots,), 0.1)
    weights[0] = 100.0
    y = grouped_mlp(x, weights, w_gate_up, w_down, layout)[0, 0].item()
    one = (F.silu(torch.tensor(2.0)) * 2).bfloat16()
    pair = (one * torch.tensor(0.1).bfloat16()).item()
    assert y == pytest.approx((one * 100).item() + 63 * pair, rel=2**-8)
