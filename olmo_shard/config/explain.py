"""Error messages for an invalid config: field, value, rule, the file that sets it, and a remedy."""

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from olmo_shard.config.root import Config

Place = tuple[str, ...]
"""The parts of a dotted field name: ``("train", "steps")``."""
Origins = dict[Place, str]
"""File or override that sets each key."""

_RENAMED = {
    "parallel.ddp.overlap_reduce": "parallel.ddp.overlap_grad_reduce",
    "parallel.ddp.overlap_gather": "parallel.ddp.overlap_param_gather",
}
"""Field names of earlier versions, and the names of today."""


def origins_of(tree: dict[str, Any], source: str, above: Place = ()) -> Origins:
    """Return the origin of every key of a file, sections included.

    :param tree: content of the file.
    :param source: name of the file, for messages.
    :param above: place of the section that ``tree`` is.
    """
    origins: Origins = {}
    for key, value in tree.items():
        place = (*above, str(key))
        origins[place] = source
        if isinstance(value, dict):
            origins |= origins_of(value, source, place)
    return origins


def merged_origins(base: Origins, over: Origins) -> Origins:
    """Return the origins of a file merged over its base.

    A section that both files have has no origin: only its fields have one.
    """
    in_both = {place for place in base.keys() & over.keys() if _is_section(place, base)}
    return {place: name for place, name in (base | over).items() if place not in in_both}


def _is_section(place: Place, origins: Origins) -> bool:
    return any(len(other) > len(place) and other[: len(place)] == place for other in origins)


def explain(error: ValidationError, path: str, origins: Origins) -> str:
    """Return one message with a line per problem.

    :param path: config file that the user named. A line names the origin of its field only if that
        is another file, or an override.
    """
    lines = dict.fromkeys(
        _explain(item) + _from_elsewhere(_location(item), path, origins)
        for item in error.errors(include_url=False)
    )
    return "\n".join([f"the config {path} is not valid:", *lines])


def _explain(item: Any) -> str:
    """One line for one of pydantic's errors."""
    location = _location(item)
    where = ".".join(location)
    if item["type"] == "extra_forbidden":
        return f"  {where}: unknown key (value {item['input']!r}){_valid_key(location)}"
    if item["type"] == "missing":
        return f"  {where}: missing; it has no default"
    # Rules of this package (value_error) name the values themselves; pydantic's rules do not.
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"  {where}: {message}" if where else f"  {message}"
    # pydantic's texts for these types name Python classes.
    if item["type"] in ("model_type", "model_attributes_type"):
        message = "a section is needed, with fields below it"
    if item["type"] == "int_type" and isinstance(item["input"], float):
        message = "a whole number is needed"
    return f"  {where} = {item['input']!r}: {message}"


def _from_elsewhere(location: Place, path: str, origins: Origins) -> str:
    """The origin of a field in brackets, unless it is the file that the user named."""
    # From the field upwards: a missing field has no origin, but its section may have one.
    for end in range(len(location), 0, -1):
        place = location[:end]
        # All items of a list have one origin. A section has one origin per field.
        if place in origins and (end == len(location) or not _is_section(place, origins)):
            return f" (in {origins[place]})" if origins[place] != path else ""
    return ""


def _location(item: Any) -> Place:
    """The place of an error, without the names that pydantic adds for the members of a union."""
    return tuple(str(part) for part in item["loc"] if not _is_union_tag(str(part)))


def _is_union_tag(part: str) -> bool:
    return part in ("str", "constrained-str") or part.startswith(("list[", "function-"))


def _valid_key(location: Place) -> str:
    """A hint at the intended key: the new name, the same name elsewhere, or a similar name here."""
    if ".".join(location) in _RENAMED:
        return f"; it is called {_RENAMED['.'.join(location)]} now"
    # A field in the wrong section is more likely than a typing error.
    name = location[-1]
    elsewhere = [".".join(place) for place in _fields(Config) if place[-1] == name]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere[:3])}?"
    keys = [place[-1] for place in _fields(Config) if place[:-1] == _generic(location[:-1])]
    close = difflib.get_close_matches(name, keys, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; valid keys: {', '.join(keys)}"


def _generic(place: Place) -> Place:
    """The place without list indices and names of validation sets, as ``_fields`` spells it."""
    generic = tuple(part for part in place if not part.isdecimal())
    return generic[:2] if generic[:2] == ("data", "validation") else generic


def _fields(model: type[BaseModel], above: Place = ()) -> Iterator[Place]:
    """The places of all fields of the config, sections included."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        for section in _models_in(field.annotation):
            yield from _fields(section, (*above, name))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a field may hold: its type, or the members of a union or list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    arguments = getattr(annotation, "__args__", ())
    return [model for argument in arguments for model in _models_in(argument)]
