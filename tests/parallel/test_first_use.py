"""A layer that only some micro-batches of a window use has the same gradient in both modes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from olmo_shard.distributed.runtime import Runtime
from olmo_shard.nn.feed_forward import FeedForward
from tests.support.close import same_figures
from tests.support.tiny import SEQUENCES, build, figures, model_config, moe_layer, window_of

SGD = {"name": "sgd", "max_grad_norm": None}


def sometimes(layer: FeedForward, used: list[bool]) -> None:
    """Let each forward of a layer take its turn of ``used``: False gives zeros, without weights."""
    forward, turns = layer.forward, iter(used)

    def either(x: Tensor) -> Tensor:
        return forward(x) if next(turns) else torch.zeros_like(x)

    layer.forward = either


def first_use_case(
    rank: Runtime, parallel: dict[str, Any], used_by_rank: list[list[bool]]
) -> list[tuple[float, float]]:
    """Figures of two steps of four micro-batches; ``used_by_rank`` is about the shared expert."""
    step = build(rank, model_config(), parallel, SGD)
    shared = moe_layer(step.model, 1).shared_experts
    assert isinstance(shared, FeedForward)
    sometimes(shared, used_by_rank[rank.rank] * 2)
    micro = SEQUENCES // rank.world_size // 4
    windows = [window_of(index, rank.rank, rank.world_size, micro) for index in range(2)]
    return [figures(step(window, 0.05)) for window in windows]


LAST = [False, False, False, True]
FIRST = [True, False, False, False]
NEVER = [False] * 4


@pytest.mark.parametrize(
    "used_by_rank",
    [[LAST, LAST], [FIRST, FIRST], [NEVER, NEVER], [LAST, NEVER], [FIRST, LAST]],
    ids=["last", "first", "never", "last on one rank", "first and last"],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("reshard", ["forward", "window"])
def test_fsdp_has_the_gradient_of_ddp(
    ranks: Any, reshard: str, dtype: str, used_by_rank: list[list[bool]]
) -> None:
    """The first loss is equal to the bit, the first norm as FP32 sums are.

    After the first step the weights differ by the rounding of sums, in bf16 by a last place.
    """
    ddp = {"mode": "ddp", "compute_dtype": dtype}
    fsdp = {"mode": "fsdp", "compute_dtype": dtype, "fsdp": {"reshard": reshard}}
    expected = ranks(2).run(first_use_case, ddp, used_by_rank)[0]
    found = ranks(2).run(first_use_case, fsdp, used_by_rank)[0]
    assert found[0][0] == expected[0][0]
    same_figures(found[0], expected[0])
    same_figures(found, expected, getattr(torch, dtype))
