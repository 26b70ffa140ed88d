"""The mixture-of-experts layer: route, dispatch, run experts, combine."""

from torch import Tensor, nn

from olmo_shard.config import ModelConfig
from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.local import LocalDispatcher
from olmo_shard.nn.experts import RoutedExperts
from olmo_shard.nn.feed_forward import FeedForward
from olmo_shard.nn.layer_stats import LayerStats
from olmo_shard.nn.readers import ParameterReaders
from olmo_shard.nn.recompute import decide_once
from olmo_shard.nn.router import Router


class MoE(nn.Module):
    """Routed experts, and shared experts computed while the rows travel.

    :param layer: the block's number, for messages and figures.
    """

    def __init__(self, config: ModelConfig, layer: int = 0) -> None:
        super().__init__()
        moe = config.moe
        assert moe is not None
        self.layer = layer
        self.router = Router(config)
        self.experts = RoutedExperts(moe.num_experts, config.d_model, moe.hidden)
        self.shared_experts = (
            FeedForward(config.d_model, moe.num_shared_experts * moe.hidden)
            if moe.num_shared_experts
            else None
        )
        self.dispatcher: TokenDispatcher = LocalDispatcher(moe.num_experts)

    def forward(self, x_BSD: Tensor, labelled_BS: Tensor) -> tuple[Tensor, LayerStats]:
        routing = self.router(x_BSD)
        weights_TK, labelled_T = routing.topk_weights_TK, labelled_BS.flatten()
        kept_TK = decide_once(
            lambda: self.dispatcher.admit(routing.topk_idx_TK, weights_TK, labelled_T)
        )
        flight = self.dispatcher.start(x_BSD.flatten(0, 1), kept_TK, weights_TK, self.layer)
        # What needs no rows is computed while they travel.
        stats = {
            **self.router.stats(routing, labelled_BS),
            # int64 scalar: routes that capacity dropped, of tokens with a label.
            "dropped": ((kept_TK < 0) & labelled_T[:, None]).sum(),
            # int64 scalar: rows that the dispatch sends to other ranks, of all tokens.
            "rows_sent": flight.rows_to_others,
            # int64 [W]: rows that the dispatch sends to each rank of the expert-parallel group.
            "rows_W": flight.plan.send_counts_W,
        }
        shared = self.shared_experts(x_BSD) if self.shared_experts else None
        out_TD = self.dispatcher.run(flight, self.experts)
        out_BSD = out_TD.view_as(x_BSD)
        return (out_BSD if shared is None else out_BSD + shared), stats

    def parameter_readers(self) -> ParameterReaders:
        """None: each part of the layer reads its own parameters."""
        return []
