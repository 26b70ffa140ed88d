"""Reading of W&B segments: LevelDB's log format with protobuf records, as far as tests need it."""

import importlib
import json
import struct
from pathlib import Path
from typing import Any

_BLOCK, _FILE_HEADER = 32_768, 7
_CHUNK_HEADER = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


def segment_rows(folder: Path | str) -> list[dict[str, Any]]:
    """Return the history of a segment, one row per logged step."""
    messages: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")  # has no types

    (path,) = Path(folder).glob("run-*.wandb")
    rows = []
    for data in _records(path.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def segment_steps(folder: Path | str) -> list[int]:
    """Return the steps of a segment."""
    return [row["_step"] for row in segment_rows(folder)]


def _records(data: bytes) -> list[bytes]:
    """The records of a file. A record has one or more chunks, and no chunk crosses two blocks."""
    records, parts, at = [], b"", _FILE_HEADER
    while at + _CHUNK_HEADER.size <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < _CHUNK_HEADER.size:
            at += left
            continue
        _, length, kind = _CHUNK_HEADER.unpack_from(data, at)
        at += _CHUNK_HEADER.size
        parts += data[at : at + length]
        at += length
        if kind in (_WHOLE, _LAST):
            records.append(parts)
            parts = b""
    return records
