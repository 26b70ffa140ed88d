"""Identity of the data: what decides the order and the content of the sequences, but the seed.

Each file, in its order, has a size, a type and digests. A checkpoint stores them, so that a resume
refuses other data; the ranks of a run compare them, so that no rank trains on other data.
"""

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from olmo_shard.data.meta import TokenType

SAMPLE_BLOCKS = 16
SAMPLE_BLOCK_BYTES = 1 << 16


class FileIdentity(BaseModel):
    """One token file. The path is for messages and is not compared: data may move."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    path: str
    dtype: TokenType
    tokens: int
    """Number of ids."""
    sample: str
    """``sample_digest`` of the file."""
    sha256: str | None
    """Checksum of the whole file by meta.json; ``None`` for raw files."""

    def change(self, other: "FileIdentity") -> tuple[str, object, object] | None:
        """What first differs (size, type or content), with both values; ``None`` if nothing."""
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
    """The files of one source, in order."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    eos_id: int | None
    """Id that ends a document; ``None`` without document masking, when the id decides nothing."""
    files: list[FileIdentity]


def sample_digest(path: Path) -> str:
    """SHA-256 over a file's size and a sample of its bytes.

    The sample is 16 blocks of 64 KiB: the first, the last, and 14 evenly spread between them; or
    the whole file, if it is no larger than 1 MiB.
    """
    state = path.stat()
    return _sample_digest(path, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=1 << 16)
def _sample_digest(path: Path, size: int, _: int) -> str:
    """The digest, computed once per state of the file in each process."""
    digest = hashlib.sha256(f"{size}\n".encode())
    with path.open("rb") as file:
        if size <= SAMPLE_BLOCKS * SAMPLE_BLOCK_BYTES:
            digest.update(file.read())
            return digest.hexdigest()
        last = size - SAMPLE_BLOCK_BYTES
        for index in range(SAMPLE_BLOCKS):
            file.seek(last * index // (SAMPLE_BLOCKS - 1))
            digest.update(file.read(SAMPLE_BLOCK_BYTES))
    return digest.hexdigest()


def fingerprint(data: dict[str, SourceIdentity]) -> str:
    """SHA-256 of what is compared: equal data have equal fingerprints wherever they lie."""
    rows = [
        [name, source.eos_id, *(file.model_dump_json(exclude={"path"}) for file in source.files)]
        for name, source in data.items()
    ]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def difference(
    data: dict[str, SourceIdentity], other: dict[str, SourceIdentity], here: str, there: str
) -> str | None:
    """The first difference between two versions of the data, by source, file and kind.

    :param data: sources by the name that messages use.
    :param here: place of ``data`` for the message, such as "on rank 1".
    :param there: place of ``other`` for the message.
    :returns: a clause that names the file and its size, type, order or content, or ``None``.
    """
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
    """Where the data have a file of the same size, type and content."""
    for name, source in data.items():
        for index, other in enumerate(source.files):
            if file.change(other) is None:
                return f"file {index} of {name}"
    return None


def _only_in(data: dict[str, SourceIdentity], other: dict[str, SourceIdentity], where: str) -> str:
    """A clause that names the first file of ``data`` that ``other`` has not."""
    for source in data.values():
        for file in source.files:
            if _place(file, other) is None:
                return f"; {file.path} is only {where}"
    return ""
