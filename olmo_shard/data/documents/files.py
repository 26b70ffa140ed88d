"""The files of the sources, in the order of their names, with their formats."""

import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from olmo_shard.data.documents.endings import KNOWN, Ending, compression_of, ending_of
from olmo_shard.data.documents.json_lines import json_documents
from olmo_shard.data.documents.parquet import parquet_documents
from olmo_shard.data.documents.report import (
    EMPTY,
    HIDDEN,
    LINKED,
    PREPARED,
    SPECIAL,
    UNKNOWN,
    BadInputError,
    Report,
)
from olmo_shard.data.documents.text import read_text
from olmo_shard.errors import DataError

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Folders that are left out of the standard library."""
_PREPARED = {"meta.json", "tokenizer.json", "train.bin"}
"""Files by which a folder that ``prepare`` wrote is recognised."""


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One regular file, and how it is read."""

    path: Path
    size: int
    """Bytes on disk; progress is measured in them."""
    ending: Ending
    """Format and compression."""
    text_field: str
    """Field of JSON objects, or column of Parquet rows, that holds the text."""

    def documents(self, report: Report) -> Iterator[str]:
        """Yield the documents that are not empty.

        :param report: counts empty and skipped input.
        :raises DataError: for bad input, with the file and, if there is one, the line or row.
        """
        has_records = False
        try:
            for text in self._read(report):
                has_records = True
                if text:
                    yield text
                else:
                    report.count(EMPTY, str(self.path))
        except BadInputError as error:
            # Documents before the damage were yielded already and stay.
            report.bad(str(error))
        else:
            if not has_records:
                report.count(EMPTY, f"{self.path} (no record)")

    def _read(self, report: Report) -> Iterator[str]:
        """Yield the text of every record, empty ones included."""
        ending = self.ending
        if ending.format == "json":
            yield from json_documents(self.path, ending.compression, self.text_field, report)
        elif ending.format == "parquet":
            yield from parquet_documents(self.path, self.text_field, report)
        else:
            yield read_text(self.path, ending.compression, report)


def find_files(sources: list[str], text_field: str, report: Report) -> list[InputFile]:
    """Return the files of all sources. The files of a folder are in the order of their names.

    If the source is a file, an unknown ending means text. Within a folder, files that are hidden,
    special or of an unknown ending are skipped and counted.

    :param sources: paths of files and folders.
    :param text_field: field of JSON objects, or column of Parquet rows, that holds the text.
    :raises DataError: for a source that is missing or special, or a folder without a known file.
    """
    files: list[InputFile] = []
    for source in sources:
        path = Path(source)
        if not source:
            raise DataError("a source is an empty string; name a file or a folder")
        try:
            status = path.stat()
        except OSError as error:
            _raise_missing(path, error)
        if stat.S_ISDIR(status.st_mode):
            files += _folder_files(path, text_field, report)
        elif stat.S_ISREG(status.st_mode):
            unknown = Ending(format="text", compression=compression_of(path.name))
            ending = ending_of(path.name) or unknown
            files.append(
                InputFile(path=path, size=status.st_size, ending=ending, text_field=text_field)
            )
        else:
            raise DataError(
                f"source {source}: not a regular file; write a pipe's content to a file first"
            )
    return files


def standard_library_files() -> list[InputFile]:
    """Return the source files of Python's standard library without tests: about 13 MB of text."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = _walk(library, "", Report(skip_bad=True), _NOT_LIBRARY)
    return [file for file in files if file.path.suffix == ".py"]


def _folder_files(folder: Path, text_field: str, report: Report) -> list[InputFile]:
    """The files of a folder.

    :raises DataError: if the folder has no known file.
    """
    files = _walk(folder, text_field, report, set())
    if not files:
        skipped = "".join(f"; {line}" for line in report.lines())
        raise DataError(f"source {folder}: no file with one of the endings {KNOWN}{skipped}")
    return files


def _walk(folder: Path, text_field: str, report: Report, left_out: set[str]) -> list[InputFile]:
    """The files of a folder and of the folders in it, except those named in ``left_out``."""
    files: list[InputFile] = []
    for parent, folders, names in os.walk(folder, onerror=_raise_unreadable):
        if names and _PREPARED.issubset(names):
            # Token files are not text. Emptying the list keeps os.walk out of the subfolders.
            report.count(PREPARED, parent)
            folders.clear()
            continue
        folders[:] = [
            name
            for name in sorted(folders)
            if name not in left_out and _is_walked(Path(parent, name), report)
        ]
        for name in sorted(names):
            file = _file(Path(parent, name), text_field, report)
            files += [file] if file else []
    return files


def _is_walked(folder: Path, report: Report) -> bool:
    """Whether a folder is read; hidden folders and links are counted as skipped."""
    if folder.name.startswith("."):
        report.count(HIDDEN, str(folder))
        return False
    if folder.is_symlink():
        report.count(LINKED, str(folder))
        return False
    return True


def _file(path: Path, text_field: str, report: Report) -> InputFile | None:
    """A file within a folder. A file to skip is counted, and ``None`` is returned."""
    # The name alone decides about most skipped files, without a system call.
    ending = ending_of(path.name)
    if path.name.startswith("."):
        report.count(HIDDEN, str(path))
        return None
    if ending is None:
        report.count(UNKNOWN, str(path))
        return None
    try:
        status = path.stat()
    except OSError as error:
        try:
            _raise_missing(path, error)
        except DataError as problem:
            report.bad(str(problem))
        return None
    if not stat.S_ISREG(status.st_mode):
        report.count(SPECIAL, str(path))
        return None
    return InputFile(path=path, size=status.st_size, ending=ending, text_field=text_field)


def _raise_missing(path: Path, error: OSError) -> NoReturn:
    """Raise an error for a file that does not exist or cannot be reached."""
    if path.is_symlink() and isinstance(error, FileNotFoundError):
        raise DataError(
            f"source {path}: a link to {os.readlink(path)}, which does not exist"
        ) from error
    reason = "no such file or folder" if isinstance(error, FileNotFoundError) else error.strerror
    raise DataError(f"source {path}: {reason}") from error


def _raise_unreadable(error: OSError) -> NoReturn:
    """Raise an error for a folder that cannot be read."""
    raise DataError(f"source {error.filename}: {error.strerror}") from error
