"""Flat token files: little-endian unsigned ids, nothing else.

OLMo-core and dolma write the same files (often with the ending .npy, although they have no NumPy
header).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path

import numpy as np

from olmo_shard.config import DataSource
from olmo_shard.data.meta import META, Split, read_meta
from olmo_shard.errors import DataError

_CHUNK = 1 << 22
"""Ids read at once by a scan."""
_HEAD_BYTES = 256
"""Read to see whether the declared type can be right."""


def _ignore(_: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One file of ids."""

    path: Path
    dtype: np.dtype
    eos_id: int | None
    vocab_size: int | None
    """Bound on the ids as the data states it; null for raw files."""
    expected_tokens: int | None = None
    sha256: str | None = None

    def ids(self) -> np.memmap:
        return np.memmap(self.path, dtype=self.dtype, mode="r")

    def num_tokens(self) -> int:
        return self.path.stat().st_size // self.dtype.itemsize

    def size_problem(self) -> str | None:
        """What is wrong with the file's size, if anything. Reads no data."""
        if not self.path.is_file():
            return f"{self.path}: no such file"
        size, item = self.path.stat().st_size, self.dtype.itemsize
        if size == 0:
            return f"{self.path}: empty (0 bytes)"
        if size % item:
            return f"{self.path}: {size} bytes is not a multiple of {item} ({self.dtype.name} ids)"
        expected = self.expected_tokens
        if expected is not None and size != expected * item:
            return (
                f"{self.path}: {size // item} ids, but {META} says {expected}: truncated or changed"
            )
        return None

    def head_problem(self) -> str | None:
        """What the first ids say against the declared type, if anything."""
        with self.path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        if head.startswith(b"\x93NUMPY"):
            return f"{self.path}: has a NumPy header; flat ids are needed (array.tofile)"
        whole = head[: len(head) // self.dtype.itemsize * self.dtype.itemsize]
        zeros = _ZeroPattern(self)
        zeros.see(np.frombuffer(whole, dtype=self.dtype))
        return zeros.problem()

    def id_problem(self, vocab_size: int, advance: Callable[[int], object] = _ignore) -> str | None:
        """The first id outside the vocabulary, or a wrong checksum. Reads the whole file.

        :param vocab_size: of the model; the data's own bound counts too.
        :param advance: called with the number of ids read since the last call.
        """
        bound = min(vocab_size, self.vocab_size or vocab_size)
        ids, digest, zeros = self.ids(), hashlib.sha256(), _ZeroPattern(self)
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            problem = outside(self, chunk, start, bound)
            if problem:
                return problem
            zeros.see(chunk)
            if self.sha256:
                digest.update(chunk.tobytes())
            advance(len(chunk))
        if self.sha256 and digest.hexdigest() != self.sha256:
            return f"{self.path}: the checksum differs from {META}: the file was changed"
        return zeros.problem()


class _ZeroPattern:
    """Ids of a wider type, read as a narrower one, have a zero in every second place."""

    _ENOUGH = 32

    def __init__(self, file: TokenFile) -> None:
        self.file = file
        self.seen = 0
        self.even_places = self.odd_places = False

    def see(self, ids: np.ndarray) -> None:
        """Chunks of an even number of ids, but for the last."""
        self.seen += len(ids)
        self.even_places = self.even_places or bool(ids[::2].any())
        self.odd_places = self.odd_places or bool(ids[1::2].any())

    def problem(self) -> str | None:
        if self.seen < self._ENOUGH or self.odd_places or not self.even_places:
            return None
        name = self.file.dtype.name
        return f"{self.file.path}: every second {name} is 0: the ids are of a wider type"


def outside(file: TokenFile, ids: np.ndarray, start: int, bound: int) -> str | None:
    """Where an id of the file is not below ``bound``: its place and value."""
    if not len(ids) or int(ids.max()) < bound:
        return None
    at = int(np.argmax(ids >= bound))
    return (
        f"{file.path}: id {int(ids[at])} at offset {start + at} is outside the vocabulary "
        f"of {bound} ids (if many are, {file.dtype.name} may be the wrong type)"
    )


def resolve(source: DataSource) -> list[TokenFile]:
    """The files of a source, in a fixed order.

    :raises DataError: naming every path that cannot be used.
    """
    folders = [path for path in source.paths() if Path(path).is_dir()]
    if not folders:
        return _raw_files(source)
    if len(source.paths()) > 1:
        raise DataError(
            f"data source {source.path}: a prepared folder stands alone; give each folder a source"
        )
    if source.dtype is not None or source.eos_id is not None:
        raise DataError(
            f"data source {source.path}: dtype and eos_id are for raw token files; a prepared "
            f"folder states them in {META}"
        )
    return [_prepared_file(Path(folders[0]), source.split)]


def _prepared_file(folder: Path, split: Split) -> TokenFile:
    meta = read_meta(folder)
    if not meta.tokens.get(split):
        raise DataError(f"data folder {folder} has no {split} split ({META} counts 0 tokens)")
    return TokenFile(
        path=folder / f"{split}.bin",
        dtype=np.dtype(meta.dtype),
        eos_id=meta.eos_id,
        vocab_size=meta.vocab_size,
        expected_tokens=meta.tokens[split],
        sha256=meta.sha256[split],
    )


def _raw_files(source: DataSource) -> list[TokenFile]:
    paths: list[Path] = []
    for pattern in source.paths():
        found = sorted(glob(pattern)) if has_magic(pattern) else [pattern]
        if not found:
            raise DataError(f"data source {pattern}: no file matches")
        paths += [Path(path) for path in found]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(f"data source: no such file or folder: {', '.join(missing)}")
    if source.split != "train":
        raise DataError(
            f"data source {source.path}: split = {source.split} is for a prepared folder; raw "
            "token files have no splits"
        )
    if source.dtype is None:
        raise DataError(
            f"data source {source.path}: raw token files need dtype (uint8, uint16 or uint32)"
        )
    dtype = np.dtype(source.dtype)
    return [
        TokenFile(path=path, dtype=dtype, eos_id=source.eos_id, vocab_size=None) for path in paths
    ]
