"""The grouped SwiGLU against per-pair loops in FP64, its custom operators, its kernels in Triton's
interpreter, compiled ahead of time.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from olmo_shard.kernels.expert_layout import ExpertLayout, expert_layout
from olmo_shard.kernels.grouped_mlp import MainGrads, grouped_mlp
from tests.support.close import BARS, close
from tests.support.scales import swiglu_scale


def test_mlp_of_the_documented_example() -> None:
    layout = expert_layout(torch.tensor([[0]], dtype=torch.int32), 1)
    y = grouped_mlp(
        torch.tensor([[2.0]]),
        torch.tensor([[0.5]]),
        torch.tensor([[[1.0], [3.0]]]),
        torch.tensor([[[5.0]]]),
        layout,
    )
    assert round(y.item(), 2) == 26.42


def routes(counts: list[int], rows: int, slots: int) -> Tensor:
    """A [rows, slots] table in which expert i has counts[i] rows, no row twice the same expert."""
    table = torch.full((rows, slots), -1, dtype=torch.int32)
    used = torch.zeros(rows, dtype=torch.long)
    for expert, count in enumerate(counts):
        free = torch.nonzero(used < slots).flatten()[-count:] if count else []
        for row in free:
            table[row, used[row]] = expert
            used[row] += 1
    return table


def operands(
    counts: list[int], *, rows: int, width: int, hidden: int, slots: int
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor], ExpertLayout, Tensor]:
    """(x, weights, w_gate_up, w_down), the layout, and a gradient for the output."""
    generator = torch.Generator().manual_seed(sum(counts))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    experts = len(counts)
    layout = expert_layout(routes(counts, rows, slots), experts)
    assert layout.offsets.diff().tolist() == counts
    leaves = (
        normal(rows, width),
        torch.rand(rows, slots, generator=generator),
        normal(experts, 2 * hidden, width) / width**0.5,
        normal(experts, width, hidden) / hidden**0.5,
    )
    return leaves, layout, normal(rows, width)


def loop_in_fp64(
    leaves: tuple[Tensor, Tensor, Tensor, Tensor], layout: ExpertLayout, dy_RD: Tensor
) -> list[Tensor]:
    """The output, then the gradients of all leaves."""
    x, weights, w_gate_up, w_down = (leaf.detach().double().requires_grad_() for leaf in leaves)
    # Every leaf is used, with or without pairs.
    y = sum(leaf.sum() * 0 for leaf in (weights, w_gate_up, w_down)) + x * 0
    for expert, (start, end) in enumerate(pairwise(layout.offsets)):
        for slot in layout.slot_P[start:end].tolist():
            row = slot // weights.shape[1]
            gate, up = (w_gate_up[expert] @ x[row]).chunk(2)
            out = w_down[expert] @ (F.silu(gate) * up * weights.flatten()[slot])
            y = y + F.one_hot(torch.tensor(row), len(x))[:, None] * out
    gradients = torch.autograd.grad(
        y,
        (x, weights, w_gate_up, w_down),
        dy_RD.double(),
        allow_unused=True,
        materialize_grads=True,
    )
    return [y.detach(), *gradients]


def scales(
    leaves: tuple[Tensor, ...], layout: ExpertLayout, dy_RD: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Scales of the output, then of the gradients of all leaves."""
    x, weights, w_gate_up, w_down = leaves
    idx_RK = torch.full(weights.shape, -1, dtype=torch.int64)
    for expert, (start, end) in enumerate(pairwise(layout.offsets.tolist())):
        idx_RK.view(-1)[layout.slot_P[start:end].long()] = expert
    return swiglu_scale(x, idx_RK, weights, w_gate_up, w_down, dy_RD)


# Hidden 36 and expert width 20 break every usual alignment; groups of 1, 7, 0 and 13 rows.
@pytest.mark.parametrize("counts", [[1, 7, 0, 13], [0, 0, 0, 0], [13, 13, 13, 13]])
@pytest.mark.parametrize("into", ["main gradients", "gradients"])
def test_outputs_and_gradients_equal_a_loop_in_fp64(counts: list[int], into: str) -> None:
    leaves, layout, dy_RD = operands(counts, rows=13, width=36, hidden=20, slots=4)
    expected = loop_in_fp64(leaves, layout, dy_RD)
    for leaf in leaves:
        leaf.requires_grad_()
    mains = None
    if into == "main gradients":
        mains = MainGrads(*(torch.ones_like(leaf) for leaf in leaves[2:]))
    y_RD = grouped_mlp(*leaves, layout, main_grads=mains)
    y_RD.backward(dy_RD)
    found = [y_RD, *(leaf.grad for leaf in leaves)]
    if mains is not None:
        assert found[3:] == [None, None], "added in place, so not returned"
        found[3:] = [main - 1 for main in mains]
    operands_scale = list(scales(leaves, layout, dy_RD))
    if mains is not None:  # their start is one more term
        operands_scale[3:] = [scale + 1 for scale in operands_scale[3:]]
    for mine, reference, scale in zip(found, expected, operands_scale, strict=True):
        close(mine, reference, scale=scale)


