"""Flat token files: little-endian unsigned ids without any header.

OLMo-core and dolma write such files too, often with the ending .npy although they have no NumPy
header.
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
"""Ids per block of a scan. It is a multiple of 8, so that no wider id crosses two blocks."""


def _ignore(_: int) -> None:
    """Report no progress."""


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """One file of ids, and what the config or meta.json says about it."""

    path: Path
    dtype: np.dtype
    """Declared type of the ids."""
    eos_id: int | None
    """Id that ends each document; ``None`` if it is unknown."""
    vocab_size: int | None
    """Number of ids of the tokenizer, from meta.json; ``None`` for raw files."""
    expected_tokens: int | None = None
    """Number of ids from meta.json; ``None`` for raw files."""
    sha256: str | None = None
    """SHA-256 digest of the file from meta.json, in hex; ``None`` for raw files."""

    def ids(self) -> np.memmap:
        """Map the file into memory, as a one-dimensional array of the declared type."""
        return np.memmap(self.path, dtype=self.dtype, mode="r")

    def num_tokens(self) -> int:
        """Return the number of ids, from the file's size."""
        return self.path.stat().st_size // self.dtype.itemsize

    def identity(self) -> FileIdentity:
        """Return size, type and digests of the file. Reads at most 1 MiB.

        :raises DataError: if the file cannot be read.
        """
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
        """Describe what is wrong with the file's size; ``None`` if nothing is. Reads no data."""
        if not self.path.is_file():
            return f"{self.path}: no such file"
        # The size alone shows empty files, another type's remainder, and a cut file.
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
        """Describe a contradiction between the first 64 KiB and the declared type, if any.

        :param vocab_size: number of ids of the model.
        """
        try:
            head = self._head()
        except OSError as error:
            return f"{self.path} cannot be read: {error.strerror}"
        # Formats with a header first: their bytes could pass as ids.
        problem = format_problem(head, self.dtype)
        if problem is None:
            scan = TypeScan(self.dtype, self.bound(vocab_size))
            scan.see(np.frombuffer(head, dtype=self.dtype), 0)
            problem = scan.problem()
        return problem and f"{self.path}: {problem}"

    def id_problem(self, vocab_size: int, advance: Callable[[int], object] = _ignore) -> str | None:
        """Describe an id outside the vocabulary, a wrong type, or a wrong checksum, if any.

        Reads the whole file.

        :param vocab_size: number of ids of the model.
        :param advance: called with the number of ids read since the last call.
        """
        # One pass serves all three tests: ids, checksum, and types with wider ids.
        bound = self.bound(vocab_size)
        ids, digest, scan = self.ids(), hashlib.sha256(), TypeScan(self.dtype, bound)
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            problem = out_of_vocabulary_problem(self, chunk, start, bound)
            if problem:
                # One wrong id may be damage. Many of them mean that the type is wrong.
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
        """Return one more than the largest id allowed by the model and by the file's tokenizer.

        :param vocab_size: number of ids of the model.
        """
        return min(vocab_size, self.vocab_size or vocab_size)

    def _head(self) -> bytes:
        """The first bytes of the file, a whole number of ids."""
        with self.path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        return head[: len(head) // self.dtype.itemsize * self.dtype.itemsize]


def out_of_vocabulary_problem(
    file: TokenFile, ids: np.ndarray, start: int, bound: int
) -> str | None:
    """Describe the first of some ids that is not below ``bound``; ``None`` if all are.

    :param ids: consecutive ids of the file.
    :param start: offset of the first of them in the file, in ids.
    """
    if not len(ids) or int(ids.max()) < bound:
        return None
    at = int(np.argmax(ids >= bound))
    return (
        f"{file.path}: id {int(ids[at])} at offset {start + at} is outside the vocabulary "
        f"of {bound} ids"
    )


def find_token_files(source: DataSource) -> list[TokenFile]:
    """Return the files of a source: lists in their order, the matches of a pattern by name.

    :raises DataError: naming each path that cannot be used.
    """
    # A folder means a prepared one. Its meta.json states what the config states for raw files.
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
    """The file of one split of a prepared folder, described by meta.json."""
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
    """The raw files of a source, described by its config."""
    paths: list[Path] = []
    for pattern in source.paths():
        matches = sorted(glob(pattern)) if has_magic(pattern) else [pattern]
        if not matches:
            raise DataError(f"data source {pattern}: no file matches")
        paths += [Path(path) for path in matches]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise DataError(f"data source: no such file or folder: {', '.join(missing)}")
    # Fields that are for prepared folders, and fields that only raw files need.
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
