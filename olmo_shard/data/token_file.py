"""Flat token files: little-endian unsigned ids, nothing else.

OLMo-core and dolma write the same files (often with the ending .npy, although they have no NumPy
header).
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import cast

import numpy as np

from olmo_shard.config import DataSource
from olmo_shard.data.identity import FileIdentity, sample_digest
from olmo_shard.data.meta import META, Split, TokenType, read_meta
from olmo_shard.data.token_type import HEAD_BYTES, TypeScan, format_problem, likely_type
from olmo_shard.errors import DataError

_CHUNK = 1 << 22
"""Ids read at once by a scan; a multiple of 8, so that no wider id crosses a border."""


def _ignore(_: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One file of ids."""

    path: Path
    dtype: np.dtype
    eos_id: int | None
    vocab_size: int | None
    """Bound on the ids as the data states it; ``None`` for raw files."""
    expected_tokens: int | None = None
    sha256: str | None = None

    def ids(self) -> np.memmap:
        return np.memmap(self.path, dtype=self.dtype, mode="r")

    def num_tokens(self) -> int:
        return self.path.stat().st_size // self.dtype.itemsize

    def identity(self) -> FileIdentity:
        """:raises DataError: where the file cannot be read."""
        try:
            sample = sample_digest(self.path)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror}") from error
        return FileIdentity(
            path=str(self.path),
            dtype=cast("TokenType", self.dtype.name),
            tokens=self.num_tokens(),
            sample=sample,
            sha256=self.sha256,
        )

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

    def head_problem(self, vocab_size: int) -> str | None:
        """What the first bytes say against the declared type, if anything."""
        try:
            head = self._head()
        except OSError as error:
            return f"{self.path} cannot be read: {error.strerror}"
        problem = format_problem(head, self.dtype)
        if problem is None:
            scan = TypeScan(self.dtype, self.bound(vocab_size))
            scan.see(np.frombuffer(head, dtype=self.dtype), 0)
            problem = scan.problem()
        return problem and f"{self.path}: {problem}"

    def id_problem(self, vocab_size: int, advance: Callable[[int], object] = _ignore) -> str | None:
        """The first id outside the vocabulary, a wrong type or a wrong checksum.

        Reads the whole file.

        :param vocab_size: number of ids of the model.
        :param advance: called with the number of ids read since the last call.
        """
        bound = self.bound(vocab_size)
        ids, digest, scan = self.ids(), hashlib.sha256(), TypeScan(self.dtype, bound)
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            problem = out_of_vocabulary_problem(self, chunk, start, bound)
            if problem:
                likely = likely_type(self._head(), self.dtype, bound)
                return f"{problem}; {likely}" if likely else problem
            scan.see(chunk, start)
            if self.sha256:
                digest.update(chunk.tobytes())
            advance(len(chunk))
        if self.sha256 and digest.hexdigest() != self.sha256:
            return f"{self.path}: the checksum differs from {META}: the file was changed"
        problem = scan.problem()
        return problem and f"{self.path}: {problem}"

    def bound(self, vocab_size: int) -> int:
        """One more than the largest id allowed: the model's bound and the data's own both count."""
        return min(vocab_size, self.vocab_size or vocab_size)

    def _head(self) -> bytes:
        with self.path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        return head[: len(head) // self.dtype.itemsize * self.dtype.itemsize]


def out_of_vocabulary_problem(
    file: TokenFile, ids: np.ndarray, start: int, bound: int
) -> str | None:
    """Where an id of the file is not below ``bound``: its place and value."""
    if not len(ids) or int(ids.max()) < bound:
        return None
    at = int(np.argmax(ids >= bound))
    return (
        f"{file.path}: id {int(ids[at])} at offset {start + at} is outside the vocabulary "
        f"of {bound} ids"
    )


def find_token_files(source: DataSource) -> list[TokenFile]:
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
