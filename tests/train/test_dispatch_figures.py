"""Figures of the expert-parallel exchanges in a step's output."""

import time
from typing import Any

import pytest
import torch

from olmo_shard.distributed.runtime import Runtime
from olmo_shard.train.step_sums import StepOutput
from tests.support.close import same_figures
from tests.support.dispatch import TRANSPORTS
from tests.support.tiny import build, model_config, moe_layer, train


def straggler_case(rank: Runtime, transport: str) -> tuple[list[float], list[float]]:
    """Rank 1 is slow before each of its dispatches. Seconds waited by layer, and by rank."""
    parallel = {"expert_parallel": 2, "dispatch": transport}
    step = build(rank, model_config(), parallel, {"name": "sgd"})
    if rank.rank == 1:
        for layer in (1, 2):
            moe_layer(step.model, layer).register_forward_pre_hook(lambda *_: time.sleep(0.1))
    output = train(step, rank, 1, 4)[0]
    return output.waited_LN.sum(dim=1).tolist(), output.waited_LN.sum(dim=0).tolist()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slow_rank_is_the_one_that_waits_least(ranks: Any, transport: str) -> None:
    """By 4 x 100 ms: two layers, two micro-batches."""
    found = ranks(2).run(straggler_case, transport)
    assert found[0] == found[1], "all ranks know"
    by_layer, by_rank = found[0]
    assert by_rank[1] < by_rank[0]
    assert min(by_layer) > 0
    same_figures(sum(by_layer), sum(by_rank))


def rows_case(rank: Runtime, parallel: dict[str, Any], micro: int) -> dict[str, Any]:
    """Rows of the first MoE layer, by the step and counted from the routing."""
    step = build(rank, model_config(), parallel, {"name": "sgd"})
    expert_parallel = parallel["expert_parallel"]
    layer = moe_layer(step.model, 1)
    start, counted = layer.dispatcher.start, torch.zeros(expert_parallel)

    def noted(x: Any, idx: torch.Tensor, weights: Any, layer: int) -> Any:
        if layer == 1:
            owners = idx // (8 // expert_parallel)
            for owner in range(expert_parallel):
                counted[owner] += (owners == owner).any(dim=1).sum()
        return start(x, idx, weights, layer)

    layer.dispatcher.start = noted  # type: ignore[method-assign]
    output: StepOutput = train(step, rank, 1, micro)[0]
    return {
        "counted": counted.tolist(),
        "received": output.received_LN[0].tolist(),
        "sent": float(output.sums.layers["rows_sent"][0]),
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("expert_parallel", [2, 4])
@pytest.mark.parametrize("micro", [4, 1])
def test_rows_are_counted_for_each_rank_once(
    ranks: Any, transport: str, expert_parallel: int, micro: int
) -> None:
    """Four ranks, the expert-parallel groups apart, over all micro-batches of a window."""
    parallel = {"expert_parallel": expert_parallel, "dispatch": transport}
    found = ranks(4).run(rows_case, parallel, micro)
    for each in found:
        assert each["received"] == found[0]["received"]
        assert each["sent"] == found[0]["sent"]
    expected, to_others = [0.0] * 4, 0.0
    for source, each in enumerate(found):
        first = source // expert_parallel * expert_parallel
        for place, rows in enumerate(each["counted"]):
            expected[first + place] += rows
            to_others += rows if first + place != source else 0
    assert found[0]["received"] == expected
    assert found[0]["sent"] == to_others
    assert len(set(expected)) > 1
