"""The base class of every config section."""

from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """One section of the config. Unknown keys are errors, and a section never changes.

    Values are not coerced, with one exception: a float that is a whole number, such as ``1e3``, is
    accepted for an integer field.
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
        """Turn a whole float into an integer, if the field takes integers and no floats."""
        if not isinstance(value, float) or not value.is_integer():
            return value
        assert info.field_name is not None
        types = _types_in(cls.model_fields[info.field_name].annotation)
        return int(value) if int in types and float not in types else value


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested dictionaries into one flat dictionary, by dotted names.

    ``{"a": {"b": 1}, "c": 2}`` becomes ``{"a.b": 1, "c": 2}``.
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict)
        flat |= flatten(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def _types_in(annotation: Any) -> set[Any]:
    """The members of a union type; for any other type, the type itself."""
    return set(get_args(annotation)) or {annotation}
