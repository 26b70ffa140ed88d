"""Section ``data``: token files, their mixture, and the length of sequences."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from olmo_shard.config.section import Section

Path = Annotated[str, Field(min_length=1)]


class DataSource(Section):
    """One source of sequences: a prepared folder, or raw token files of one type."""

    path: Path | Annotated[list[Path], Field(min_length=1)]
    """A folder that ``prepare`` wrote, or raw token files: a path, a glob pattern, or a list."""
    split: Literal["train", "validation"] = "train"
    """Part of a prepared folder to read. Raw files have no splits."""
    weight: float = Field(default=1.0, gt=0)
    """Share of this source in the mixture of sequences, relative to the other weights."""
    dtype: Literal["uint8", "uint16", "uint32"] | None = None
    """Type of the ids in raw files, little-endian. Null for a prepared folder, whose meta.json
    holds the type.
    """
    eos_id: int | None = Field(default=None, ge=0)
    """Id that ends each document in raw files; document masking needs it. Null for a prepared
    folder, whose meta.json holds the id.
    """

    def paths(self) -> list[str]:
        """Return the entries of ``path`` as a list."""
        return [self.path] if isinstance(self.path, str) else self.path


class DataConfig(Section):
    """Training sources, validation sets, and how sequences are cut from them."""

    sequence_length: int = Field(gt=0)
    """Number of tokens per sequence."""
    sources: list[DataSource] = Field(min_length=1)
    """Training sources, mixed by their weights."""
    validation: dict[str, DataSource] = Field(default_factory=dict)
    """Validation sets by name. The name appears in records and charts."""
    document_masking: bool = False
    """If true, a token attends only to tokens of its own document, and the last token of a
    document has no label.
    """

    def named_sources(self) -> dict[str, DataSource]:
        """Return the training sources, by the names that messages use."""
        return {f"data.sources.{index}": source for index, source in enumerate(self.sources)}

    def named_validation(self) -> dict[str, DataSource]:
        """Return the validation sets, by the names that messages use."""
        return {f"data.validation.{name}": source for name, source in self.validation.items()}

    @model_validator(mode="after")
    def _weights_are_for_training(self) -> "DataConfig":
        """Refuse a weight of a validation set: each set is evaluated by itself."""
        for name, source in self.validation.items():
            if source.weight != 1.0:
                raise ValueError(
                    f"validation.{name}.weight = {source.weight}: a validation set has no weight"
                )
        return self
