"""What communication costs: calls and bytes by kind, and how long computation waited for it."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class StepCommStats:
    """What one rank sent and waited for in a stretch of a run, by kind of collective."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    bytes_by_layer: Counter[int] = field(default_factory=Counter)
    """Of what belongs to a layer: its token rows, their metadata and gradients."""
    _device_counts: list[tuple[str, int, Tensor, int]] = field(default_factory=list)
    _waits: list[tuple[str, int | None, Callable[[], float]]] = field(default_factory=list)

    def resolve_device_counts(self) -> None:
        """Count what only the device knew; waits for it. Before bytes are read."""
        if not self._device_counts:
            return
        rows = torch.stack([rows for _, _, rows, _ in self._device_counts]).tolist()
        for (kind, layer, _, row_bytes), num_rows in zip(self._device_counts, rows, strict=True):
            self.bytes[kind] += num_rows * row_bytes
            self.bytes_by_layer[layer] += num_rows * row_bytes
        self._device_counts.clear()

    def exposed_seconds(self) -> dict[str, float]:
        """Time that computation stood still for communication.

        On CUDA it waits for the events at the last wait: call it when the step's figures are read.
        """
        seconds: dict[str, float] = {}
        for kind, _, read in self._waits:
            seconds[kind] = seconds.get(kind, 0.0) + read()
        return seconds

    def waited_by_layer(self) -> dict[int, float]:
        """The part of it that belongs to a layer: seconds that it waited for other ranks' rows."""
        seconds: dict[int, float] = {}
        for _, layer, read in self._waits:
            if layer is not None:
                seconds[layer] = seconds.get(layer, 0.0) + read()
        return seconds

    def add_device_count(self, kind: str, layer: int, rows: Tensor, row_bytes: int) -> None:
        self.calls[kind] += 1
        self._device_counts.append((kind, layer, rows, row_bytes))

    def add_wait(self, kind: str, layer: int | None, read: Callable[[], float]) -> None:
        self._waits.append((kind, layer, read))


class CommStats:
    """Totals of this process since it started, and of one stretch of it at a time."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._measured: StepCommStats | None = None

    def add(self, kind: str, num_bytes: int, layer: int | None = None) -> None:
        """Count a collective, or one part of what it carries."""
        for counts in (self, self._measured):
            if counts is not None:
                counts.calls[kind] += 1
                counts.bytes[kind] += num_bytes
        if layer is not None and self._measured is not None:
            self._measured.bytes_by_layer[layer] += num_bytes

    def add_device_count(self, kind: str, rows: Tensor, row_bytes: int, layer: int) -> None:
        """The same of rows that the device has counted; in a stretch alone.

        :param rows: integer scalar.
        """
        if self._measured is not None:
            self._measured.add_device_count(kind, layer, rows, row_bytes)

    @contextmanager
    def measure(self) -> Iterator[StepCommStats]:
        """Count what happens inside apart, too; only there is waiting timed."""
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
"""Of this process."""
