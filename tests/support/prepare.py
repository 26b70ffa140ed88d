"""``prepare`` with few options, and without output unless a console is given."""

import io
from pathlib import Path
from typing import Any

from rich.console import Console

from olmo_shard.data.documents.files import InputFile, find_files
from olmo_shard.data.documents.report import Report
from olmo_shard.data.meta import Meta
from olmo_shard.data.prepare import PrepareOptions
from olmo_shard.data.prepare import prepare as run_prepare


def options(tmp_path: Path, **changes: Any) -> PrepareOptions:
    """Options with a trained BPE of 300 ids and a quarter of the documents for validation."""
    fields: dict[str, Any] = {
        "out": tmp_path / "out",
        "tokenizer": None,
        "bpe_vocab_size": 300,
        "eos": None,
        "validation_fraction": 0.25,
    }
    return PrepareOptions(**(fields | changes))


def prepare(files: list[InputFile], chosen: PrepareOptions, console: Console | None = None) -> Meta:
    """Prepare files; returns the description of the folder."""
    return run_prepare(files, chosen, console or Console(quiet=True), Report())


def found(*sources: Path) -> list[InputFile]:
    """The files of sources, with the text in the field ``text``."""
    return find_files([str(source) for source in sources], "text", Report())


def printed(files: list[InputFile], chosen: PrepareOptions) -> str:
    """Prepare files; returns the output."""
    with io.StringIO() as stream:
        prepare(files, chosen, Console(file=stream, width=1000))
        return stream.getvalue()
