"""AdamW against torch's, and SGD by hand."""

import pytest
import torch
from torch import Tensor

from olmo_shard.config import OptimConfig
from olmo_shard.optim.adamw import DecayRuns, SliceState, StepScalars, adamw_, sgd_
from tests.support.close import close

CONFIG = OptimConfig(beta1=0.8, beta2=0.9, eps=1e-6)


def scalars(lr: float, divisor: float = 1.0, skip: float = 0.0, step: float = 1.0) -> StepScalars:
    return StepScalars(
        lr=lr,
        config=CONFIG,
        divisor=torch.tensor(divisor),
        skip=torch.tensor(skip),
        step=torch.tensor(step),
    )


def slice_state(main: Tensor, grad: Tensor, model: Tensor | None = None) -> SliceState:
    moments = torch.zeros_like(main), torch.zeros_like(main)
    return SliceState(main, grad, *moments, main if model is None else model)


def test_adamw_equals_torchs_by_decay_group_and_writes_the_model():
    """Two groups take turns; 10 elements at the end are padding."""
    torch.manual_seed(0)
    main, model = torch.randn(1000), torch.zeros(1000, dtype=torch.bfloat16)
    main[990:] = 0
    # An update is at most about lr, whatever cancels in the moments.
    scale = main.abs() + 5 * 0.01
    decayed, free = [(0, 300), (500, 900)], [(300, 500), (900, 990)]
    references = {
        decay: [torch.nn.Parameter(main[start:end].clone()) for start, end in ranges]
        for decay, ranges in ((0.1, decayed), (0.0, free))
    }
    optimizer = torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for decay, params in references.items()],
        lr=0.01,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    state = slice_state(main, torch.zeros(1000), model)
    runs = DecayRuns([300, 200, 400, 100], (0.1, 0.0))
    for step in range(1, 6):
        gradient = torch.randn(1000)
        gradient[990:] = 0
        for ranges, params in ((decayed, references[0.1]), (free, references[0.0])):
            for (start, end), parameter in zip(ranges, params, strict=True):
                parameter.grad = gradient[start:end] / 2
        optimizer.step()
        state.grad.copy_(gradient)
        adamw_(state, runs, scalars(0.01, divisor=2.0, step=step))
    for ranges, params in ((decayed, references[0.1]), (free, references[0.0])):
        for (start, end), parameter in zip(ranges, params, strict=True):
            close(main[start:end], parameter, scale=scale[start:end])
    assert main[990:].count_nonzero() == 0
    assert torch.equal(model, main.bfloat16())


def test_sgd_by_hand():
    main, gradient = torch.tensor([1.0, 2.0]), torch.tensor([4.0, 8.0])
    runs = DecayRuns([1, 1], (0.1, 0.0))
    model = torch.zeros(2, dtype=torch.bfloat16)
    sgd_(main, gradient, model, runs, scalars(0.5, divisor=2.0))
    close(main, torch.tensor([0.95 - 1.0, 2.0 - 2.0]), scale=torch.tensor([0.95 + 1.0, 2.0 + 2.0]))
    assert torch.equal(model, main.bfloat16())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_skipped_step_moves_nothing(bad):
    runs = DecayRuns([2], (0.1, 0.0))
    main, gradient = torch.tensor([1.0, 2.0]), torch.tensor([bad, 1.0])
    sgd_(main, gradient.clone(), main, runs, scalars(0.5, skip=1.0))
    assert main.tolist() == [1.0, 2.0]
    state = slice_state(main, gradient)
    state.exp_avg.copy_(torch.tensor([0.1, 0.2]))
    state.exp_avg_sq.copy_(torch.tensor([0.3, 0.4]))
    before = [tensor.clone() for tensor in (state.main, state.exp_avg, state.exp_avg_sq)]
    adamw_(state, runs, scalars(0.5, bad, 1.0))
    after = (state.main, state.exp_avg, state.exp_avg_sq)
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
