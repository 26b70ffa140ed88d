"""The cost of communication: calls and bytes per kind of collective, and the time spent waiting."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class StepCommStats:
    """Communication of one rank while ``CommStats.measure`` was active, per kind of collective."""

    calls: Counter[str] = field(default_factory=Counter)
    """Number of calls."""
    bytes: Counter[str] = field(default_factory=Counter)
    """Bytes sent to other ranks."""
    bytes_by_layer: Counter[int] = field(default_factory=Counter)
    """Bytes sent per MoE layer: token rows, their metadata and their gradients."""
    _device_counts: list[tuple[str, int, Tensor, int]] = field(default_factory=list)
    _waits: list[tuple[str, int | None, Callable[[], float]]] = field(default_factory=list)

    def resolve_device_counts(self) -> None:
        """Add the row counts that are still on the device. Synchronises with the device.

        Call it before reading ``bytes`` or ``bytes_by_layer``.
        """
        if not self._device_counts:
            return
        # One transfer for all counts: each transfer waits for the device.
        rows = torch.stack([rows for _, _, rows, _ in self._device_counts]).tolist()
        for (kind, layer, _, row_bytes), num_rows in zip(self._device_counts, rows, strict=True):
            self.bytes[kind] += num_rows * row_bytes
            self.bytes_by_layer[layer] += num_rows * row_bytes
        self._device_counts.clear()

    def exposed_seconds(self) -> dict[str, float]:
        """Seconds per kind in which computation stood still for communication.

        On CUDA this waits for the last wait's events. Call it when the step's metrics are read.
        """
        seconds: dict[str, float] = {}
        for kind, _, read in self._waits:
            seconds[kind] = seconds.get(kind, 0.0) + read()
        return seconds

    def waited_by_layer(self) -> dict[int, float]:
        """Seconds per MoE layer spent waiting for other ranks' rows; part of the exposed time."""
        seconds: dict[int, float] = {}
        for _, layer, read in self._waits:
            if layer is not None:
                seconds[layer] = seconds.get(layer, 0.0) + read()
        return seconds

    def add_device_count(self, kind: str, layer: int, rows: Tensor, row_bytes: int) -> None:
        """Record rows whose number is a tensor on the device; see ``resolve_device_counts``."""
        self.calls[kind] += 1
        self._device_counts.append((kind, layer, rows, row_bytes))

    def add_wait(self, kind: str, layer: int | None, read: Callable[[], float]) -> None:
        """Record a wait; ``read`` returns its seconds and may synchronise with the device."""
        self._waits.append((kind, layer, read))


class CommStats:
    """Communication of this process since it started, and separately inside ``measure``."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._measured: StepCommStats | None = None

    def add(self, kind: str, num_bytes: int, layer: int | None = None) -> None:
        """Count a collective, or one part of its payload.

        :param num_bytes: bytes that this rank sends to other ranks.
        :param layer: MoE layer that the payload belongs to, if any.
        """
        for counts in (self, self._measured):
            if counts is not None:
                counts.calls[kind] += 1
                counts.bytes[kind] += num_bytes
        if layer is not None and self._measured is not None:
            self._measured.bytes_by_layer[layer] += num_bytes

    def add_device_count(self, kind: str, rows: Tensor, row_bytes: int, layer: int) -> None:
        """Like ``add``, for a row count on the device. Counted inside ``measure`` only.

        :param rows: integer scalar.
        """
        if self._measured is not None:
            self._measured.add_device_count(kind, layer, rows, row_bytes)

    @contextmanager
    def measure(self) -> Iterator[StepCommStats]:
        """Also count the calls made inside this context separately. Waits are timed only here."""
        before, self._measured = self._measured, StepCommStats()
        try:
            yield self._measured
        finally:
            self._measured = before

    @contextmanager
    def waiting(self, kind: str, device: torch.device, layer: int | None = None) -> Iterator[None]:
        """Time the wait inside: of this thread on a CPU, of the current stream on CUDA."""
        if self._measured is None:
            yield
        elif device.type == "cuda":
            # Events are read later: reading them here would stop the host.
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._measured.add_wait(kind, layer, lambda: _seconds_between(start, end))
        else:
            begun = time.perf_counter()
            yield
            seconds = time.perf_counter() - begun
            self._measured.add_wait(kind, layer, lambda: seconds)


def _seconds_between(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    end.synchronize()
    return start.elapsed_time(end) / 1000


comm_stats = CommStats()
"""The communication of this process."""
