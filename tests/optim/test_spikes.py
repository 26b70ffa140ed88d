"""Steps far above those before are skipped, alike on every rank. Runs on gloo."""

import math
from typing import Any

import pytest
import torch

from olmo_shard.config import SpikeConfig
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.optim.spikes import SpikeFilter
from tests.support.tiny import build, model_config, train, window_of

CPU = torch.device("cpu")


def judged(spikes: SpikeFilter, loss: float, norm: float) -> bool:
    return bool(spikes.judge(torch.tensor([loss, norm], dtype=torch.float64)))


def filled(watch: str = "both", window: int = 4) -> SpikeFilter:
    spikes = SpikeFilter(SpikeConfig(watch=watch, sigmas=2.0, window=window), CPU)  # type: ignore[arg-type]
    for value in (1.0, 3.0, 1.0, 3.0)[:window]:
        assert judged(spikes, value, 10 * value)
    return spikes


def test_the_limit_is_mean_and_sigmas_of_the_window():
    """Losses 1, 3, 1, 3: mean 2, standard deviation 1; norms ten times as large."""
    assert filled().limits().tolist() == [4.0, 40.0]
    assert judged(filled(), 4.0, 40.0)
    assert not judged(filled(), 4.01, 40.0)
    assert not judged(filled(), 4.0, 40.1)


@pytest.mark.parametrize(
    ("watch", "loss", "norm"), [("loss", True, False), ("grad_norm", False, True)]
)
def test_only_what_is_watched_counts(watch, loss, norm):
    assert judged(filled(watch), 99.0, 1.0) is not loss
    assert judged(filled(watch), 1.0, 999.0) is not norm


def test_nothing_is_judged_before_the_window_is_full():
    spikes = SpikeFilter(SpikeConfig(window=3), CPU)
    assert [judged(spikes, value, 1.0) for value in (1.0, 1e6, 1.0, 1e7)] == [
        True,
        True,
        True,
        False,
    ]


def test_a_skipped_step_does_not_enter_the_window():
    spikes = filled()
    before = spikes.state()
    assert not judged(spikes, 100.0, 1.0)
    assert not judged(spikes, math.nan, 1.0)
    assert not judged(spikes, 1.0, math.inf)
    assert spikes.state() == before == [[1.0, 3.0, 1.0, 3.0], [10.0, 30.0, 10.0, 30.0]]
    assert judged(spikes, 2.0, 20.0)
    assert spikes.state()[0] == [3.0, 1.0, 3.0, 2.0]


@pytest.mark.parametrize("window", [2, 4, 6])
def test_the_window_is_saved_and_may_change_its_length(window):
    """Of a longer window the newest stay; a shorter one is filled up first."""
    spikes = SpikeFilter(SpikeConfig(window=window), CPU)
    spikes.load_state(filled().state())
    assert spikes.state()[0] == [1.0, 3.0, 1.0, 3.0][-window:]
    assert (spikes.limits() < math.inf).all() == (window <= 4)
    spikes.load_state([[], []])
    assert spikes.state() == [[], []]


def spike_case(rank: Runtime, parallel: dict[str, Any]) -> tuple[list[bool], float, str]:
    """Eight usual steps, one in which rank 1's logits are 64 times too large, one usual step."""
    step = build(rank, model_config(), parallel, {"name": "adamw", "max_grad_norm": None})
    step.spikes = SpikeFilter(SpikeConfig(watch="loss", sigmas=4.0, window=6), CPU)
    outputs = train(step, rank, 8, 4, lr=1e-3)

    def state() -> list[torch.Tensor]:
        optimizer, spikes = step.optimizer, step.spikes
        assert spikes is not None
        optimizer.parallel_model.wait()
        tensors = [*optimizer.exp_avgs, *optimizer.exp_avg_sqs, optimizer.step_count]
        tensors += [part.main for part in optimizer.slices] + [spikes.values, spikes.count]
        return [
            t.detach().clone() for t in (*tensors, *step.model.parameters(), *step.model.buffers())
        ]

    before = state()
    factor = 64 if rank.rank == 1 else 1
    handle = step.model.norm.register_forward_hook(lambda *args: factor * args[2])
    spiked = step(window_of(20, rank.rank, rank.world_size, 4), 1e-3)
    handle.remove()
    cause = step.skip_cause(spiked)
    changed = [
        float((a - b).abs().max()) for a, b in zip(before, state(), strict=True) if a.numel()
    ]
    (after,) = train(step, rank, 1, 4, lr=1e-3, start=8)
    return [bool(o.applied) for o in (*outputs, spiked, after)], max(changed), cause


@pytest.mark.parametrize("parallel", [{"expert_parallel": 2}])
def test_all_ranks_skip_a_spike_and_nothing_moves(ranks, parallel):
    results = ranks(2).run(spike_case, parallel)
    for applied, change, cause in results:
        assert applied == [True] * 8 + [False, True]
        assert cause.startswith("loss ")
        assert cause.endswith(", mean + 4 standard deviations of the last 6 steps")
        assert change == 0
    assert results[0] == results[1]
