"""Loading: from a YAML file and dotted overrides to a validated ``Config``."""

import io
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from olmo_shard.config.explain import Origins, explain, merged_origins, origins_of
from olmo_shard.config.root import Config
from olmo_shard.errors import ConfigurationError


def load_config(path: str, overrides: list[str] | None = None) -> Config:
    """Read, merge and validate a config. Overrides win over the file, the file over its base.

    :param path: YAML 1.2 file. ``extends: other.yaml`` names its base, relative to the file.
    :param overrides: ``section.field=value`` with the value in YAML. ``data.sources.0.weight=2.0``
        sets a field of the first item of a list.
    :raises ConfigurationError: with the field, its value, the rule and the nearest valid key.
    """
    # 1. Merge: files from the base upwards, then overrides. Remember the origin of each key.
    tree, origins = _read_tree(Path(path), ())
    for override in overrides or []:
        _apply_override(tree, override)
        place = tuple(override.partition("=")[0].split("."))
        origins[place] = f"the override {override}"
        # A section with an override comes from neither the file nor the override alone.
        for end in range(1, len(place)):
            origins.pop(place[:end], None)
    # 2. Validate the result as a whole, so that all problems are in one message.
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigurationError(explain(error, path, origins)) from error


def dump_yaml(config: Config) -> str:
    """Return the resolved config as YAML. ``load_config`` reads it back to an equal config."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.width = 120
    # Keep the order of the models, which is the order of the documentation.
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    buffer = io.StringIO()
    yaml.dump(config.model_dump(), buffer)
    return buffer.getvalue()


def _read_tree(path: Path, seen: tuple[Path, ...]) -> tuple[dict[str, Any], Origins]:
    """The content of a file merged over the file that it extends, and the origin of each key.

    :param seen: files that extend this one, to detect a circle.
    """
    if path.resolve() in seen:
        chain = " -> ".join(str(p) for p in (*seen, path))
        raise ConfigurationError(f"extends goes round in a circle: {chain}")
    try:
        tree = _yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigurationError(f"cannot read the config {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"the config {path} is not UTF-8 text") from error
    if not isinstance(tree, dict):
        raise ConfigurationError(f"the config {path} holds no sections (a YAML mapping is needed)")
    # ``extends`` is no section: take it out before the fields are compared with the models.
    base = tree.pop("extends", None)
    origins = origins_of(tree, str(path))
    if base is None:
        return tree, origins
    if not isinstance(base, str):
        raise ConfigurationError(f"{path}: extends = {base!r} must be the path of one YAML file")
    base_tree, base_origins = _read_tree(path.parent / base, (*seen, path.resolve()))
    return _merge(base_tree, tree), merged_origins(base_origins, origins)


def _yaml(text: str, where: str) -> Any:
    """Parse YAML 1.2; ``where`` names the file or override in errors."""
    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        place = f" line {mark.line + 1}" if mark else ""
        problem = (error.problem or str(error)).splitlines()[0]
        raise ConfigurationError(f"{where}{place}: not valid YAML: {problem}") from error
    except YAMLError as error:
        raise ConfigurationError(f"{where}: not valid YAML: {error}") from error


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Merge section by section; lists and plain values of ``over`` replace those of ``base``."""
    merged = dict(base)
    for key, value in over.items():
        earlier = merged.get(key)
        if isinstance(earlier, dict) and isinstance(value, dict):
            value = _merge(earlier, value)
        merged[key] = value
    return merged


def _apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one field of the tree in place; missing sections on the way are created."""
    dotted, equals, text = override.partition("=")
    if not equals or not dotted:
        raise ConfigurationError(
            f"override {override!r}: write section.field=value, for example train.steps=50"
        )
    # Walk down to the section or list that holds the field.
    *parents, last = dotted.split(".")
    node: Any = tree
    for part in parents:
        child = _child(node, part, override)
        if child is None:
            child = {}
            _set(node, part, child)
        node = child
    value = _yaml(text, f"override {override!r}")
    _child(node, last, override)  # raises if the node cannot hold the field
    _set(node, last, value)


def _set(node: Any, part: str, value: Any) -> None:
    """Set a field of a section, or an item of a list."""
    node[int(part) if isinstance(node, list) else part] = value


def _child(node: Any, part: str, override: str) -> Any:
    """Return a field of a section, ``None`` if it is missing, or an item of a list."""
    if isinstance(node, dict):
        return node.get(part)
    if isinstance(node, list):
        if not part.isdecimal() or int(part) >= len(node):
            raise ConfigurationError(
                f"override {override!r}: {part!r} is no place in a list of {len(node)} item(s); "
                "to lengthen it, give the whole list"
            )
        return node[int(part)]
    raise ConfigurationError(f"override {override!r}: {part!r} lies below {node!r}, a plain value")
