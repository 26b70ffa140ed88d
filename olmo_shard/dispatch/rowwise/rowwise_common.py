"""What the rowwise transports on CPUs and on GPUs share: the state of their one exchange.

A rowwise transport writes each row, and the metadata of the row, straight into the mailbox of the
rank that needs it. Counts arrive with the rows, so nothing is exchanged beforehand. Rows for this
rank itself never travel.

Shape letters: T tokens, D width, W ranks, m slots of a row, S rows sent, R rows received.
"""

from dataclasses import dataclass

from torch import Tensor

from olmo_shard.dispatch.mailbox.mailbox_layout import MailboxLayout
from olmo_shard.dispatch.row_plan import DispatchPlan
from olmo_shard.dispatch.transport import RecvCounts

DISPATCH_METADATA_BYTES = 8
"""Metadata of a slot in the dispatch direction: an FP32 weight and an int32 expert id."""
COMBINE_METADATA_BYTES = 4
"""Metadata of a slot in the combine direction: an FP32 gradient."""


@dataclass(frozen=True, kw_only=True)
class SentRows:
    """This rank's part of the dispatch direction, kept from ``send_rows`` to ``receive_rows``."""

    x_TD: Tensor
    plan: DispatchPlan
    weights_Sm: Tensor | None
    """FP32 [S, m]; ``None`` if the rows travel alone."""
    recv_counts: RecvCounts | None
    """Number of rows to expect from each rank, if a previous dispatch has established it."""


@dataclass(frozen=True, kw_only=True)
class ReturnedRows:
    """This rank's part of the combine direction, from ``return_rows`` to its finish."""

    own_rows: Tensor
    """[own, D]: rows that this rank returns to itself; on GPUs followed by unused rows."""
    weights_Rm: Tensor | None
    """FP32 [R, m]: router-weight gradients for all ranks; ``None`` if the rows travel alone."""
    recv_counts: RecvCounts
    """Number of rows returned to each rank."""


class OutstandingExchange:
    """The one exchange that may be outstanding: see [Note: four exchanges] in ``transport.py``."""

    def __init__(self) -> None:
        self._sent: SentRows | None = None
        self._returned: ReturnedRows | None = None

    def start(self, rows: SentRows | ReturnedRows) -> None:
        """Keep what the finish of the exchange needs. The mailbox asserts that it was idle."""
        if isinstance(rows, SentRows):
            self._sent = rows
        else:
            self._returned = rows

    def take_sent(self) -> SentRows:
        """What ``start`` kept of a ``send_rows``; the exchange ends."""
        assert self._sent is not None, "no send_rows is outstanding"
        sent, self._sent = self._sent, None
        return sent

    def take_returned(self) -> ReturnedRows:
        """What ``start`` kept of a ``return_rows``; the exchange ends."""
        assert self._returned is not None, "no return_rows is outstanding"
        returned, self._returned = self._returned, None
        return returned


def assert_row_type(rows: Tensor, layout: MailboxLayout) -> None:
    """Assert that rows have the mailbox's type and width. Larger rows would overflow a region."""
    assert (rows.dtype, rows.shape[1]) == (layout.dtype, layout.width), "not the mailbox's rows"
