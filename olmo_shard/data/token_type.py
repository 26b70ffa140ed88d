"""Whether the bytes of a token file are ids of the declared type.

[Note: wider types] Ids of a wider type, read as the declared type, come in groups: uint32 ids below
100,352, read as uint16, have a low word and then a high word, which is 0 or 1. A file is refused if
its bytes, read as some wider type, fulfil three conditions for a vocabulary of V ids:

1. The words above the low word never exceed those of V - 1, in any id of the file.
2. At least 40 low words exceed ``t``, the largest top word of an id below V (1 in the example).
3. These low words are not all equal.

False alarms: by condition 1 no top word exceeds ``t``. If the file does have the declared type, and
an id exceeds ``t`` as often in a top word's place as in a low word's, then each id above ``t`` in
one of the two places falls in the low word's place with probability 1/2. So the probability of a
false alarm is at most 2^-40 per wider type. Condition 3 exempts data of a short period, such as the
ids X, 0, X, 0, whose bytes are also those of one repeated wider id. Data in which every second id
is at most ``t`` by construction are refused.

Missed: files with fewer than 40 such low words; and uint16 ids read as uint8 with V > 65,280, since
their high bytes take every value.
"""

from codecs import getincrementaldecoder

import numpy as np

HEAD_BYTES = 1 << 16
"""Bytes at a file's start that are judged before anything else is read."""
_EVIDENCE = 40
"""Low words above the limit of top words, without which no wider type is assumed."""
_WIDER = {1: ("<u2", ">u2", "<u4", ">u4", "<u8", ">u8"), 2: ("<u4", ">u4", "<u8", ">u8")}
_WIDER[4] = ("<u8", ">u8")
_FORMATS = {
    b"\x93NUMPY": "has a NumPy header; write flat ids (array.tofile)",
    b"PK\x03\x04": "is a zip archive (.npz?); write flat ids (array.tofile)",
    b"MMIDIDX\x00\x00": "is the index (.idx) of a Megatron data set; name the .bin file",
    b"\x1f\x8b\x08": "is compressed with gzip; decompress it",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; decompress it",
    b"PAR1": "is a Parquet file; run olmo-shard prepare on it",
}
"""What other files begin with."""
_TEXT_CHARACTERS = 16
"""Different characters of a text, at least."""


class TypeScan:
    """Compares a file's bytes with every wider type, block by block; see [Note: wider types].

    :param declared: type of the ids as the config or meta.json states it.
    :param bound: V, the number of ids of the vocabulary.
    """

    def __init__(self, declared: np.dtype, bound: int) -> None:
        self.declared = declared
        self._readings = [
            _WiderReading(declared, np.dtype(wider), bound) for wider in _WIDER[declared.itemsize]
        ]

    def see(self, ids: np.ndarray, start: int) -> None:
        """Take the next block.

        :param ids: ids of the declared type [n]; n is a multiple of 8, but for the last block.
        :param start: offset of the block in the file, in ids of the declared type.
        """
        self._readings = [reading for reading in self._readings if reading.still_fits(ids, start)]

    def problem(self) -> str | None:
        """The right type and an example, if the declared type is wrong."""
        found = [reading.example for reading in self._readings if reading.is_certain()]
        if not found:
            return None
        start, words, wide = found[-1]
        kind, bits = spelled(wide.dtype), 8 * wide.itemsize
        fits = wide.dtype.byteorder != ">" and bits <= 32
        way_out = f"declare dtype {kind}" if fits else "write the ids as little-endian uint32"
        return (
            f"dtype {self.declared.name} is wrong: the ids are {kind}: at offset {start} the file "
            f"has {_listed(words)} as {self.declared.name}, and {_listed(wide)} as {kind}; "
            f"{way_out} (a file whose every second id is small by intention needs a wider type)"
        )


class _WiderReading:
    """The file's bytes as ids of one wider type."""

    def __init__(self, declared: np.dtype, wider: np.dtype, bound: int) -> None:
        self.wider, self.group = wider, wider.itemsize // declared.itemsize
        self._bits = 8 * declared.itemsize
        self._high_limit = (bound - 1) >> self._bits
        self._top_limit = (bound - 1) >> (8 * wider.itemsize - self._bits)
        self._evidence = 0
        self._lowest, self._highest = 1 << 64, -1
        self.example: tuple[int, np.ndarray, np.ndarray] = (0, np.empty(0), np.empty(0))
        """Offset, words and wide ids of the place where a low word first exceeds the limit."""

    def still_fits(self, ids: np.ndarray, start: int) -> bool:
        """Whether this and all earlier blocks fulfil condition 1."""
        wide = ids[: len(ids) // self.group * self.group].view(self.wider)
        if not len(wide):
            return True
        if int(wide.max()) >> self._bits > self._high_limit:
            return False
        low = wide & wide.dtype.type((1 << self._bits) - 1)
        above = low > self._top_limit
        if not above.any():
            return True
        if not self._evidence:
            first = int(above.argmax())
            words = ids[first * self.group : (first + 2) * self.group]
            self.example = start + first * self.group, words, wide[first : first + 2]
        self._evidence += int(above.sum())
        self._lowest = min(self._lowest, int(low[above].min()))
        self._highest = max(self._highest, int(low[above].max()))
        return True

    def is_certain(self) -> bool:
        """Conditions 2 and 3."""
        return self._evidence >= _EVIDENCE and self._lowest < self._highest


def format_problem(head: bytes, declared: np.dtype) -> str | None:
    """Which other format a file has, if its first bytes show one."""
    for start, problem in _FORMATS.items():
        if head.startswith(start):
            return problem
    if declared.itemsize > 1 and _is_text(head):
        return f"is UTF-8 text, not {declared.name} ids; run olmo-shard prepare on it"
    return None


def likely_type(head: bytes, declared: np.dtype, bound: int) -> str | None:
    """Another type that explains ids outside the vocabulary, with the two counts that show it.

    :param head: first bytes of the file.
    """
    ids = np.frombuffer(head[: len(head) // 8 * 8], dtype=declared)
    outside = int((ids >= bound).sum())
    if outside * 8 <= len(ids):
        return None
    swapped = declared.newbyteorder(">")
    narrower = [np.dtype(name) for name in ("<u2", "<u1")]
    others = [dtype for dtype in narrower if dtype.itemsize < declared.itemsize]
    for other in [swapped, *others] if declared.itemsize > 1 else []:
        if int(ids.view(other).max()) < bound:
            return (
                f"of the first {len(ids)} ids, {outside} are as {declared.name} outside the "
                f"vocabulary, and as {spelled(other)} none: that is probably their type"
            )
    return None


def spelled(dtype: np.dtype) -> str:
    """Name of a type for messages. int64 is NumPy's default, and the same bytes as uint64."""
    name = "int64 or uint64" if dtype.itemsize == 8 else dtype.name
    return f"big-endian {name}" if dtype.byteorder == ">" else name


def _is_text(head: bytes) -> bool:
    """Whether all bytes are UTF-8 without control characters, and enough of them differ."""
    try:
        text = getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    printed = set(text) - set("\t\n\r\f\ufeff")
    return len(printed) >= _TEXT_CHARACTERS and all(each.isprintable() for each in printed)


def _listed(ids: np.ndarray) -> str:
    return ", ".join(str(value) for value in ids.tolist())
