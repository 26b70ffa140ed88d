"""Section ``data``: token files, their mixture and how sequences are cut from them."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from olmo_shard.config.base import Section

Path = Annotated[str, Field(min_length=1)]


class DataSource(Section):
    path: Path | Annotated[list[Path], Field(min_length=1)]
    """A folder written by ``prepare``, or raw token files: a path, a glob, or a list of them."""
    split: Literal["train", "validation"] = "train"
    """Which part of a prepared folder to read."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this source in the mixture, relative to the other weights."""
    dtype: Literal["uint8", "uint16", "uint32"] | None = None
    """Type of the ids in raw files; null for a prepared folder, whose meta.json states it."""
    eos_id: int | None = Field(default=None, ge=0)
    """Id that ends a document in raw files (needed for document masking)."""

    def paths(self) -> list[str]:
        return [self.path] if isinstance(self.path, str) else self.path


class DataConfig(Section):
    sequence_length: int = Field(gt=0)
    """Tokens of a training sequence."""
    sources: list[DataSource] = Field(min_length=1)
    """Training sources, mixed by weight."""
    validation: dict[str, DataSource] = Field(default_factory=dict)
    """Named validation sets."""
    document_masking: bool = False
    """Tokens see only their own document, and labels that cross into the next one are ignored."""

    def named_sources(self) -> dict[str, DataSource]:
        """Training sources by the name that messages use."""
        return {f"data.sources.{index}": source for index, source in enumerate(self.sources)}

    def named_validation(self) -> dict[str, DataSource]:
        """Validation sets by the name that messages use."""
        return {f"data.validation.{name}": source for name, source in self.validation.items()}

    @model_validator(mode="after")
    def _weights_are_for_training(self) -> "DataConfig":
        for name, source in self.validation.items():
            if source.weight != 1.0:
                raise ValueError(
                    f"validation.{name}.weight = {source.weight}: a validation set has no weight"
                )
        return self
