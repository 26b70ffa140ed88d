"""File endings: which format and which compression each announces, in upper or lower case."""

from dataclasses import dataclass
from typing import Literal

Format = Literal["text", "json", "parquet"]

TEXT = (".txt", ".text", ".md", ".rst", ".py")
"""Each file is one document."""
JSON = (".jsonl", ".ndjson", ".json")
"""Each line is one JSON object with a text field."""
PARQUET = ".parquet"
GZIP, ZSTD = ".gz", ".zst"
KNOWN = (
    f"{', '.join((*TEXT, *JSON))}, each also with {GZIP} or {ZSTD} after it, and {PARQUET} "
    "(upper or lower case)"
)
"""The known endings, for messages."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The format and the compression of a file, as its name says."""

    format: Format
    compression: str = ""
    """``.gz``, ``.zst`` or nothing."""


def ending_of(name: str) -> Ending | None:
    """The ending of a file's name; ``None`` for an unknown one."""
    stem = name.lower()
    if stem.endswith(PARQUET):
        return Ending(format="parquet")
    compression = compression_of(stem)
    stem = stem.removesuffix(compression)
    if stem.endswith(TEXT):
        return Ending(format="text", compression=compression)
    if stem.endswith(JSON):
        return Ending(format="json", compression=compression)
    return None


def compression_of(name: str) -> str:
    """``.gz``, ``.zst`` or nothing."""
    return next((each for each in (GZIP, ZSTD) if name.lower().endswith(each)), "")
