"""The mixture-of-experts layer: what is computed while rows travel."""

from typing import Any

import torch
from torch import Tensor

from olmo_shard.dispatch.local import LocalDispatcher
from olmo_shard.dispatch.plan import DispatchPlan
from olmo_shard.nn.moe import MoE
from olmo_shard.nn.recompute import checkpointed
from tests.support.tiny import model_config


class Observed(LocalDispatcher):
    """Notes each move of rows."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(8)
        self.events = events

    def push(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("push")
        super().push(*args, **kwargs)

    def pull(self) -> Any:
        self.events.append("pull")
        return super().pull()

    def push_back(self, *args: Any, **kwargs: Any) -> None:
        self.events.append("push back")
        super().push_back(*args, **kwargs)

    def pull_back(self, plan: DispatchPlan) -> Any:
        self.events.append("pull back")
        return super().pull_back(plan)


class Noted(torch.autograd.Function):
    """The identity; notes when it runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str], name: str) -> Tensor:
        ctx.events, ctx.name = events, name
        events.append(name)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.events.append(f"{ctx.name} backward")
        return grads[0], None, None


def test_shared_experts_and_losses_are_computed_while_rows_travel() -> None:
    """Forward and backward: between a push and its pull."""
    events: list[str] = []
    layer = MoE(model_config())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.router.reset_buffers()
    layer.dispatcher = Observed(events)
    assert layer.shared_experts is not None
    shared, stats = layer.shared_experts.forward, layer.router.stats

    def noted_shared(x: Tensor) -> Tensor:
        return Noted.apply(shared(x), events, "shared experts")  # type: ignore[return-value]

    def noted_stats(*args: Any) -> Any:
        found = stats(*args)
        return {**found, "lb_loss": Noted.apply(found["lb_loss"], events, "losses")}

    layer.shared_experts.forward = noted_shared  # type: ignore[method-assign]
    layer.router.stats = noted_stats  # type: ignore[method-assign]
    x = torch.randn(2, 5, 36, requires_grad=True)
    out, found = layer(x, torch.ones(2, 5, dtype=torch.bool))
    assert events == ["push", "losses", "shared experts", "pull", "push back", "pull back"]

    events.clear()
    (out.sum() + found["lb_loss"]).backward()
    moves = [event for event in events if "backward" not in event]
    assert moves == ["push", "pull", "push back", "pull back"]
    shared_at = events.index("shared experts backward")
    assert events.index("push back") < shared_at < events.index("pull back")


def test_a_recompute_keeps_the_routes_that_the_forward_kept() -> None:
    """A second decision on weights that differ in the last bit could drop others."""
    layer = MoE(model_config())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.router.reset_buffers()
    layer.dispatcher = Observed([])
    decided: list[Tensor] = []

    def admit(topk_idx_TK: Tensor, *_: Tensor) -> Tensor:
        kept = topk_idx_TK.clone()
        kept[len(decided) :: 2] = -1
        decided.append(kept)
        return kept

    layer.dispatcher.admit = admit  # type: ignore[method-assign]
    x = torch.randn(2, 5, 36, requires_grad=True)
    out, _ = checkpointed(layer.forward)(x, torch.ones(2, 5, dtype=torch.bool))
    out.sum().backward()
    assert len(decided) == 1
    assert layer.dispatcher.events.count("push") == 3, "forward, recompute, backward"
