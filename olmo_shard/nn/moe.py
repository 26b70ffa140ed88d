"""The mixture-of-experts layer: route, dispatch, run experts, combine.

Shape letters: B sequences, S positions, D width, T = B x S tokens, K top-k, W ranks of the
expert-parallel group.
"""

from torch import Tensor, nn

from olmo_shard.config import ModelConfig
from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.local import LocalTransport
from olmo_shard.nn.experts import RoutedExperts
from olmo_shard.nn.feed_forward import FeedForward
from olmo_shard.nn.layer_stats import LayerStats
from olmo_shard.nn.readers import ParameterReaders
from olmo_shard.nn.recompute import decide_once
from olmo_shard.nn.router import Router


class MoE(nn.Module):
    """Routed experts, and shared experts that are computed while rows travel.

    :param layer: index of the block, for messages and metrics.
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
        # All experts on this rank, until parallelize installs the dispatcher of all layers.
        self.dispatcher = TokenDispatcher(LocalTransport(), moe.num_experts)

    def forward(self, x_BSD: Tensor, labelled_BS: Tensor) -> tuple[Tensor, LayerStats]:
        """The sum of routed and shared experts, [B, S, D], and the layer's statistics.

        :param x_BSD: hidden states in compute precision.
        :param labelled_BS: boolean [B, S]: tokens that have a label.
        """
        routing = self.router(x_BSD)
        weights_TK, labelled_T = routing.topk_weights_TK, labelled_BS.flatten()
        # A recompute must keep the same routes, or its exchanges would have other sizes.
        kept_TK = decide_once(
            lambda: self.dispatcher.apply_capacity(routing.topk_idx_TK, weights_TK, labelled_T)
        )
        # The rows start to travel.
        pending = self.dispatcher.dispatch(x_BSD.flatten(0, 1), kept_TK, weights_TK, self.layer)
        # Whatever needs no received row is computed here, while the rows travel.
        stats = {
            **self.router.stats(routing, labelled_BS),
            # int64 scalar: routes that capacity dropped, of tokens with a label.
            "dropped": ((kept_TK < 0) & labelled_T[:, None]).sum(),
            # int64 scalar: rows that the dispatch sends to other ranks, of all tokens.
            "rows_sent": pending.rows_to_others,
            # int64 [W]: rows that the dispatch sends to each rank of the expert-parallel group.
            "rows_W": pending.send_counts_W,
        }
        shared = self.shared_experts(x_BSD) if self.shared_experts else None
        # Waits for the rows; the outputs of the experts travel when the call returns.
        pending = self.experts(pending)
        # Work between these two lines overlaps the combine, in forward and in backward: shared
        # experts could be split, with their up-projection above and their down-projection here.
        out_BSD = pending.wait().view_as(x_BSD)
        return (out_BSD if shared is None else out_BSD + shared), stats

    def parameter_readers(self) -> ParameterReaders:
        """None: each part of the layer reads its own parameters."""
        return []
