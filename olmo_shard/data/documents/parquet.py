"""Reading of Parquet: one document per row of a column of strings or UTF-8 bytes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from olmo_shard.data.documents.compression import optional_module
from olmo_shard.data.documents.record_fields import as_text
from olmo_shard.data.documents.report import BadInputError, Report

_ROWS = 64
"""Rows per batch: few, because a row may be a long document."""


def parquet_documents(path: Path, field: str, report: Report) -> Iterator[str]:
    """Yield the text of each row.

    :param field: column that holds the text; dots lead into struct columns.
    :raises BadInputError: if the file or the column cannot be read, or not beyond some row.
    :raises DataError: for a bad row, unless the report skips bad input.
    """
    parquet, arrow = optional_module("pyarrow.parquet", path), optional_module("pyarrow", path)
    errors = (arrow.ArrowException, OSError)
    try:
        table = parquet.ParquetFile(path)
    except errors as error:
        raise BadInputError(f"{path}: not a Parquet file: {error}") from error
    with table:
        inner = _inner_names(table.schema_arrow, field, path, arrow)
        row = 0
        try:
            for batch in table.iter_batches(batch_size=_ROWS, columns=[field]):
                for value in batch.column(0):
                    row += 1
                    text = _row_text(value, inner, field, f"{path} row {row}", report)
                    if text is not None:
                        yield text
        except errors as error:
            raise BadInputError(f"{path} after row {row}: {error}") from error


def _inner_names(schema: Any, field: str, path: Path, arrow: Any) -> list[str]:
    """Names of the nested fields within the top-level column; none for a plain column.

    :raises BadInputError: if the column is missing or does not hold text.
    """
    # A column whose name contains the dots wins over nested fields.
    names = [field] if field in schema.names else field.split(".")
    kind = arrow.struct(list(schema))
    for name in names:
        if not arrow.types.is_struct(kind) or kind.get_field_index(name) < 0:
            columns = ", ".join(_column_names(schema, arrow))
            raise BadInputError(f"{path}: no column {field!r} (--text-field); columns: {columns}")
        kind = kind.field(name).type
    if not _holds_text(kind, arrow):
        way_out = "; join its strings into one column first" if "list" in str(kind) else ""
        raise BadInputError(
            f"{path}: column {field!r} (--text-field) holds {kind}, not strings{way_out}"
        )
    return names[1:]


def _column_names(fields: Any, arrow: Any, prefix: str = "") -> list[str]:
    """Dotted names of all columns, those within structs included."""
    names: list[str] = []
    for column in fields:
        if arrow.types.is_struct(column.type):
            names += _column_names(column.type, arrow, f"{prefix}{column.name}.")
        else:
            names.append(prefix + column.name)
    return names


def _holds_text(kind: Any, arrow: Any) -> bool:
    """Whether a column's type is a string or bytes, possibly dictionary-encoded."""
    types = arrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    checks = (
        types.is_string, types.is_large_string, types.is_string_view,
        types.is_binary, types.is_large_binary, types.is_binary_view,
    )  # fmt: skip
    return any(check(kind) for check in checks)


def _row_text(value: Any, inner: list[str], field: str, place: str, report: Report) -> str | None:
    """The text of one row; ``None`` if the row is bad and the report skips bad input."""
    try:
        try:
            content = value.as_py()
        except UnicodeDecodeError as error:
            raise BadInputError(f"the string in column {field!r} is not UTF-8") from error
        for name in inner:
            content = None if content is None else content[name]
        return as_text(content, field, place, report)
    except BadInputError as error:
        report.bad(f"{place}: {error}")
        return None
