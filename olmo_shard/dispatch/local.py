"""All experts on this rank: rows stay where they are."""

from torch import Tensor

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.exchange import DispatchHandle


class LocalDispatcher(TokenDispatcher):
    """The transport of an expert-parallel group of one, and the reference of the others."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(num_experts, num_ranks=1)
        self._in_flight: tuple[Tensor, ...] | None = None

    def exchange_counts(self, send_counts_W: Tensor) -> Tensor:
        return send_counts_W

    def send(self, payload: tuple[Tensor, ...], handle: DispatchHandle, outward: bool) -> None:
        assert self._in_flight is None, "an exchange is already outstanding"
        self._in_flight = payload

    def receive(self) -> tuple[Tensor, ...]:
        assert self._in_flight is not None, "no exchange is outstanding"
        payload, self._in_flight = self._in_flight, None
        return payload
