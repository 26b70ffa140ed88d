"""The flat layout of a class of parameters: pure arithmetic.

A class is all parameters that are reduced over the same group in the same type. Its flat space
holds them in reverse order of definition (roughly the order in which backward finishes them), each
start aligned, cut in buckets of whole parameters. A bucket is padded so that it splits into equal
slices, one for each rank of the group, with no regard for parameter borders: so nothing is ever
replicated because it did not divide, and a slice is at once the output of reduce-scatter, the input
of the optimizer and the input of all-gather.

Example: group of 2, a cap of 350 elements, parameters a (100), b (200), c (70) in order of
definition::

    bucket 0  [0, 384)    c at 0, b at 128 .. 328 (c ends at 70, the next multiple of 64 is 128)
    bucket 1  [384, 512)  a at 384 .. 484
    slices    rank 0: [0, 192) and [384, 448); rank 1: [192, 384) and [448, 512)
"""

import math
from dataclasses import dataclass

PARAMETER_ALIGNMENT = 64
"""Elements: 256 bytes in FP32, 128 in bf16, so that every parameter starts on a cache line."""

BUCKET_ALIGNMENT = 128
SLICE_ALIGNMENT = 16
"""Elements: a bucket ends on a multiple of lcm(group size x 16, 128), so that every rank's slice
starts on a multiple of 16 bytes, however many ranks there are."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A parameter's place in the flat space."""

    name: str
    start: int
    numel: int

    @property
    def end(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A part of the flat space that is reduced and gathered at once."""

    start: int
    end: int
    spans: tuple[Span, ...]

    def slice_of(self, rank: int, group_size: int) -> tuple[int, int]:
        """Start and end of a rank's slice."""
        length = (self.end - self.start) // group_size
        return self.start + rank * length, self.start + (rank + 1) * length


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of a parameter that lies in one rank's slice."""

    name: str
    start: int
    """In the flat space."""
    offset: int
    """In the parameter, flattened."""
    numel: int


def make_buckets(sizes: dict[str, int], group_size: int, cap: int) -> list[Bucket]:
    """Lay parameters out.

    :param sizes: elements of each parameter, in order of definition.
    :param group_size: ranks that share the class.
    :param cap: elements of a bucket, about; a larger parameter is a bucket of its own.
    """
    buckets: list[Bucket] = []
    spans: list[Span] = []
    start = position = 0
    for name, numel in reversed(sizes.items()):
        if spans and position + numel - start > cap:
            buckets.append(_close(start, spans, group_size))
            start = position = buckets[-1].end
            spans = []
        spans.append(Span(name=name, start=position, numel=numel))
        position = _round_up(position + numel, PARAMETER_ALIGNMENT)
    if spans:
        buckets.append(_close(start, spans, group_size))
    return buckets


def pieces(bucket: Bucket, rank: int, group_size: int) -> list[Piece]:
    """The parts of parameters in a rank's slice of a bucket, in flat order; padding is left out."""
    low, high = bucket.slice_of(rank, group_size)
    found = []
    for span in bucket.spans:
        start, end = max(low, span.start), min(high, span.end)
        if start < end:
            offset = start - span.start
            found.append(Piece(name=span.name, start=start, offset=offset, numel=end - start))
    return found


def _close(start: int, spans: list[Span], group_size: int) -> Bucket:
    multiple = math.lcm(group_size * SLICE_ALIGNMENT, BUCKET_ALIGNMENT)
    length = _round_up(spans[-1].end - start, multiple)
    return Bucket(start=start, end=start + length, spans=tuple(spans))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
