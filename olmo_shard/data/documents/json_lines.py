"""Reading of JSON Lines: one object per line. Values over several lines are refused."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from olmo_shard.data.documents.compression import READ_ERRORS, open_bytes
from olmo_shard.data.documents.record_fields import as_text, pick
from olmo_shard.data.documents.report import BadInputError, Report
from olmo_shard.data.documents.text import HEAD, require_text

_NOT_UTF_8 = re.compile("[\udc80-\udcff]")
"""Characters by which the error handler ``surrogateescape`` replaces invalid bytes."""


def json_documents(path: Path, compression: str, field: str, report: Report) -> Iterator[str]:
    """Yield the text of each line that is not blank.

    :param compression: ``.gz``, ``.zst``, or nothing.
    :param field: field that holds the text; dots lead into nested objects.
    :raises BadInputError: if the file is not JSON Lines, or cannot be read beyond some line.
    :raises DataError: for a bad line, unless the report skips bad input.
    """
    number, first = 0, True
    try:
        with open_bytes(path, compression) as file:
            require_text(file.peek(HEAD)[:HEAD], path)
            # Invalid bytes are a fault of their line, so decoding must not stop at them.
            lines = io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape")
            for number, line in enumerate(lines, start=1):
                line = line.lstrip("\ufeff")
                if not line.strip():
                    continue
                if first:
                    _require_lines(line, path)
                first = False
                text = _line_text(line, field, f"{path} line {number}", report)
                if text is not None:
                    yield text
    except READ_ERRORS as error:
        raise BadInputError(f"{path} after line {number}: {error}") from error


def _require_lines(first_line: str, path: Path) -> None:
    """:raises BadInputError: if the first line begins a value of several lines."""
    start = first_line.strip()
    if start.startswith("["):
        raise BadInputError(
            f"{path}: holds a JSON array; JSON Lines are read, one object per line: convert it "
            f"with jq -c '.[]'"
        )
    if start == "{":
        raise BadInputError(
            f"{path}: holds a JSON object over several lines; JSON Lines are read, one object per "
            "line: convert it with jq -c ."
        )


def _line_text(line: str, field: str, place: str, report: Report) -> str | None:
    """The text of one line; ``None`` if the line is bad and the report skips bad input."""
    try:
        return as_text(pick(_parse(line), field), field, place, report)
    except BadInputError as error:
        report.bad(f"{place}: {error}")
        return None


def _parse(line: str) -> Any:
    """The JSON value of a line.

    :raises BadInputError: if the line is not UTF-8 or not JSON.
    """
    if not line.isascii() and _NOT_UTF_8.search(line):
        raise BadInputError("not UTF-8")
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise BadInputError(f"not valid JSON: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        # A number of more than 4,300 digits, or a nesting deeper than Python's stack.
        raise BadInputError(f"not readable JSON: {error}") from error
