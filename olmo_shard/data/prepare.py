"""``olmo-shard prepare``: from text to token files.

The output folder holds four files:

- train.bin and validation.bin: flat ids, each document followed by the end token. Their type is the
  narrowest unsigned integer that holds the vocabulary.
- tokenizer.json and meta.json.

The folder gets its name by a rename when all files are complete.
"""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from olmo_shard.data.cuts import PIECE, Cutter
from olmo_shard.data.documents.files import InputFile
from olmo_shard.data.documents.report import Report
from olmo_shard.data.encode import encode, pieces_of
from olmo_shard.data.meta import Meta, TokenType
from olmo_shard.data.splits import SplitWriter, write_splits
from olmo_shard.data.tokenizer import (
    add_eos,
    eos_id,
    load_tokenizer,
    new_byte_level,
    sample,
    sampling_step,
    train_bpe,
)
from olmo_shard.errors import DataError

SPLITS = ("train", "validation")
"""Names of the splits, and of their files without the ending."""
_LONG_PIECE = 16 * PIECE
"""Characters from which on ``prepare`` reports a piece, because of its memory."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Options of the command line, without the sources."""

    out: Path
    """Folder to write, which must not exist."""
    tokenizer: Path | None
    """The tokenizer.json to use; ``None`` means that a BPE is trained."""
    bpe_vocab_size: int | None
    """Number of ids of the BPE to train; ``None`` if there is a tokenizer.json."""
    eos: str | None
    """Name of the special token that ends a document; ``None`` means one of the usual names."""
    add_eos: bool = False
    """Whether ``eos`` is added to the tokenizer."""
    validation_fraction: float
    """Share of the documents that go to validation, from 0 to 0.5."""


def prepare(
    files: list[InputFile], options: PrepareOptions, console: Console, report: Report
) -> Meta:
    """Tokenize files into a new folder, and print counts of skipped and replaced input.

    :param files: files to read, in order.
    :param console: receives progress, notes and the counts.
    :param report: collects what the readers skip or replace.
    :raises DataError: for bad input, or if the folder exists.
    """
    # Everything that can fail without reading the input comes first.
    _check(files, options)
    with _progress(console) as progress:
        tokenizer = _tokenizer(files, options, progress, report.skip_bad)
        if options.add_eos:
            add_eos(tokenizer, options.eos)
        # In the target's parent folder, so that the rename at the end stays within one file system.
        with (
            _unwritable_as(options.out),
            tempfile.TemporaryDirectory(dir=options.out.parent, prefix=".prepare-") as temporary,
        ):
            folder = Path(temporary) / "data"
            folder.mkdir()
            meta = _write(files, tokenizer, folder, options, progress, report)
            tokenizer.save(str(folder / "tokenizer.json"))
            meta.save(folder)
            folder.rename(options.out)
    for line in report.lines():
        console.print(line, markup=False)
    return meta


def narrowest_type(vocab_size: int) -> TokenType:
    """Return the narrowest unsigned type that holds all ids below ``vocab_size``.

    :raises DataError: if the vocabulary does not fit uint32.
    """
    for name in get_args(TokenType):
        if vocab_size - 1 <= np.iinfo(name).max:
            return name
    raise DataError(f"a vocabulary of {vocab_size} ids does not fit uint32")


@contextmanager
def _unwritable_as(out: Path) -> Iterator[None]:
    """Turn an ``OSError`` into a ``DataError`` that names the output folder."""
    # Errors of reading cannot arrive here: the readers turn them into errors about the input.
    try:
        yield
    except OSError as error:
        raise DataError(f"--out {out} cannot be written: {error.strerror}") from error


def _check(files: list[InputFile], options: PrepareOptions) -> None:
    """:raises DataError: if the options are wrong or the output cannot be written."""
    if not files:
        raise DataError("no sources: name files or folders, or use --stdlib")
    with _unwritable_as(options.out):
        options.out.parent.mkdir(parents=True, exist_ok=True)
        # Create and remove a folder now: an error after minutes of work would be late.
        tempfile.TemporaryDirectory(dir=options.out.parent, prefix=".prepare-").cleanup()
    if options.out.exists():
        raise DataError(f"--out {options.out} exists already; remove it or choose another folder")
    if not 0 <= options.validation_fraction <= 0.5:
        raise DataError(
            f"--validation-fraction {options.validation_fraction} is not between 0 and 0.5"
        )


