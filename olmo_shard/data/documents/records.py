"""The text of one record: a JSON object or a Parquet row."""

from collections.abc import Mapping
from typing import Any

from olmo_shard.data.documents.report import NUL, SURROGATE, BadInputError, Report

_KINDS = {bool: "a boolean", int: "a number", float: "a number", dict: "an object"}


def pick(record: Any, field: str) -> Any:
    """The value of a field; dots in its name lead into nested objects.

    A key that holds the dots itself comes first.

    :raises BadInputError: where the record has no such field.
    """
    if not isinstance(record, Mapping):
        raise BadInputError(f"no string in field {field!r} (--text-field): not a JSON object")
    if field in record:
        return record[field]
    value: Any = record
    for part in field.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise BadInputError(
                f"no string in field {field!r} (--text-field): no such field; fields: "
                f"{', '.join(_field_names(record)) or 'none'}"
            )
        value = value[part]
    return value


def as_text(value: Any, field: str, place: str, report: Report) -> str:
    """The string of a field, with replacements counted.

    :param place: file and line or row, for the counts.
    :raises BadInputError: where the value is no string.
    """
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadInputError(f"the bytes in field {field!r} are not UTF-8") from error
    if not isinstance(value, str):
        raise BadInputError(f"no string in field {field!r} (--text-field): {_kind(value)}")
    if "\x00" in value:
        report.count(NUL, place, value.count("\x00"))
    # Half a surrogate pair is valid in JSON, and no text.
    text = value.encode("utf-8", errors="replace").decode("utf-8")
    if text != value:
        halves = sum("\ud800" <= character <= "\udfff" for character in value)
        report.count(SURROGATE, place, halves)
    return text


def _kind(value: Any) -> str:
    if value is None:
        return "the value is null"
    if isinstance(value, list):
        return "the value is a list; join its strings into one field first"
    return f"the value is {_KINDS.get(type(value), type(value).__name__)}"


def _field_names(record: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Names of all fields, nested ones with dots."""
    names: list[str] = []
    for key, value in record.items():
        nested = isinstance(value, Mapping) and value
        names += _field_names(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]
    return names
