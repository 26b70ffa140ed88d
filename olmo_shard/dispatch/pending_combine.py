"""A combine under way, and its autograd nodes.

Shape letters: T tokens, D width, R received rows. See [Note: four exchanges] in ``transport.py``.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from olmo_shard.dispatch.transport import DispatchHandle, Transport


class PendingCombine(NamedTuple):
    """Expert outputs that travel back to the ranks of their tokens.

    A named tuple rather than a dataclass, since FSDP2 looks for tensors in the output of a module
    by ``torch.utils._pytree``, which does not look into dataclasses.
    """

    order: Tensor
    """Empty: joins the autograd nodes and carries no data."""
    transport: Transport
    handle: DispatchHandle

    def wait(self) -> Tensor:
        """Wait for all ranks: [T, D], the sum of each token's rows."""
        return _CombineFinish.apply(*self)  # type: ignore[return-value]


def start_combine(rows_RD: Tensor, transport: Transport, handle: DispatchHandle) -> PendingCombine:
    """Start to return one row for each received row to its source.

    :param rows_RD: [R, D] in compute precision.
    """
    order = _CombineStart.apply(rows_RD, transport, handle)
    return PendingCombine(order, transport, handle)  # type: ignore[arg-type]


class _CombineStart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, transport: Transport, handle: DispatchHandle) -> Tensor:
        """Return the rows to their sources."""
        # Not saved for backward: see [Note: four exchanges] on recomputes.
        ctx.transport = transport
        transport.return_rows(rows_RD, handle)
        return rows_RD.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Wait for the gradients of the returned rows."""
        return ctx.transport.receive_rows().x_RD, None, None


class _CombineFinish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, order: Tensor, transport: Transport, handle: DispatchHandle) -> Tensor:
        """Wait for the returned rows; sum the rows of each token."""
        ctx.transport, ctx.handle = transport, handle
        return transport.receive_returned_rows(handle.plan)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradient of each token to the ranks that returned a row for the token."""
        (dout_TD,) = grads
        handle = ctx.handle
        # The counts are those of the dispatch, so no rank has to exchange or read them again.
        ctx.transport.send_rows(dout_TD, handle.plan, recv_counts=handle.recv_counts)
        return dout_TD.new_empty(0), None, None
