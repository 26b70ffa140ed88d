"""``hidden`` and ``logits`` of a parallel model: weights arrive before them, too."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from olmo_shard.distributed.runtime import Runtime
from tests.support.close import same_figures
from tests.support.tiny import build, model_config, train, window_of


def entry_points_case(rank: Runtime, parallel: dict[str, Any]) -> tuple[float, float, list[int]]:
    """The loss of the forward after a step, the loss of the logits, and the hidden shape."""
    step = build(rank, model_config(), parallel, {"name": "sgd"})
    batch = window_of(9, rank.rank, rank.world_size, 4)[0]
    # Each step leaves its weights under way to the model, so each method must wait for them.
    train(step, rank, 1, 4)
    with torch.no_grad():
        hidden = step.model.hidden(batch.tokens_BS)
    train(step, rank, 1, 4, start=1)
    with torch.no_grad():
        logits = step.model.logits(batch.tokens_BS)
        expected = step.model(*batch)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten(), reduction="sum")
    return float(expected.cross_entropy), float(loss), list(hidden.shape)


@pytest.mark.parametrize(
    "parallel",
    [
        {"expert_parallel": 2},
        {"mode": "fsdp", "expert_parallel": 2},
        {"mode": "fsdp", "fsdp": {"reshard": "window"}},
    ],
)
def test_hidden_states_and_logits_can_be_had_apart_from_the_loss(
    ranks: Any, parallel: dict[str, Any]
) -> None:
    for expected, loss, shape in ranks(2).run(entry_points_case, parallel):
        same_figures(loss, expected)
        assert shape == [4, 12, 36]
