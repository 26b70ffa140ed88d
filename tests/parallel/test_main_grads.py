"""Where the gradients of routed experts add up: in place where a window's are FP32.

Runs on gloo.
"""

import warnings
from typing import Any

import pytest

from olmo_shard.dispatch import dispatcher
from olmo_shard.distributed.runtime import Runtime
from tests.support.tiny import build, model_config, train


def places_case(rank: Runtime, parallel: dict[str, Any]) -> tuple[set[int], set[int]]:
    """Addresses that experts were told to add to, and those of their parameters' gradients."""
    told: set[int] = set()
    original = dispatcher.grouped_mlp

    def spy(*arguments: Any) -> Any:
        told.update(each.data_ptr() for each in arguments[-1] or ())
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # While it traces, torch.compile looks at the .grad of tensors that are no leaves.
        warnings.simplefilter("ignore")
        patch.setattr(dispatcher, "grouped_mlp", spy)
        step = build(rank, model_config(), parallel, {"name": "adamw"})
        train(step, rank, 1, 2, lr=1e-3)
    parameters = step.model.named_parameters()
    there = [p.grad for name, p in parameters if ".experts." in name and p.grad is not None]
    return told, {grad.data_ptr() for grad in there} if parallel["mode"] == "ddp" else set()


@pytest.mark.parametrize(
    ("parallel", "in_place"),
    [
        ({"mode": "ddp"}, True),
        ({"mode": "ddp", "expert_parallel": 2, "compute_dtype": "bfloat16"}, True),
        # Dense gradients go by hooks then, since torch.compile wants it so.
        pytest.param(
            {"mode": "ddp", "compute_dtype": "bfloat16", "compile": True},
            True,
            marks=pytest.mark.slow,
        ),
        ({"mode": "ddp", "ddp": {"grad_dtype": "bfloat16"}}, False),
        ({"mode": "fsdp"}, False),
    ],
)
def test_experts_add_to_the_windows_gradients_where_those_are_fp32(ranks, parallel, in_place):
    for told, there in ranks(2).run(places_case, parallel):
        assert told == (there if in_place else set())
        assert not in_place or len(there) == 4  # two layers, two weights each
