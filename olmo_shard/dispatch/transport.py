"""What moves token rows between ranks: the interface of a transport, and the rows that it delivers.

Shape letters: T tokens, D width, K top-k, W ranks of the expert-parallel group, m = min(K, e) slots
of a row with e local experts, S rows that this rank sends, R rows that it receives, P pairs of a
received row and a local expert.

[Note: four exchanges] Rows move in two directions. The *dispatch direction* leads from the ranks
that hold the tokens (sources) to the ranks that hold the experts (owners). The *combine direction*
leads from the owners back to the sources, where the rows of each token are added. A MoE layer makes
four exchanges, which is the minimum:

    pass      exchange   direction   payload
    forward   dispatch   dispatch    rows, router weights, expert ids
    forward   combine    combine     one pre-summed row for each received row
    backward  combine    dispatch    gradient rows
    backward  dispatch   combine     gradient rows, router-weight gradients

So the backward of each exchange is the other exchange. Each exchange is a start and a finish, which
are two autograd nodes. The four nodes call the four verbs of a transport:

    node             forward                 backward
    dispatch start   send_rows               receive_returned_rows
    dispatch finish  receive_rows            return_rows
    combine start    return_rows             receive_rows
    combine finish   receive_returned_rows   send_rows

Work between a start and its finish overlaps the exchange. The autograd engine runs nodes in reverse
order of creation, so the backward of that work overlaps the exchange of the backward pass. An empty
tensor joins a start to its finish. The tensor fixes the order of the nodes and carries no data.

At most one exchange is outstanding at any time, and every transport asserts it. The nodes save no
tensors, so backward never starts a recompute (activation checkpointing) inside an exchange. A
recompute stops as soon as it has all tensors that backward needs, which is after the routed
experts: they save their rows. (Frozen experts whose rows need no gradient save nothing. In such a
model a recompute could stop inside a dispatch, and the next exchange would fail its assertion.) The
nodes in ``fused_experts.py`` do save tensors; its docstring explains why they may.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from olmo_shard.dispatch.row_plan import DispatchPlan
from olmo_shard.kernels.backend import Backend


@dataclass(frozen=True, kw_only=True)
class RecvCounts:
    """Number of rows received from each rank."""

    counts_W: Tensor
    """int64 [W]; on the device where the host does not know the counts."""
    max_rows: int
    """Upper bound on the sum of the counts."""

    @cached_property
    def on_host(self) -> list[int]:
        """The counts as integers. Synchronises with the device where the counts are on one."""
        return self.counts_W.tolist()


@dataclass(frozen=True, kw_only=True)
class DispatchHandle:
    """What the combine and the backward pass need of a dispatch."""

    plan: DispatchPlan
    recv_counts: RecvCounts


@dataclass(frozen=True, kw_only=True)
class ReceivedRows:
    """The rows that reached this rank's experts, ordered by (source rank, token)."""

    x_RD: Tensor
    """[R, D] in compute precision."""
    weights_Rm: Tensor | None
    """FP32 [R, m]: router weight of each slot, 0 in empty slots; ``None`` in a backward pass."""
    local_expert_Rm: Tensor | None
    """int32 [R, m]: local expert of each slot, -1 in empty slots; ``None`` in a backward pass."""
    max_pairs: int | None
    """Upper bound on P, the number of filled slots; ``None`` if the transport knows no bound."""
    handle: DispatchHandle


class Transport(ABC):
    """Moves rows between the ranks of an expert-parallel group.

    Each start is followed by its finish before the next start: see [Note: four exchanges].

    :ivar rank: this rank in the group.
    :ivar num_ranks: W, the number of ranks in the group.
    :ivar max_tokens: largest number of tokens per micro-batch; ``None`` means no limit.
    """

    name: ClassVar[str]
    """Value of ``parallel.dispatch`` that selects the transport."""
    moves_rows: ClassVar[bool] = True
    """False if the experts read the tokens in place, so that a plan has one row for each token."""
    plan_backend: ClassVar[Backend] = "reference"
    """Back end that makes the plan. ``triton`` makes lists of static length."""
    rank: int
    num_ranks: int
    max_tokens: int | None = None

    @abstractmethod
    def send_rows(
        self,
        x_TD: Tensor,
        plan: DispatchPlan,
        topk_weights_TK: Tensor | None = None,
        recv_counts: RecvCounts | None = None,
    ) -> None:
        """Start the dispatch direction: send each token's row to the ranks of its experts.

        :param x_TD: [T, D] in any memory layout; must not change until ``receive_rows``.
        :param topk_weights_TK: FP32 [T, K]: router weights, which travel with the rows and the
            ids of their experts; ``None`` sends the rows alone.
        :param recv_counts: number of rows to expect from each rank, if a previous dispatch has
            established it; else ``None``.
        """

    @abstractmethod
    def receive_rows(self) -> ReceivedRows:
        """Finish the dispatch direction: wait for the rows of all ranks and copy them out."""

    @abstractmethod
    def return_rows(
        self, rows_RD: Tensor, handle: DispatchHandle, weights_Rm: Tensor | None = None
    ) -> None:
        """Start the combine direction: return one row for each received row to its source.

        :param rows_RD: [R, D] in any memory layout; must not change until
            ``receive_returned_rows``.
        :param weights_Rm: FP32 [R, m]: router-weight gradients, which travel with the rows.
        """

    @abstractmethod
    def receive_returned_rows(self, plan: DispatchPlan) -> tuple[Tensor, Tensor | None]:
        """Finish the combine direction: wait for all ranks and add the rows of each token.

        :returns: [T, D]; and the router-weight gradients FP32 [S, m] if ``return_rows`` sent any.
        """

    def check(self) -> None:  # noqa: B027  (most transports have nothing to check)
        """Raise if an asynchronous exchange has failed. May synchronise with the device.

        :raises LostPeerError: if a wait for a peer has failed.
        """

    def close(self) -> None:  # noqa: B027  (some transports hold no memory)
        """Free the transport's memory. The transport cannot be used afterwards."""


class PairTransport(Transport):
    """A transport whose kernels sum the expert outputs of a row while they return the row."""

    @abstractmethod
    def return_pairs(
        self,
        y_PD: Tensor,
        pair_Rm: Tensor,
        handle: DispatchHandle,
        weights_Rm: Tensor | None = None,
    ) -> None:
        """Start the combine direction: return the sum of each received row's pairs.

        :param y_PD: [P, D]: output of an expert for each pair of a row and a local expert.
        :param pair_Rm: int32 [R, m]: the pairs of each row, -1 in empty slots.
        :param weights_Rm: FP32 [R, m]: router-weight gradients, which travel with the rows.
        """
