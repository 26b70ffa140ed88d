"""The test whether the bytes of a token file are ids of the declared type.

[Note: wider types] A wider id, read as the declared type, is a group of words. For example a uint32
id below 100,352, read as uint16, is a low word and a top word, and the top word is 0 or 1. A file
is refused if its bytes, read as some wider type, meet three conditions for a vocabulary of V ids:

1. In every wider id, the part above the low word is at most that part of the id V - 1.
2. At least 40 low words are above ``t``, the largest top word of an id below V (1 in the example).
3. These low words are not all equal.

False alarms. By condition 1 no top word is above ``t``. Suppose that the file does have the
declared type, and that ids above ``t`` are equally likely in the places of low words and of top
words. Then each of them is in the place of a low word with probability 1/2, so a false alarm has a
probability of at most 2^-40 per wider type. Condition 3 excludes data with a short period:
the ids X, 0, X, 0 have the bytes of one repeated wider id. Data in which every second id is at most
``t`` by construction are refused wrongly.

Misses. Files with fewer than 40 such low words are accepted. So are uint16 ids read as uint8 with
V > 65,280, whose high bytes take every value.
"""

from codecs import getincrementaldecoder

import numpy as np

HEAD_BYTES = 1 << 16
"""Bytes at a file's start that are tested before the rest of the file is read."""
_EVIDENCE = 40
"""Number of low words in condition 2."""
# Candidates for the wider type, by the declared type's size in bytes.
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
"""First bytes of files in other formats."""
_TEXT_CHARACTERS = 16
"""Number of different characters from which on a file may be a text."""


class TypeScan:
    """Test of a file's bytes against every wider type, block by block; see [Note: wider types].

    :param declared: type of the ids according to the config or meta.json.
    :param bound: V, the number of ids of the vocabulary.
    """

    def __init__(self, declared: np.dtype, bound: int) -> None:
        self.declared = declared
        self._readings = [
            _WiderReading(declared, np.dtype(wider), bound) for wider in _WIDER[declared.itemsize]
        ]

    def see(self, ids: np.ndarray, start: int) -> None:
        """Test the next block.

        :param ids: ids of the declared type [n]; n is a multiple of 8, except for the last block.
        :param start: offset of the block in the file, in ids of the declared type.
        """
        self._readings = [reading for reading in self._readings if reading.still_fits(ids, start)]

    def problem(self) -> str | None:
        """Describe the right type with an example, if the declared type is wrong; else ``None``."""
        examples = [reading.example for reading in self._readings if reading.is_certain()]
        if not examples:
            return None
        start, words, wide = examples[-1]
        kind, bits = spelled(wide.dtype), 8 * wide.itemsize
        # The loader reads little-endian ids of at most 32 bits; others must be written anew.
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
        # Limits of condition 1 (the part above the low word) and condition 2 (``t``).
        self._bits = 8 * declared.itemsize
        self._high_limit = (bound - 1) >> self._bits
        self._top_limit = (bound - 1) >> (8 * wider.itemsize - self._bits)
        # Low words above ``t``: their number, and the range of their values for condition 3.
        self._evidence = 0
        self._lowest, self._highest = 1 << 64, -1
        self.example: tuple[int, np.ndarray, np.ndarray] = (0, np.empty(0), np.empty(0))
        """Offset, words and wide ids at the first low word above ``t``."""

    def still_fits(self, ids: np.ndarray, start: int) -> bool:
        """Return whether this block meets condition 1, and count for conditions 2 and 3."""
        # Condition 1, on the largest id alone: words above the low word are its upper bits.
        wide = ids[: len(ids) // self.group * self.group].view(self.wider)
        if not len(wide):
            return True
        if int(wide.max()) >> self._bits > self._high_limit:
            return False
        # Low words above ``t`` are the evidence for conditions 2 and 3.
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
        """Return whether the blocks so far meet conditions 2 and 3."""
        return self._evidence >= _EVIDENCE and self._lowest < self._highest


def format_problem(head: bytes, declared: np.dtype) -> str | None:
    """Describe the format of a file that is no token file; ``None`` if its first bytes show none.

    :param head: first bytes of the file.
    :param declared: declared type of the ids.
    """
    for start, problem in _FORMATS.items():
        if head.startswith(start):
            return problem
    if declared.itemsize > 1 and _is_text(head):
        return f"is UTF-8 text, not {declared.name} ids; run olmo-shard prepare on it"
    return None


def likely_type(head: bytes, declared: np.dtype, bound: int) -> str | None:
    """Describe another type by which ids outside the vocabulary are inside; ``None`` if none is.

    :param head: first bytes of the file.
    :param declared: declared type of the ids.
    :param bound: number of ids of the vocabulary.
    """
    ids = np.frombuffer(head[: len(head) // 8 * 8], dtype=declared)
    # A few ids outside are damage or a wrong vocabulary, not a wrong type.
    outside = int((ids >= bound).sum())
    if outside * 8 <= len(ids):
        return None
    # The other byte order, and narrower types. Wider types are the task of ``TypeScan``.
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
    """Return the name of a type for messages. int64, NumPy's default, has the bytes of uint64."""
    name = "int64 or uint64" if dtype.itemsize == 8 else dtype.name
    return f"big-endian {name}" if dtype.byteorder == ">" else name


def _is_text(head: bytes) -> bool:
    """Whether the bytes are UTF-8 text without control characters, with enough different ones."""
    try:
        text = getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    printed = set(text) - set("\t\n\r\f\ufeff")
    return len(printed) >= _TEXT_CHARACTERS and all(
        character.isprintable() for character in printed
    )


def _listed(ids: np.ndarray) -> str:
    """The ids, separated by commas."""
    return ", ".join(str(value) for value in ids.tolist())
