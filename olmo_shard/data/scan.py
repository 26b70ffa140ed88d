"""The full scan of token files: every id and every checksum."""

from rich.console import Console
from rich.progress import Progress

from olmo_shard.data.token_file import TokenFile
from olmo_shard.errors import DataError


def scan(files: list[TokenFile], vocab_size: int) -> None:
    """Read every id of the files, with a progress bar on a terminal.

    :param vocab_size: number of ids of the model.
    :raises DataError: naming each file that has an id outside the vocabulary or ids of another
        type, or that has changed since it was written.
    """
    console = Console(stderr=True)
    # A file may appear in several sources; it is read once.
    unique = list(dict.fromkeys(files))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("scan ids", total=sum(file.num_tokens() for file in unique))
        results = [
            file.id_problem(vocab_size, lambda count: progress.advance(task, count))
            for file in unique
        ]
    problems = [problem for problem in results if problem]
    if problems:
        raise DataError("\n  ".join(["these data cannot be used:", *problems]))
