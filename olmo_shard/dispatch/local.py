"""The transport of an expert-parallel group of one rank: rows stay in place.

Shape letters: T tokens, D width, K top-k, R = T received rows, m = K slots of a row.
"""

from torch import Tensor

from olmo_shard.dispatch.row_plan import DispatchPlan
from olmo_shard.dispatch.transport import DispatchHandle, ReceivedRows, RecvCounts, Transport


class LocalTransport(Transport):
    """Copies nothing: the experts read the tokens themselves. The reference of all transports.

    Each token is one row, even a token without a route.
    """

    name = "local"
    moves_rows = False

    def __init__(self) -> None:
        self.rank, self.num_ranks = 0, 1
        self._sent: ReceivedRows | None = None
        self._returned: tuple[Tensor, Tensor | None] | None = None

    def send_rows(
        self,
        x_TD: Tensor,
        plan: DispatchPlan,
        topk_weights_TK: Tensor | None = None,
        recv_counts: RecvCounts | None = None,
    ) -> None:
        """See :meth:`Transport.send_rows`."""
        self._assert_idle()
        counts = RecvCounts(counts_W=plan.send_counts_W, max_rows=plan.num_tokens)
        with_metadata = topk_weights_TK is not None
        self._sent = ReceivedRows(
            # Detached: the autograd nodes are the only path from the rows to the tokens.
            x_RD=x_TD.detach(),
            weights_Rm=topk_weights_TK.detach() if with_metadata else None,
            local_expert_Rm=plan.local_expert_Sm if with_metadata else None,
            max_pairs=plan.slot_TK.numel(),
            handle=DispatchHandle(plan=plan, recv_counts=counts),
        )

    def receive_rows(self) -> ReceivedRows:
        """See :meth:`Transport.receive_rows`."""
        assert self._sent is not None, "no exchange is outstanding"
        received, self._sent = self._sent, None
        return received

    def return_rows(
        self, rows_RD: Tensor, handle: DispatchHandle, weights_Rm: Tensor | None = None
    ) -> None:
        """See :meth:`Transport.return_rows`."""
        self._assert_idle()
        self._returned = rows_RD.detach(), weights_Rm

    def receive_returned_rows(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        """See :meth:`Transport.receive_returned_rows`."""
        assert self._returned is not None, "no exchange is outstanding"
        returned, self._returned = self._returned, None
        return returned

    def _assert_idle(self) -> None:
        assert self._sent is None, "an exchange is already outstanding"
        assert self._returned is None, "an exchange is already outstanding"
