"""``olmo-shard prepare``: from text to token files.

The output folder holds train.bin and validation.bin (flat ids in the narrowest unsigned type that
holds the vocabulary, every document ended by EOS), tokenizer.json and meta.json. It appears all at
once, when complete.
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
_LONG_PIECE = 16 * PIECE
"""Characters of a piece whose memory is worth a line to the user."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """The options of the command line besides the sources."""

    out: Path
    tokenizer: Path | None
    """A tokenizer.json to use."""
    bpe_vocab_size: int | None
    """Ids of the BPE to train where no tokenizer is given."""
    eos: str | None
    """The special token that ends a document; ``None`` means one of the usual names."""
    add_eos: bool = False
    """Whether ``eos`` is added to the tokenizer."""
    validation_fraction: float
    """Share of the documents that go to validation, in 0 .. 0.5."""


def prepare(
    files: list[InputFile], options: PrepareOptions, console: Console, report: Report
) -> Meta:
    """Tokenize files into a new folder, and print what was skipped or replaced.

    :raises DataError: for bad input, or where the folder exists.
    """
    _check(files, options)
    with _progress(console) as progress:
        tokenizer = _tokenizer(files, options, progress, report.skip_bad)
        if options.add_eos:
            add_eos(tokenizer, options.eos)
        # Beside the target, so that the rename at the end stays on one file system.
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
    """The narrowest unsigned type that holds all ids below ``vocab_size``."""
    for name in get_args(TokenType):
        if vocab_size - 1 <= np.iinfo(name).max:
            return name
    raise DataError(f"a vocabulary of {vocab_size} ids does not fit uint32")


@contextmanager
def _unwritable_as(out: Path) -> Iterator[None]:
    # The readers of the input turn their own errors into messages that name the input.
    try:
        yield
    except OSError as error:
        raise DataError(f"--out {out} cannot be written: {error.strerror}") from error


def _check(files: list[InputFile], options: PrepareOptions) -> None:
    if not files:
        raise DataError("no sources: name files or folders, or use --stdlib")
    with _unwritable_as(options.out):
        options.out.parent.mkdir(parents=True, exist_ok=True)
        # Tried now, not after minutes of work.
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
    if options.tokenizer is not None:
        return load_tokenizer(
            options.tokenizer, lambda line: progress.console.print(line, markup=False)
        )
    assert options.bpe_vocab_size is not None
    tokenizer = new_byte_level()
    every = sampling_step(sum(file.size for file in files))
    # The pass that writes the ids counts what is skipped; this one does not count it again.
    documents = _documents(files, progress, "train BPE", Report(skip_bad=skip_bad))
    # Training locks its tokenizer, so another one of the same kind decides where to cut.
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
    vocab_size = _id_bound(tokenizer)
    type_name, eos = narrowest_type(vocab_size), eos_id(tokenizer, options.eos)
    fraction, cutter = options.validation_fraction, Cutter(tokenizer)
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
        raise DataError(f"the {len(files)} source file(s) hold no text to train on")
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
    """Lines about what a user might not expect."""
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
    """One more than the largest id, which may exceed the number of tokens where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def _documents(
    files: list[InputFile], progress: Progress, what: str, report: Report
) -> Iterator[str]:
    """All documents that are not empty, with progress by bytes of finished files."""
    task = progress.add_task(what, total=sum(file.size for file in files))
    for file in files:
        yield from file.documents(report)
        progress.advance(task, file.size)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
