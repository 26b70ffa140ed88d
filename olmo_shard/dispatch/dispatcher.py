"""The seam between a MoE layer and the ranks of its experts.

A layer calls, in this order::

    kept_TK = dispatcher.apply_capacity(topk_idx_TK, topk_weights_TK, labelled_T)
    pending = dispatcher.dispatch(x_TD, kept_TK, topk_weights_TK, layer)
    ...                           # shared experts, while the rows travel
    pending = experts(pending)    # calls pending.run_experts(w_gate_up, w_down, ...)
    ...                           # whatever can overlap the combine
    out_TD = pending.wait()

``pending`` is a ``PendingDispatch`` first, then a ``PendingCombine``.

Shape letters: T tokens, D width, K top-k, W ranks of the expert-parallel group, E experts.
"""

from torch import Tensor

from olmo_shard.dispatch.pending_dispatch import PendingDispatch, start_dispatch
from olmo_shard.dispatch.row_plan import make_local_plan, make_plan
from olmo_shard.dispatch.transport import Transport
from olmo_shard.errors import ConfigurationError
from olmo_shard.kernels.backend import Backend
from olmo_shard.kernels.route_capacity import keep_within_capacity


class TokenDispatcher:
    """Sends token rows to their experts and brings one pre-summed row per rank back.

    All layers of a model share one dispatcher, since at most one exchange may be outstanding.

    :param transport: moves the rows.
    :param num_experts: E, over all ranks of the group.
    :param capacity_factor: limits the number of routes that an expert takes; ``None`` drops none.
    :param backend: decides by Triton kernels or by plain torch which routes an expert takes.
    """

    def __init__(
        self,
        transport: Transport,
        num_experts: int,
        capacity_factor: float | None = None,
        backend: Backend = "reference",
    ) -> None:
        assert num_experts % transport.num_ranks == 0
        self.transport = transport
        self.num_experts = num_experts
        self.num_local_experts = num_experts // transport.num_ranks
        self.capacity_factor = capacity_factor
        self.backend: Backend = backend

    def apply_capacity(
        self, topk_idx_TK: Tensor, topk_weights_TK: Tensor, labelled_T: Tensor
    ) -> Tensor:
        """Expert ids, int64 [T, K], with -1 for the routes that capacity drops.

        Each source rank decides for its own micro-batch, so the decision does not depend on where
        the experts are. It does depend on the micro-batch, by definition.

        :param topk_idx_TK: int64 [T, K] distinct global expert ids.
        :param topk_weights_TK: FP32 [T, K] router weights; an expert keeps the highest.
        :param labelled_T: boolean [T]: tokens that have a label.
        """
        if self.capacity_factor is None:
            return topk_idx_TK
        return keep_within_capacity(
            topk_idx_TK,
            topk_weights_TK,
            labelled_T,
            self.num_experts,
            self.capacity_factor,
            self.backend,
        )

    def dispatch(
        self, x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor, layer: int = 0
    ) -> PendingDispatch:
        """Start to send each token's row to the ranks of its experts.

        :param x_TD: [T, D] tokens in compute precision.
        :param topk_idx_TK: int64 [T, K] distinct global expert ids, -1 for dropped routes.
        :param topk_weights_TK: FP32 [T, K] router weights.
        :param layer: index of the model's block, for messages and metrics.
        :raises ConfigurationError: if there are more tokens than the transport has memory for.
        """
        transport = self.transport
        if transport.max_tokens is not None and len(x_TD) > transport.max_tokens:
            raise ConfigurationError(
                f"a micro-batch of {len(x_TD)} tokens does not fit a mailbox made for "
                f"{transport.max_tokens}: pass the size of the largest one to parallelize "
                "(max_tokens)"
            )
        # The plan is integers only. Tensors that need a gradient are arguments of the nodes.
        if transport.moves_rows:
            ranks, experts = transport.num_ranks, self.num_local_experts
            plan = make_plan(topk_idx_TK, ranks, experts, layer, transport.plan_backend)
        else:
            plan = make_local_plan(topk_idx_TK, layer)
        return start_dispatch(x_TD, topk_weights_TK, transport, plan)

    def check(self) -> None:
        """Raise if an asynchronous exchange has failed. May synchronise with the device.

        :raises LostPeerError: if a wait for a peer has failed.
        """
        self.transport.check()

    def close(self) -> None:
        """Free the transport's memory. The dispatcher cannot be used afterwards."""
        self.transport.close()
