"""File endings, in upper or lower case, with the format and the compression that they mean."""

from dataclasses import dataclass
from typing import Literal

Format = Literal["text", "json", "parquet"]
"""Format of a file's content after decompression."""

TEXT = (".txt", ".text", ".md", ".rst", ".py")
"""Endings of text: a file is one document."""
JSON = (".jsonl", ".ndjson", ".json")
"""Endings of JSON Lines: a line is one JSON object, with the text in one of its fields."""
PARQUET = ".parquet"
"""Ending of Parquet: a row is one document."""
GZIP, ZSTD = ".gz", ".zst"
"""Endings of compressed text and JSON Lines, after the ending of the format."""
KNOWN = (
    f"{', '.join((*TEXT, *JSON))}, each also with {GZIP} or {ZSTD} after it, and {PARQUET} "
    "(upper or lower case)"
)
"""All known endings, for messages."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Format and compression of a file, according to its name."""

    format: Format
    """Format of the content."""
    compression: str = ""
    """``.gz``, ``.zst``, or nothing."""


def ending_of(name: str) -> Ending | None:
    """Return format and compression by a file's name; ``None`` for an unknown ending."""
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
    """Return ``.gz``, ``.zst``, or nothing, by a file's name."""
    return next((ending for ending in (GZIP, ZSTD) if name.lower().endswith(ending)), "")
