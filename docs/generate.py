"""Build hook of the documentation: pages made from the code, so they cannot differ from it.

``reference/config.md`` comes from the pydantic models, ``reference/commands.md`` from the command
line, ``changelog.md`` from CHANGELOG.md.
"""

from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer.main
from annotated_types import Ge, Gt, Le, Lt
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic.fields import FieldInfo

from olmo_shard.cli import app
from olmo_shard.config import Config
from olmo_shard.config.section import Section

ROOT = Path(__file__).parents[1]
BOUNDS = {Ge: (">=", "ge"), Gt: (">", "gt"), Le: ("<=", "le"), Lt: ("<", "lt")}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "reference/config.md": config_page(),
        "reference/commands.md": commands_page(),
        "changelog.md": (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"),
    }
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def config_page() -> str:
    """Every section and field of the config: type, default, meaning."""
    lines = [
        "# Config",
        "",
        "A config is strict YAML. An unknown key is an error, which names the nearest valid key.",
        "`extends: other.yaml` at the top takes all fields of another file that this one does not",
        "set. On the command line `section.field=value` overrides a field.",
        "",
        "This page is generated from the models in `olmo_shard/config/`.",
        "",
    ]
    for name, section in sections(Config, ""):
        lines += [f"## `{name}`", ""]
        # A section without a docstring inherits the one of its base class.
        if section.__doc__ and section.__doc__ != Section.__doc__:
            lines += [_prose(section.__doc__), ""]
        lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
        lines += [_row(field, info) for field, info in section.model_fields.items()]
        lines.append("")
    return "\n".join(lines)


def sections(model: type[Section], prefix: str) -> Iterator[tuple[str, type[Section]]]:
    """All sections below a model, with their dotted names, parents first."""
    for field, info in model.model_fields.items():
        for nested in _sections_in(info.annotation):
            yield f"{prefix}{field}", nested
            yield from sections(nested, f"{prefix}{field}.")


def commands_page() -> str:
    """Every command with its arguments and options."""
    lines = ["# Commands", "", "`olmo-shard COMMAND --help` prints the same.", ""]
    group = typer.main.get_command(app)
    for name, command in vars(group)["commands"].items():
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = [p.metavar or f"[{p.name.upper()}]..." for p in arguments]
        lines += [f"## `olmo-shard {name}`", "", _prose(command.help or ""), ""]
        lines += ["```", " ".join(["olmo-shard", name, *usage, "[OPTIONS]"]), "```", ""]
        lines += ["| argument or option | default | meaning |", "|---|---|---|"]
        for parameter in command.params:
            unset = parameter.default is None or parameter.default is False
            default = "" if unset else f"`{parameter.default}`"
            label = parameter.metavar if parameter in arguments else None
            label = label or ", ".join(parameter.opts)
            text = _prose(getattr(parameter, "help", "") or "")
            lines.append(f"| `{label}` | {default} | {text} |")
        lines.append("")
    return "\n".join(lines)


def _row(field: str, info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=True)
    default = "required" if info.is_required() else _default(value)
    kinds = _types(info.annotation)
    bounds = [bound for item in info.metadata if (bound := _bound(item))]
    kinds[0] = " ".join([kinds[0], ", ".join(bounds)]).strip()
    return f"| `{field}` | {' or '.join(kinds)} | {default} | {_prose(info.description or '')} |"


def _types(annotation: Any) -> list[str]:
    """The alternatives of a type, in words of YAML."""
    if get_origin(annotation) is Literal:
        return [f"`{value}`" for value in get_args(annotation)]
    if _sections_in(annotation) and annotation in _sections_in(annotation):
        return ["section"]
    words = {int: "integer", float: "number", str: "text", bool: "true or false", NoneType: "null"}
    if annotation in words:
        return [words[annotation]]
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin in (list, tuple):
        return [f"list of {' or '.join(_types(inside[0]))}"]
    if origin is dict:
        return [f"mapping from name to {' or '.join(_types(inside[1]))}"]
    return [word for alternative in inside for word in _types(alternative)]


def _bound(item: Any) -> str | None:
    for kind, (sign, name) in BOUNDS.items():
        if isinstance(item, kind):
            return f"{sign} {getattr(item, name):g}"
    return None


def _default(value: Any) -> str:
    if isinstance(value, Section):
        return "see its section"
    if value is None or isinstance(value, bool):
        return f"`{str(value).lower() if value is not None else 'null'}`"
    return f"`{value}`"


def _sections_in(annotation: Any) -> list[type[Section]]:
    """The sections that a field may hold, also in a list, a mapping or a union."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for inside in get_args(annotation) for section in _sections_in(inside)]


def _prose(text: str) -> str:
    """A docstring in one line of a Markdown table."""
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")
