"""A transport that has waited in vain is what a user hears of, not a NaN. Runs on gloo."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from olmo_shard.data.loader import MicroBatch
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import LostPeerError
from olmo_shard.train.evaluate import evaluate
from tests.support.ranks import mesh_of
from tests.support.tiny import build, model_config, train, window_of


def lost_case(rank: Runtime) -> list[str]:
    step = build(rank, model_config(), {"expert_parallel": 2}, {"name": "sgd"})
    output = train(step, rank, 1, 4)[0]
    parallel_model = step.optimizer.parallel_model
    assert parallel_model.dispatcher_choice is not None
    parallel_model.raise_if_peer_lost()

    def check() -> None:
        raise LostPeerError("rank 1 is missing")

    def batches(*_: Any) -> Iterator[MicroBatch]:
        yield window_of(0, rank.rank, 2, 4)[0]

    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_model.dispatcher_choice.dispatcher, "check", check)
        validation: Any = SimpleNamespace(name="some", batches=batches)
        for act in (
            lambda: step.skip_cause(output),
            lambda: evaluate(parallel_model, [validation], mesh_of(rank, 2)),
        ):
            with pytest.raises(LostPeerError) as raised:
                act()
            said.append(str(raised.value))
    parallel_model.close()
    return said


def test_a_skipped_step_and_an_evaluation_name_the_missing_peer(ranks):
    for said in ranks(2).run(lost_case):
        assert said == ["rank 1 is missing"] * 2