def _tokenizer(
    files: list[InputFile], options: PrepareOptions, progress: Progress, skip_bad: bool
) -> Tokenizer:
    """Load the tokenizer, or train one on a sample of the documents."""
    if options.tokenizer is not None:
        return load_tokenizer(
            options.tokenizer, lambda line: progress.console.print(line, markup=False)
        )
    assert options.bpe_vocab_size is not None
    tokenizer = new_byte_level()
    every = sampling_step(sum(file.size for file in files))
    # Training reads with a report of its own: the pass that writes the ids counts skipped input.
    documents = _documents(files, progress, "train BPE", Report(skip_bad=skip_bad))
    # Training locks its tokenizer, so the cutter needs another one of the same kind.
    pieces = pieces_of(sample(documents, every), Cutter(new_byte_level()))
    train_bpe(tokenizer, (piece.text for piece in pieces), options.bpe_vocab_size)
    return tokenizer


def _write(
    files: list[InputFile],
    tokenizer: Tokenizer,
    folder: Path,
    options: PrepareOptions,
    progress: Progress,
    report: Report,
) -> Meta:
    """Write the token files into ``folder``, and return their description."""
    vocab_size = _id_bound(tokenizer)
    type_name, eos = narrowest_type(vocab_size), eos_id(tokenizer, options.eos)
    fraction, cutter = options.validation_fraction, Cutter(tokenizer)
    # Stream all documents through cutter, tokenizer and writers: memory does not grow.
    with ExitStack() as stack:
        train, validation = (
            SplitWriter(
                stack.enter_context((folder / f"{split}.bin").open("w+b")), np.dtype(type_name)
            )
            for split in SPLITS
        )
        documents = _documents(files, progress, "tokenize", report)
        encoded = encode(pieces_of(documents, cutter), tokenizer)
        write_splits(encoded, eos, fraction, train, validation)
    if not train.tokens:
        reasons = "".join(f"; {line}" for line in report.lines())
        raise DataError(f"the {len(files)} source file(s) hold no text to train on{reasons}")
    # Report what the user may not expect, and describe the files.
    for line in _remarks(train, validation, fraction, cutter):
        progress.console.print(line, markup=False)
    writers = dict(zip(SPLITS, (train, validation), strict=True))
    return Meta(
        dtype=type_name,
        vocab_size=vocab_size,
        eos_id=eos,
        tokens={split: writer.tokens for split, writer in writers.items()},
        documents={split: writer.documents for split, writer in writers.items()},
        sha256={split: writer.sha256 for split, writer in writers.items()},
    )


def _remarks(
    train: SplitWriter, validation: SplitWriter, fraction: float, cutter: Cutter
) -> Iterator[str]:
    """Lines about an unusual validation split, and about high memory use."""
    count = train.documents + validation.documents
    if fraction and not validation.documents:
        yield "validation: empty, as the only document stays in train"
    elif fraction and count * fraction < 1:
        yield f"validation: the last of {count} documents, as {fraction:g} of them is none"
    if cutter.longest_piece > _LONG_PIECE:
        yield (
            f"memory: {cutter.longest_piece:,} characters were encoded at once, since the text or "
            "the tokenizer allows no cut there that keeps the ids"
        )


def _id_bound(tokenizer: Tokenizer) -> int:
    """One more than the largest id. It exceeds the number of tokens if the ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def _documents(
    files: list[InputFile], progress: Progress, what: str, report: Report
) -> Iterator[str]:
    """Yield the documents that are not empty, with progress in bytes of finished files."""
    task = progress.add_task(what, total=sum(file.size for file in files))
    for file in files:
        yield from file.documents(report)
        progress.advance(task, file.size)


def _progress(console: Console) -> Progress:
    """A progress bar, on terminals only."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
