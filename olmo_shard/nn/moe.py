"""The mixture-of-experts layer: route, dispatch, run experts, combine."""

from torch import Tensor, nn

from olmo_shard.config import ModelConfig
from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.local import LocalDispatcher
from olmo_shard.nn.experts import RoutedExperts
from olmo_shard.nn.feed_forward import FeedForward
from olmo_shard.nn.router import Router, RouterStats


class MoE(nn.Module):
    """Routed experts, and shared experts computed while the rows travel."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.router = Router(config)
        self.experts = RoutedExperts(moe.num_experts, config.d_model, moe.hidden)
        self.shared_experts = (
            FeedForward(config.d_model, moe.num_shared_experts * moe.hidden)
            if moe.num_shared_experts
            else None
        )
        self.dispatcher: TokenDispatcher = LocalDispatcher(moe.num_experts)

    def forward(self, x_BSD: Tensor, labelled_BS: Tensor) -> tuple[Tensor, RouterStats]:
        routing, stats = self.router(x_BSD, labelled_BS)
        flight = self.dispatcher.start(x_BSD.flatten(0, 1), *routing)
        shared = self.shared_experts(x_BSD) if self.shared_experts else None
        rows = self.dispatcher.finish(flight)
        out_TD = self.dispatcher.combine(self.experts(rows), rows.handle)
        out_BSD = out_TD.view_as(x_BSD)
        return (out_BSD if shared is None else out_BSD + shared), stats
