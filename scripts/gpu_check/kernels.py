"""Part a of the GPU check, first half: kernels of plans, capacity, sums and the optimizer.

Each kernel is compared with its reference. Integers, and sums of the same terms in the same order,
must be bitwise equal. Outputs are allocated full of NaN, or of the largest integer, so an element
that a kernel does not write is an error.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from olmo_shard.kernels.accumulate_grad import accumulate_grad
from olmo_shard.kernels.dispatch_plan import plan_ref, plan_triton
from olmo_shard.kernels.expert_layout import expert_layout, expert_layout_triton
from olmo_shard.kernels.fused_adamw import AdamWRates, AdamWTensors, adamw, pack_scalars
from olmo_shard.kernels.grouped_gemm import grouped_gemm, grouped_gemm_ref
from olmo_shard.kernels.route_capacity import capacity_ref, capacity_triton
from olmo_shard.kernels.sum_pairs import sum_pairs, sum_pairs_ref
from scripts.gpu_check.compare import Setup, close, equal, poisoned
from scripts.gpu_check.inputs import Draw, Kind, layout_of
from scripts.gpu_check.row import Check, Row

DTYPES = (torch.float32, torch.bfloat16)
SPECIAL = (0.0, -0.0, math.nan, math.inf, 1e-45, 1.0, 1 + 2**-23)
"""Router weights with an unusual order: zeros of both signs, NaN, infinity, neighbours."""


def checks(setup: Setup) -> Iterator[Check]:
    """The checks of these kernels."""
    yield Check("plan", lambda: [check_plan(setup)])
    yield Check("plan's reference, device and CPU", lambda: [check_plan_ref(setup)])
    yield Check("expert_layout", lambda: [check_layout(setup)])
    yield Check("capacity", lambda: [check_capacity(setup)])
    yield Check("sum_pairs", lambda: check_sum_pairs(setup))
    yield Check("adamw", lambda: [check_adamw(setup)])
    yield Check("accumulate_grad", lambda: [check_accumulate(setup)])
    if not setup.tiny:
        yield Check("rows past 2^31 elements", lambda: [check_far_rows(setup)])


def named(dtype: torch.dtype) -> str:
    """Name of a type, without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def plan_cases(setup: Setup) -> list[tuple[Tensor, int, int]]:
    """Expert of each route int64 [T, K], number of ranks, number of local experts.

    Top-k is above and below the number of local experts; one case has no token, one no route.
    """
    tokens = 9 if setup.tiny else 4099
    draw = Draw(setup, "plan")
    sizes: list[tuple[Kind, int, int, int, int, float]] = [
        ("uniform", tokens, 4, 3, 2, 0.2),
        ("skewed", tokens, 2, 4, 4, 0.0),
        ("uniform", tokens, 2, 1, 7, 1.0),
        ("uniform", 0, 2, 2, 2, 0.0),
        ("skewed", 32768, 8, 8, 8, 0.1),
        ("last", 2048, 8, 64, 2, 0.0),
    ]
    cases = []
    for kind, count, top_k, ranks, local, dropped in sizes[: 4 if setup.tiny else None]:
        idx, _ = draw.routing(kind, count, ranks * local, top_k, dropped)
        cases.append((idx, ranks, local))
    return cases


def check_plan(setup: Setup) -> Row:
    """Compare the plan kernels with the reference on the CPU."""
    pairs = {}
    for number, (idx, ranks, local) in enumerate(plan_cases(setup)):
        with poisoned(setup.device):
            plan = plan_triton(idx, ranks, local)
        expected = plan_ref(idx.cpu(), ranks, local)
        for name, result, reference in zip(plan._fields, plan, expected, strict=True):
            # The kernel's lists have a static length; entries after the last row are -1.
            rest = len(result) - len(reference)
            padding = reference.new_full((rest, *reference.shape[1:]), -1)
            pairs[f"{name} of case {number}"] = result, torch.cat([reference, padding])
    return equal("plan", pairs)


def check_plan_ref(setup: Setup) -> Row:
    """Compare the plan's reference on the device with the CPU.

    Dispatchers without kernels run the reference on GPUs, too. The numbers of local experts test
    divisions by numbers that are no powers of two.
    """
    pairs = {}
    for local in (41, 61, 64):
        idx = torch.arange(4 * local, device=setup.device)[:, None]
        for name, on_device, on_cpu in zip(
            ("token", "rows", "routes", "experts", "row", "slot"),
            plan_ref(idx, 4, local),
            plan_ref(idx.cpu(), 4, local),
            strict=True,
        ):
            pairs[f"{name} with {local} local experts"] = on_device, on_cpu
    return equal("plan's reference, device and CPU", pairs)


def check_layout(setup: Setup) -> Row:
    """Compare the expert layout with the reference, with exact and with spare room for pairs."""
    draw, rows = Draw(setup, "layout"), 21 if setup.tiny else 50_021
    cases: list[tuple[int, int, int, Kind, float]] = [
        (rows, 2, 5, "skewed", 0.3),
        (rows, 1, 3, "last", 0.0),
        (rows, 2, 4, "uniform", 1.0),
        (0, 2, 3, "uniform", 0.0),
        (16384, 8, 64, "uniform", 0.0),
        (3000, 4, 300, "skewed", 0.1),
    ]
    pairs = {}
    for number, case in enumerate(cases[: 4 if setup.tiny else None]):
        count, slots, experts, kind, empty = case
        idx, _ = draw.routing(kind, count, experts, slots, empty)
        table = idx.int()
        for room in (table.numel(), int((table >= 0).sum())):
            with poisoned(setup.device):
                layout = expert_layout_triton(table, experts, room)
            expected = expert_layout(table.cpu(), experts, room)
            for name, result, reference in zip(layout._fields, layout, expected, strict=True):
                pairs[f"{name} of case {number}, room {room}"] = result, reference
    return equal("expert_layout", pairs)


