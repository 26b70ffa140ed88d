"""The base of every config section."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A section: unknown keys are errors, values are never coerced, nothing changes later."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )
