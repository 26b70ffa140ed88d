"""Identity of the data: everything except the seed that decides the sequences and their order.

The identity holds the size, the type and the digests of each file, in order. A checkpoint stores
it, so that a resume refuses changed data. The ranks of a run compare it, so that all of them train
on equal data.
"""

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from olmo_shard.data.meta import TokenType

SAMPLE_BLOCKS = 16
"""Number of blocks in the sample of a file."""
SAMPLE_BLOCK_BYTES = 1 << 16
"""Bytes per block of a sample."""


class FileIdentity(BaseModel):
    """Identity of one token file."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    path: str
    """Path for messages. It is not compared, because data may move."""
    dtype: TokenType
    """Type of the ids."""
    tokens: int
    """Number of ids."""
    sample: str
    """Result of ``sample_digest`` for the file."""
    sha256: str | None
    """Checksum of the whole file from meta.json; ``None`` for raw files."""

    def change(self, other: "FileIdentity") -> tuple[str, object, object] | None:
        """Return the first difference, as (size, type or content; this value; the other value).

        ``None`` means that the files are equal as far as the identity shows.
        """
        # Digests are compared last: other sizes and types imply other digests.
        if self.tokens != other.tokens:
            return "size", f"{self.tokens} ids", f"{other.tokens} ids"
        if self.dtype != other.dtype:
            return "type", self.dtype, other.dtype
        if self.sha256 and other.sha256 and self.sha256 != other.sha256:
            return "content", f"sha256 {self.sha256[:12]}", f"sha256 {other.sha256[:12]}"
        if self.sample != other.sample:
            return "content", f"sample {self.sample[:12]}", f"sample {other.sample[:12]}"
        return None


class SourceIdentity(BaseModel):
    """Identity of one source."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    eos_id: int | None
    """Id that ends a document; ``None`` without document masking, which alone uses the id."""
    files: list[FileIdentity]
    """Files in order."""


def sample_digest(path: Path) -> str:
    """Return the SHA-256 digest, in hex, of a file's size and a sample of its bytes.

    The sample is 16 blocks of 64 KiB: the first, the last, and 14 evenly spaced between them. A
    file of at most 1 MiB is read whole.
    """
    state = path.stat()
    return _sample_digest(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1 << 16)
def _sample_digest(path: Path, size: int, _: int) -> str:
    """The digest; the cache holds one result per process and state (size, time) of the file."""
    digest = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb") as file:
        if size <= SAMPLE_BLOCKS * SAMPLE_BLOCK_BYTES:
            digest.update(file.read())
            return digest.hexdigest()
        last = size - SAMPLE_BLOCK_BYTES
        for index in range(SAMPLE_BLOCKS):
            # Block 0 starts at the first byte, and the last block ends at the last byte.
            file.seek(last * index // (SAMPLE_BLOCKS - 1))
            digest.update(file.read(SAMPLE_BLOCK_BYTES))
    return digest.hexdigest()


def fingerprint(data: dict[str, SourceIdentity]) -> str:
    """Return the SHA-256 digest, in hex, of the compared fields: paths do not enter it."""
    rows = [
        [name, source.eos_id, *(file.model_dump_json(exclude={"path"}) for file in source.files)]
        for name, source in data.items()
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def difference(
    data: dict[str, SourceIdentity], other: dict[str, SourceIdentity], here: str, there: str
) -> str | None:
    """Describe the first difference between two versions of the data.

    :param data: sources by the names that messages use.
    :param here: place of ``data`` for the message, such as "on rank 1".
    :param there: place of ``other`` for the message.
    :returns: a clause with the file and its size, type, order or content; ``None`` if the data are
        equal.
    """
    # Coarse differences first: names of sources, numbers of files, then file by file.
    if data.keys() != other.keys():
        return f"the sources are {', '.join(data)} {here}, {', '.join(other)} {there}"
    for name, source in data.items():
        before = other[name]
        if len(source.files) != len(before.files):
            only = _only_in(data, other, here) or _only_in(other, data, there)
            return f"{name}: {len(source.files)} file(s) {here}, {len(before.files)} {there}{only}"
        for index, (file, old) in enumerate(zip(source.files, before.files, strict=True)):
            change = file.change(old)
            if change is None:
                continue
            # If each side has the other's file elsewhere, only the order differs.
            place = _place(file, other)
            if place and _place(old, data):
                return (
                    f"{name}: order: {file.path} is file {index} of {name} {here}, {place} {there}"
                )
            what, value, old_value = change
            path = "" if file.path == old.path else f" in {old.path}"
            return f"{name}: {what} of {file.path}: {value} {here}, {old_value}{path} {there}"
        if source.eos_id != before.eos_id:
            return f"{name}: eos_id: {source.eos_id} {here}, {before.eos_id} {there}"
    return None


def _place(file: FileIdentity, data: dict[str, SourceIdentity]) -> str | None:
    """The first place in the data of a file of equal size, type and content."""
    for name, source in data.items():
        for index, other in enumerate(source.files):
            if file.change(other) is None:
                return f"file {index} of {name}"
    return None


def _only_in(data: dict[str, SourceIdentity], other: dict[str, SourceIdentity], where: str) -> str:
    """A clause with the first file of ``data`` that is not in ``other``; empty if all are."""
    for source in data.values():
        for file in source.files:
            if _place(file, other) is None:
                return f"; {file.path} is only {where}"
    return ""
