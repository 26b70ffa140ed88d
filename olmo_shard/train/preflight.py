"""Everything about a run that can be known without training."""

from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from olmo_shard.config import Config
from olmo_shard.data.loader import total_steps
from olmo_shard.data.source import open_sources
from olmo_shard.data.token_file import TokenFile
from olmo_shard.errors import DataError
from olmo_shard.train.checkpoint_folder import read_state
from olmo_shard.train.run_folder import check_something_left, check_writable, choose_checkpoint

SCAN_LIMIT_BYTES = 4 * 2**30
"""``train`` scans this much data before it starts; of more, ids are checked as they are read."""


def preflight(config: Config, world_size: int) -> list[TokenFile]:
    """Layout, batch, run folder and data files; reads no ids, writes nothing.

    :returns: all token files of the run.
    :raises OlmoShardError: for the first part that is wrong.
    """
    config.check_world(world_size)
    check_writable(config)
    named = config.data.named_sources() | config.data.named_validation()
    sources = open_sources(named, config.data, config.model.vocab_size)
    return [file for source in sources for file in source.files]


def check_start(config: Config) -> None:
    """Whether the run can begin, or go on, from where it is told to.

    :raises OlmoShardError: where a checkpoint is missing or does not fit, or nothing is left to
        train.
    """
    sources = open_sources(config.data.named_sources(), config.data, config.model.vocab_size)
    steps = total_steps(config, sum(source.num_sequences for source in sources))
    path = choose_checkpoint(config)
    if path is not None:
        check_something_left(path, steps)
    elif config.checkpoint.init_from:
        read_state(Path(config.checkpoint.init_from))


def scan(files: list[TokenFile], vocab_size: int) -> None:
    """Read every id and checksum.

    :raises DataError: naming each file with an id outside the vocabulary, of a wrong type, or
        changed since it was written.
    """
    console = Console(stderr=True)
    unique = list({(file.path, file.dtype): file for file in files}.values())
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("scan ids", total=sum(file.num_tokens() for file in unique))
        found = [
            file.id_problem(vocab_size, lambda count: progress.advance(task, count))
            for file in unique
        ]
    problems = [problem for problem in found if problem]
    if problems:
        raise DataError("\n  ".join(["these data cannot be used:", *problems]))


def scan_before_training(files: list[TokenFile], vocab_size: int) -> None:
    """The scan, where it takes seconds rather than hours."""
    if sum(file.path.stat().st_size for file in files) <= SCAN_LIMIT_BYTES:
        scan(files, vocab_size)
