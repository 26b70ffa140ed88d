"""What is wrong with a config: field, value, rule, the file that has it, and the way out."""

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from olmo_shard.config.root import Config

Place = tuple[str, ...]
"""The parts of a dotted name."""
Origins = dict[Place, str]
"""The file or override that each key comes from."""

_RENAMED = {
    "parallel.ddp.overlap_reduce": "parallel.ddp.overlap_grad_reduce",
    "parallel.ddp.overlap_gather": "parallel.ddp.overlap_param_gather",
}
"""Fields of earlier versions, with the fields that took their place."""


def origins_of(tree: dict[str, Any], source: str, above: Place = ()) -> Origins:
    """All keys of a file, sections included."""
    found: Origins = {}
    for key, value in tree.items():
        place = (*above, str(key))
        found[place] = source
        if isinstance(value, dict):
            found |= origins_of(value, source, place)
    return found


def merged_origins(below: Origins, over: Origins) -> Origins:
    """Origins of a file over another one; a section that both files have is from neither."""
    both = {place for place in below.keys() & over.keys() if _is_section(place, below)}
    return {place: name for place, name in (below | over).items() if place not in both}


def _is_section(place: Place, origins: Origins) -> bool:
    return any(len(other) > len(place) and other[: len(place)] == place for other in origins)


def explain(error: ValidationError, path: str, origins: Origins) -> str:
    """One message for all that is wrong.

    :param path: the config that the user named; only other origins are mentioned.
    """
    lines = dict.fromkeys(
        _explain(item) + _from_elsewhere(_location(item), path, origins)
        for item in error.errors(include_url=False)
    )
    return "\n".join([f"the config {path} is not valid:", *lines])


def _explain(item: Any) -> str:
    location = _location(item)
    where = ".".join(location)
    if item["type"] == "extra_forbidden":
        return f"  {where}: unknown key (value {item['input']!r}){_valid_key(location)}"
    if item["type"] == "missing":
        return f"  {where}: missing; it has no default"
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"  {where}: {message}" if where else f"  {message}"
    if item["type"] in ("model_type", "model_attributes_type"):
        message = "a section is needed, with fields below it"
    if item["type"] == "int_type" and isinstance(item["input"], float):
        message = "a whole number is needed"
    return f"  {where} = {item['input']!r}: {message}"


def _from_elsewhere(location: Place, path: str, origins: Origins) -> str:
    """The file or override that has a field, where the user named another file."""
    for end in range(len(location), 0, -1):
        place = location[:end]
        # A list has one origin for all its items, a section has one for each of its fields.
        if place in origins and (end == len(location) or not _is_section(place, origins)):
            return f" (in {origins[place]})" if origins[place] != path else ""
    return ""


def _location(item: Any) -> Place:
    # The alternatives of a union are marked by what pydantic calls them: not a part of the path.
    return tuple(str(part) for part in item["loc"] if not _is_union_tag(str(part)))


def _is_union_tag(part: str) -> bool:
    return part in ("str", "constrained-str") or part.startswith(("list[", "function-"))


def _valid_key(location: Place) -> str:
    """The key that was probably meant: of this name elsewhere, else the nearest one here."""
    if ".".join(location) in _RENAMED:
        return f"; it is called {_RENAMED['.'.join(location)]} now"
    name = location[-1]
    elsewhere = [".".join(place) for place in _fields(Config) if place[-1] == name]
    if elsewhere:
        return f"; did you mean {' or '.join(elsewhere[:3])}?"
    keys = [place[-1] for place in _fields(Config) if place[:-1] == _generic(location[:-1])]
    close = difflib.get_close_matches(name, keys, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else f"; valid keys: {', '.join(keys)}"


def _generic(place: Place) -> Place:
    """Without numbers of list items and names of validation sets, as ``_fields`` has them."""
    generic = tuple(part for part in place if not part.isdecimal())
    return generic[:2] if generic[:2] == ("data", "validation") else generic


def _fields(model: type[BaseModel], above: Place = ()) -> Iterator[Place]:
    """Every field of the config, sections included."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        for section in _models_in(field.annotation):
            yield from _fields(section, (*above, name))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arg in getattr(annotation, "__args__", ()) for m in _models_in(arg)]
