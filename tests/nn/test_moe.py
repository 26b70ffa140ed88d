"""The mixture-of-experts layer: what is computed while rows travel."""

from typing import Any

import torch
from torch import Tensor

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.local import LocalTransport
from olmo_shard.dispatch.row_plan import DispatchPlan
from olmo_shard.dispatch.transport import ReceivedRows
from olmo_shard.nn.moe import MoE
from olmo_shard.nn.recompute import checkpointed
from tests.support.tiny import model_config


class Observed(LocalTransport):
    """Records each move of rows."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def send_rows(self, *args: Any, **kwargs: Any) -> None:
        """Record the move."""
        self.events.append("send")
        super().send_rows(*args, **kwargs)

    def receive_rows(self) -> ReceivedRows:
        """Record the move."""
        self.events.append("receive")
        return super().receive_rows()

    def return_rows(self, *args: Any, **kwargs: Any) -> None:
        """Record the move."""
        self.events.append("return")
        super().return_rows(*args, **kwargs)

    def receive_returned_rows(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        """Record the move."""
        self.events.append("receive returned")
        return super().receive_returned_rows(plan)


class Noted(torch.autograd.Function):
    """The identity; records when it runs."""

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
    """In forward and in backward: between the start of an exchange and its finish."""
    events: list[str] = []
    layer = MoE(model_config())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.router.reset_buffers()
    layer.dispatcher = TokenDispatcher(Observed(events), 8)
    assert layer.shared_experts is not None
    shared, stats = layer.shared_experts.forward, layer.router.stats

    def noted_shared(x: Tensor) -> Tensor:
        return Noted.apply(shared(x), events, "shared experts")  # type: ignore[return-value]

    def noted_stats(*args: Any) -> Any:
        router_stats = stats(*args)
        return {
            **router_stats,
            "lb_loss": Noted.apply(router_stats["lb_loss"], events, "losses"),
        }

    layer.shared_experts.forward = noted_shared  # type: ignore[method-assign]
    layer.router.stats = noted_stats  # type: ignore[method-assign]
    x = torch.randn(2, 5, 36, requires_grad=True)
    out, layer_stats = layer(x, torch.ones(2, 5, dtype=torch.bool))
    moves = ["send", "receive", "return", "receive returned"]
    assert events == [moves[0], "losses", "shared experts", *moves[1:]]

    events.clear()
    (out.sum() + layer_stats["lb_loss"]).backward()
    assert [event for event in events if "backward" not in event] == moves
    shared_at = events.index("shared experts backward")
    assert events.index("return") < shared_at < events.index("receive returned")


def test_work_after_the_experts_overlaps_the_combine() -> None:
    """In forward and in backward; shared experts may be split that way."""
    events: list[str] = []
    layer = MoE(model_config())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    dispatcher = TokenDispatcher(Observed(events), 8)
    x = torch.randn(5, 36, requires_grad=True)
    idx, weights = torch.tensor([[1, 3]]).expand(5, 2), torch.rand(5, 2, requires_grad=True)
    pending = layer.experts(dispatcher.dispatch(x, idx, weights))
    late: Any = Noted.apply(x * 2, events, "work")
    (pending.wait() + late).sum().backward()
    assert events == [
        *["send", "receive", "return", "work", "receive returned"],
        *["send", "work backward", "receive", "return", "receive returned"],
    ]


def test_a_recompute_keeps_the_routes_that_the_forward_kept() -> None:
    """A second decision on weights that differ in the last bit could drop others."""
    layer = MoE(model_config())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.router.reset_buffers()
    events: list[str] = []
    layer.dispatcher = TokenDispatcher(Observed(events), 8)
    decided: list[Tensor] = []

    def apply_capacity(topk_idx_TK: Tensor, *_: Tensor) -> Tensor:
        kept = topk_idx_TK.clone()
        kept[len(decided) :: 2] = -1
        decided.append(kept)
        return kept

    layer.dispatcher.apply_capacity = apply_capacity  # type: ignore[method-assign]
    x = torch.randn(2, 5, 36, requires_grad=True)
    out, _ = checkpointed(layer.forward)(x, torch.ones(2, 5, dtype=torch.bool))
    out.sum().backward()
    assert len(decided) == 1
    assert events.count("send") == 3, "forward, recompute, backward"
