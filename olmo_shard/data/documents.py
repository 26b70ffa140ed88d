"""Documents from text files, folders, JSON Lines and Parquet, one string at a time."""

import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from olmo_shard.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".text")
"""Files that a folder contributes as one document each, besides the structured ones."""
_JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_PARQUET_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One file, and how to read it."""

    path: Path
    text_field: str

    @property
    def size(self) -> int:
        """Bytes on disk, the unit of progress."""
        return self.path.stat().st_size

    def documents(self) -> Iterator[str]:
        """:raises DataError: naming the file, and line or row where there is one."""
        name = self.path.name
        if name.endswith(_JSON_SUFFIXES):
            yield from _json_lines(self.path, self.text_field)
        elif name.endswith(".parquet"):
            yield from _parquet(self.path, self.text_field)
        else:
            yield _text(self.path)


def find_files(sources: list[str], text_field: str) -> list[InputFile]:
    """The files of all sources, folders walked in name order.

    :raises DataError: for a source that is missing, or a folder without a file that can be read.
    """
    found: list[InputFile] = []
    for source in sources:
        path = Path(source)
        if not path.exists():
            raise DataError(f"source {source}: no such file or folder")
        paths = [path] if path.is_file() else _walk(path, set())
        if not paths:
            kinds = ", ".join((*TEXT_SUFFIXES, *_JSON_SUFFIXES, ".parquet"))
            raise DataError(f"source {source}: no file with one of the endings {kinds}")
        found += [InputFile(path=each, text_field=text_field) for each in paths]
    return found


def standard_library_files() -> list[InputFile]:
    """The running interpreter's standard library, tests left out: about 13 MB of text."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in _walk(library, _NOT_LIBRARY) if path.suffix == ".py"]
    return [InputFile(path=path, text_field="") for path in paths]


def _walk(folder: Path, skipped: set[str]) -> list[Path]:
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skipped)
        found += [
            Path(parent) / name
            for name in sorted(names)
            if name.endswith((*TEXT_SUFFIXES, *_JSON_SUFFIXES, ".parquet"))
        ]
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _json_lines(path: Path, field: str) -> Iterator[str]:
    number = 0
    try:
        with _open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _field(json.loads(line), field, f"{path} line {number}")
    except json.JSONDecodeError as error:
        raise DataError(f"{path} line {number}: not valid JSON: {error.msg}") from error
    except (OSError, EOFError, UnicodeDecodeError, zlib.error, *_zstd_errors(path)) as error:
        raise DataError(f"{path} after line {number}: {error}") from error


def _zstd_errors(path: Path) -> tuple[type[Exception], ...]:
    return (_optional("zstandard", path).ZstdError,) if path.name.endswith(".zst") else ()


def _open_text(path: Path) -> IO[str]:
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8")
    if path.name.endswith(".zst"):
        stream = _optional("zstandard", path).ZstdDecompressor().stream_reader(path.open("rb"))
        return io.TextIOWrapper(stream, encoding="utf-8")
    return path.open(encoding="utf-8")


def _parquet(path: Path, field: str) -> Iterator[str]:
    parquet, arrow = _optional("pyarrow.parquet", path), _optional("pyarrow", path)
    try:
        table = parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: not a Parquet file: {error}") from error
    with table:
        if field not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise DataError(f"{path}: no column {field!r} (--text-field); columns: {columns}")
        row = 0
        try:
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS, columns=[field]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    yield _field({field: text}, field, f"{path} row {row}")
        except (arrow.ArrowInvalid, OSError) as error:
            raise DataError(f"{path} after row {row}: {error}") from error


def _field(record: Any, field: str, where: str) -> str:
    text = record.get(field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where}: no string in field {field!r} (--text-field)")
    # Half a surrogate pair is valid in JSON, and no text.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _optional(module: str, path: Path) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path}: reading it needs {error.name}: pip install 'olmo-shard[data]'"
        ) from error