def check_capacity(setup: Setup) -> Row:
    """Compare the kept routes with the reference, with random and with equal router weights."""
    draw, tokens = Draw(setup, "capacity"), 20 if setup.tiny else 20_011
    special = torch.tensor(SPECIAL, device=setup.device)
    pairs = {}
    for factor in (0.5, 1.0, 1.25):
        for kind in ("random", "ties"):
            idx, weights = draw.routing("skewed", tokens, 6, 2, 0.1)
            if kind == "ties":
                weights = special[(draw.uniform(*idx.shape) * len(special)).long()]
            labelled = draw.chance(0.8, tokens)
            with poisoned(setup.device):
                kept = capacity_triton(idx, weights, labelled, 6, factor)
            expected = capacity_ref(idx.cpu(), weights.cpu(), labelled.cpu(), 6, factor)
            pairs[f"factor {factor}, {kind}"] = kept, expected
    return equal("capacity", pairs)


def check_sum_pairs(setup: Setup) -> Iterator[Row]:
    """Compare the sums of each row's pairs with the reference: bitwise in FP32."""
    draw = Draw(setup, "sum_pairs")
    sizes = [(9, 5, 2, 13)] if setup.tiny else [(1003, 7, 3, 131), (4096, 64, 8, 2048)]
    for dtype in DTYPES:
        pairs = {}
        for rows, experts, top_k, width in sizes:
            idx, _ = draw.routing("uniform", rows, experts, top_k, 0.2)
            layout = layout_of(idx, experts, spare=True)
            y = draw.normal(idx.numel(), width, dtype=dtype)
            with poisoned(setup.device):
                sums = sum_pairs(y, layout.pair_Rm)
            pairs[f"{rows} x {width}"] = sums, sum_pairs_ref(y.float(), layout.pair_Rm)
        if dtype == torch.float32:  # kernel and reference add in the same order
            yield equal("sum_pairs float32", pairs)
        else:
            yield close("sum_pairs bfloat16", dtype, pairs)


def check_adamw(setup: Setup) -> Row:
    """Compare two steps of AdamW with the reference, with and without bf16 weights, and skipped."""
    draw, rates = Draw(setup, "adamw"), AdamWRates(1e-2, 0.1, 0.9, 0.9999, 1e-8)
    numbers: dict[str, tuple[Tensor, Tensor]] = {}
    for numel in (1, 1025) if setup.tiny else (1, 1_000_003, 1 << 22):
        start = [draw.normal(numel) for _ in range(3)] + [draw.uniform(numel)]
        for dtype, skip in ((torch.bfloat16, 0.0), (None, 0.0), (torch.bfloat16, 1.0)):
            state, expected = (_state(start, dtype) for _ in range(2))
            for step in (1.0, 2.0):
                values = torch.tensor([2.0, skip, step], device=setup.device)
                divisor, skipped, count = values.unbind()
                scalars = pack_scalars(divisor, skipped, count, rates.beta1, rates.beta2)
                adamw(state, scalars, rates, "triton")
                adamw(expected, scalars, rates, "reference")
            for name, result, reference in zip(state._fields, state, expected, strict=True):
                if name == "model":  # compared below with the kernel's own main weight
                    continue
                assert result is not None
                assert reference is not None
                numbers[f"{name} {numel} skip {skip:.0f} {dtype}"] = result, reference
            if state.model is None:
                continue
            if not skip:
                rounding = (state.main - state.model.float()).abs() / state.main.abs()
                too_far = (rounding > 2**-7).sum()
                numbers[f"model {numel}"] = too_far, torch.zeros_like(too_far)
            else:
                assert state.model.isnan().all(), "a skipped step has written weights"
    return close("adamw", torch.float32, numbers)


def _state(start: list[Tensor], dtype: torch.dtype | None) -> AdamWTensors:
    main, grad, exp_avg, exp_avg_sq = (each.clone() for each in start)
    model = None if dtype is None else torch.full_like(main, torch.nan, dtype=dtype)
    return AdamWTensors(main, grad, exp_avg, exp_avg_sq, model)


def check_accumulate(setup: Setup) -> Row:
    """Compare the addition of gradients to FP32 main gradients with torch: bitwise."""
    draw, sums = Draw(setup, "accumulate"), {}
    for numel in (1, 2051) if setup.tiny else (1, 5_000_011, 1 << 22):
        for dtype in DTYPES:
            main, grad = draw.normal(numel), draw.normal(numel, dtype=dtype)
            expected = main + grad.float()
            accumulate_grad(main, grad, "triton")
            sums[f"{numel} {named(dtype)}"] = main, expected
    return equal("accumulate_grad", sums)


def check_far_rows(setup: Setup) -> Row:
    """Compare rows whose offsets exceed 31 bits; operand and result take 4.3 GB each."""
    width, draw = 4096, Draw(setup, "far")
    last = 2**31 // width
    a = torch.zeros(last + 1, width, dtype=torch.bfloat16, device=setup.device)
    a[last] = draw.normal(width, dtype=a.dtype)
    b = draw.experts(1, width, width // 2, a.dtype).gate_up
    offsets = torch.tensor([0, last + 1], dtype=torch.int32, device=setup.device)
    one = torch.tensor([0, 1], dtype=torch.int32, device=setup.device)
    result = grouped_gemm(a, b, offsets, transposed=True)
    expected = grouped_gemm_ref(a[last:].float(), b.float(), one, transposed=True)
    pairs = {"last row": (result[last:], expected)}
    pairs["row 0"] = result[:1], torch.zeros_like(expected)
    return close("rows past 2^31 elements", a.dtype, pairs)