@pytest.mark.parametrize("how", ["stride-0", "transposed", "sliced"])
def test_gradients_that_are_not_contiguous(how: str) -> None:
    leaves, layout, _ = operands([3, 4], rows=5, width=6, hidden=4, slots=2)
    incoming = {
        "stride-0": torch.ones(1, 1).expand(5, 6),
        "transposed": torch.randn(6, 5).T,
        "sliced": torch.randn(5, 12)[:, ::2],
    }[how]

    def gradient(dy: Tensor) -> Tensor:
        x = leaves[0].clone().requires_grad_()
        grouped_mlp(x, *leaves[1:], layout).backward(dy)
        assert x.grad is not None
        return x.grad

    assert torch.equal(gradient(incoming), gradient(incoming.contiguous()))


def test_twenty_runs_are_bitwise_equal() -> None:
    leaves, layout, _ = operands([9, 9, 9], rows=9, width=16, hidden=12, slots=3)
    first = grouped_mlp(*leaves, layout)
    assert all(torch.equal(first, grouped_mlp(*leaves, layout)) for _ in range(20))


def test_bf16_accumulates_in_fp32() -> None:
    """63 small pairs on a large one: a bf16 sum would lose each of them."""
    slots = 64
    layout = expert_layout(torch.arange(slots, dtype=torch.int32)[None], slots)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    w_gate_up = torch.full((slots, 2, 8), 0.25, dtype=torch.bfloat16)
    w_down = torch.full((slots, 8, 1), 1.0, dtype=torch.bfloat16)
    weights = torch.full((1, slots), 0.1)
    weights[0, 0] = 100.0
    y = grouped_mlp(x, weights, w_gate_up, w_down, layout)[0, 0].item()
    one = F.silu(torch.tensor(2.0)) * 2
    pair = (one * 0.1).bfloat16().item()
    exact = (one * 100).item() + 63 * pair  # a sum of positive terms: its own scale
    assert abs(y - exact) <= BARS[torch.bfloat16].rounding * exact


# While it traces, torch.compile looks at the .grad of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("into", ["main gradients", "gradients"])
def test_the_operators_keep_torchs_contract(into: str) -> None:
    """Schemas, fakes, autograd registration, and what a compiler traces; no mutation but of main
    gradients.
    """
    leaves, layout, dy_RD = operands([2, 3], rows=4, width=8, hidden=4, slots=2)
    for leaf in leaves:
        leaf.requires_grad_()
    mains = [torch.zeros_like(leaf) for leaf in leaves[2:]]
    ops = torch.ops.olmo_shard
    if into == "gradients":
        # Main gradients are added to in backward, which gradcheck-like tests would see as a change.
        torch.library.opcheck(ops.grouped_mlp, (*leaves, *layout, None, None, "reference"))
        h_P2F = torch.randn(5, 8)
        arguments = (dy_RD, leaves[0], leaves[1], h_P2F, *leaves[2:], *layout)
        detached = [argument.detach() for argument in arguments]
        torch.library.opcheck(ops.grouped_mlp_bwd, (*detached, "reference"))
    else:
        h_P2F = torch.randn(5, 8)
        arguments = (dy_RD, leaves[0], leaves[1], h_P2F, *leaves[2:], *layout, *mains)
        detached = [argument.detach() for argument in arguments]
        torch.library.opcheck(ops.grouped_mlp_bwd_into, (*detached, "reference"))


def test_it_compiles_as_one_graph() -> None:
    leaves, layout, dy_RD = operands([2, 3], rows=4, width=8, hidden=4, slots=2)
    for leaf in leaves:
        leaf.requires_grad_()

    def run(compiled: bool) -> list[Tensor]:
        function = torch.compile(grouped_mlp, fullgraph=True, backend="aot_eager")
        y_RD = (function if compiled else grouped_mlp)(*leaves, layout)
        return [y_RD, *torch.autograd.grad(y_RD, leaves, dy_RD)]

    for compiled, eager in zip(run(True), run(False), strict=True):
        assert torch.equal(compiled, eager)
