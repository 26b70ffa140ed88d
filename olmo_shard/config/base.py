"""The base of every config section."""

from typing import Any

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


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, by dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict)
        found |= flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found
