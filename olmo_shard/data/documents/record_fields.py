"""The text field of one record: of a JSON object or a Parquet row."""

from collections.abc import Mapping
from typing import Any

from olmo_shard.data.documents.report import NUL, SURROGATE, BadInputError, Report

_KINDS = {bool: "a boolean", int: "a number", float: "a number", dict: "an object"}


def pick(record: Any, field: str) -> Any:
    """Return the value of a field.

    :param field: name of the field; dots lead into nested objects. A key that contains the dots
        itself wins.
    :raises BadInputError: if the record has no such field.
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
    """Return the value of a field as text, and count what had to be replaced.

    :param place: file and line or row, for the counts.
    :raises BadInputError: if the value is neither a string nor UTF-8 bytes.
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
    # JSON allows half of a surrogate pair, which no UTF-8 text contains.
    text = value.encode("utf-8", errors="replace").decode("utf-8")
    if text != value:
        halves = sum("\ud800" <= character <= "\udfff" for character in value)
        report.count(SURROGATE, place, halves)
    return text


def _kind(value: Any) -> str:
    """A clause about a value that is not a string."""
    if value is None:
        return "the value is null"
    if isinstance(value, list):
        return "the value is a list; join its strings into one field first"
    return f"the value is {_KINDS.get(type(value), type(value).__name__)}"


def _field_names(record: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of all fields, nested ones included."""
    names: list[str] = []
    for key, value in record.items():
        nested = isinstance(value, Mapping) and value
        names += _field_names(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]
    return names
