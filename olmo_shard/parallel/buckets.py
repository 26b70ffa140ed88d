"""The flat layout of a class of parameters: pure arithmetic.

A *class* is all parameters that are reduced over one group of ranks. Its *flat space* holds the
parameters in reverse order of definition, which is roughly the order in which backward finishes
their gradients. Each parameter starts at an aligned position.

The flat space is cut into *buckets* of whole parameters. Each bucket is padded until it splits into
equal *slices*, one per rank of the group. A border between slices may fall inside a parameter. So
every parameter is sharded, whatever its size, and one slice is the output of reduce-scatter, the
input of the optimizer and the input of all-gather.

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
"""Elements: every bucket's length is a multiple of this number."""

SLICE_ALIGNMENT = 16
"""Elements: every slice's length is a multiple of this number. A slice then starts on a multiple of
16 bytes, whatever the number of ranks."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A parameter's place in the flat space."""

    name: str
    start: int
    """First element, in the flat space."""
    numel: int

    @property
    def end(self) -> int:
        """Position after the last element."""
        return self.start + self.numel


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """A part of the flat space that one collective reduces and one collective gathers."""

    start: int
    end: int
    spans: tuple[Span, ...]

    def slice_of(self, rank: int, group_size: int) -> tuple[int, int]:
        """Start and end of a rank's slice, in the flat space."""
        length = (self.end - self.start) // group_size
        return self.start + rank * length, self.start + (rank + 1) * length


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of a parameter that is in one rank's slice."""

    name: str
    start: int
    """First element, in the flat space."""
    offset: int
    """First element, in the flattened parameter."""
    numel: int


def make_buckets(sizes: dict[str, int], group_size: int, cap: int) -> list[Bucket]:
    """Lay out the parameters of a class.

    :param sizes: number of elements of each parameter, in order of definition.
    :param group_size: number of ranks that share the class.
    :param cap: approximate number of elements per bucket. A larger parameter gets its own bucket.
    """
    buckets: list[Bucket] = []
    spans: list[Span] = []
    start = position = 0
    # Backward reaches the last parameter first.
    for name, numel in reversed(sizes.items()):
        # Close the bucket before a parameter that would exceed the cap, never inside a parameter.
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
    """Parts of parameters in a rank's slice of a bucket, in flat order and without the padding."""
    low, high = bucket.slice_of(rank, group_size)
    in_slice = []
    for span in bucket.spans:
        # The intersection of parameter and slice. A large parameter is in the slices of many ranks.
        start, end = max(low, span.start), min(high, span.end)
        if start < end:
            offset = start - span.start
            in_slice.append(Piece(name=span.name, start=start, offset=offset, numel=end - start))
    return in_slice


def _close(start: int, spans: list[Span], group_size: int) -> Bucket:
    """A bucket of these parameters, padded to equal and aligned slices."""
    multiple = math.lcm(group_size * SLICE_ALIGNMENT, BUCKET_ALIGNMENT)
    length = _round_up(spans[-1].end - start, multiple)
    return Bucket(start=start, end=start + length, spans=tuple(spans))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
