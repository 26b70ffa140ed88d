"""meta.json: the description of a folder that ``olmo-shard prepare`` wrote."""

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from olmo_shard.errors import DataError

META = "meta.json"
"""Name of the file."""
Split = Literal["train", "validation"]
TokenType = Literal["uint8", "uint16", "uint32"]


class Meta(BaseModel):
    """Content of meta.json."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    dtype: TokenType
    """Type of the ids, little-endian."""
    vocab_size: int = Field(gt=0)
    """One more than the largest id of the tokenizer."""
    eos_id: int = Field(ge=0)
    """Id that ends each document."""
    tokens: dict[Split, int]
    """Number of ids per split."""
    documents: dict[Split, int]
    """Number of documents per split."""
    sha256: dict[Split, str]
    """SHA-256 digest of each split's file, in hex."""

    @model_validator(mode="after")
    def _fields_fit(self) -> "Meta":
        if self.eos_id >= self.vocab_size:
            raise ValueError(f"eos_id = {self.eos_id} is not below vocab_size = {self.vocab_size}")
        if not self.tokens.keys() == self.documents.keys() == self.sha256.keys():
            raise ValueError("tokens, documents and sha256 do not name the same splits")
        return self

    def save(self, folder: Path) -> None:
        """Write meta.json into a folder."""
        text = json.dumps(self.model_dump(), indent=2)
        (folder / META).write_text(text + "\n", encoding="utf-8")


def read_meta(folder: Path) -> Meta:
    """Read and validate the meta.json of a folder.

    :raises DataError: if the file is missing, unreadable or invalid.
    """
    path = folder / META
    try:
        return Meta.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise DataError(
            f"data folder {folder} has no {META}: it is not (or not completely) written by "
            "olmo-shard prepare; run prepare again, or name raw token files and their dtype"
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{path} is not valid: {where} {first['msg']}; run prepare again"
        ) from error
