"""``prepare`` with short options, silent unless a console is given."""

import io
from pathlib import Path

from rich.console import Console

from olmo_shard.data.documents.files import InputFile, find_files
from olmo_shard.data.documents.report import Report
from olmo_shard.data.meta import Meta
from olmo_shard.data.prepare import PrepareOptions
from olmo_shard.data.prepare import prepare as run_prepare


def options(tmp_path: Path, **changes) -> PrepareOptions:
    fields = {
        "out": tmp_path / "out",
        "tokenizer": None,
        "bpe_vocab_size": 300,
        "eos": None,
        "validation_fraction": 0.25,
    }
    return PrepareOptions(**(fields | changes))


def prepare(files: list[InputFile], chosen: PrepareOptions, console: Console | None = None) -> Meta:
    return run_prepare(files, chosen, console or Console(quiet=True), Report())


def found(*sources: Path) -> list[InputFile]:
    return find_files([str(source) for source in sources], "text", Report())


def printed(files: list[InputFile], chosen: PrepareOptions) -> str:
    """What prepare prints."""
    with io.StringIO() as stream:
        prepare(files, chosen, Console(file=stream, width=1000))
        return stream.getvalue()
