"""The base of every config section."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A section: unknown keys are errors, and nothing changes later.

    Values are never coerced, with one exception: a float that is a whole number (``1e3``) is
    accepted where an integer is needed.
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _whole_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, float) or not value.is_integer():
            return value
        assert info.field_name is not None
        kinds = _types_in(cls.model_fields[info.field_name].annotation)
        return int(value) if int in kinds and float not in kinds else value


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, by dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict)
        found |= flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return found


def _types_in(annotation: Any) -> set[Any]:
    """The alternatives of a union, or the type itself."""
    return set(get_args(annotation)) or {annotation}
