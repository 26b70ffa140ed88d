"""``olmo-shard prepare``: from text to token files.

The output folder holds train.bin and validation.bin (flat ids in the narrowest unsigned type that
holds the vocabulary, every document ended by EOS), tokenizer.json and meta.json. It appears all at
once, when complete.
"""

import hashlib
import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, get_args

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer

from olmo_shard.data.documents import InputFile
from olmo_shard.data.meta import Meta, TokenType
from olmo_shard.data.tokenizer import eos_id, load_tokenizer, sample, sampling_step, train_bpe
from olmo_shard.errors import DataError

_BATCH = 256
"""Documents that are encoded at once, in parallel."""
SPLITS = ("train", "validation")


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What the command line says besides the sources."""

    out: Path
    tokenizer: Path | None
    """A tokenizer.json to use."""
    bpe_vocab_size: int | None
    """Ids of the BPE to train where no tokenizer is given."""
    eos: str | None
    validation_fraction: float
    """Share of the documents that go to validation, in 0 .. 0.5."""


class _SplitWriter:
    """Appends documents to one token file."""

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self.file, self.dtype = file, dtype
        self.tokens = self.documents = 0
        self.digest = hashlib.sha256()

    def write(self, ids: list[int]) -> None:
        data = np.asarray(ids, dtype=self.dtype).tobytes()
        self.file.write(data)
        self.digest.update(data)
        self.tokens += len(ids)
        self.documents += 1


def prepare(files: list[InputFile], options: PrepareOptions, console: Console) -> Meta:
    """Tokenize files into a new folder.

    :raises DataError: for bad input, or where the folder exists.
    """
    _check(files, options)
    with _progress(console) as progress:
        tokenizer = _tokenizer(files, options, progress)
        # Beside the target, so that the rename at the end stays on one file system.
        with (
            _unwritable_as(options.out),
            tempfile.TemporaryDirectory(dir=options.out.parent, prefix=".prepare-") as temporary,
        ):
            folder = Path(temporary) / "data"
            folder.mkdir()
            meta = _write(files, tokenizer, folder, options, progress)
            tokenizer.save(str(folder / "tokenizer.json"))
            meta.save(folder)
            folder.rename(options.out)
    return meta


def narrowest_type(vocab_size: int) -> TokenType:
    """The narrowest unsigned type that holds all ids below ``vocab_size``."""
    for name in get_args(TokenType):
        if vocab_size - 1 <= np.iinfo(name).max:
            return name
    raise DataError(f"a vocabulary of {vocab_size} ids does not fit uint32")


@contextmanager
def _unwritable_as(out: Path) -> Iterator[None]:
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


def _tokenizer(files: list[InputFile], options: PrepareOptions, progress: Progress) -> Tokenizer:
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer)
    assert options.bpe_vocab_size is not None
    every = sampling_step(sum(file.size for file in files))
    documents = _documents(files, progress, "train BPE")
    return train_bpe(sample(documents, every), options.bpe_vocab_size)


def _write(
    files: list[InputFile],
    tokenizer: Tokenizer,
    folder: Path,
    options: PrepareOptions,
    progress: Progress,
) -> Meta:
    vocab_size = _id_bound(tokenizer)
    type_name, eos = narrowest_type(vocab_size), eos_id(tokenizer, options.eos)
    dtype = np.dtype(type_name)
    with ExitStack() as stack:
        train, validation = (
            _SplitWriter(stack.enter_context((folder / f"{split}.bin").open("wb")), dtype)
            for split in SPLITS
        )
        encoded = _encode(_documents(files, progress, "tokenize"), tokenizer)
        for number, ids in enumerate(encoded, start=1):
            held_out = _held_out(number, options.validation_fraction)
            (validation if held_out else train).write([*ids, eos])
    if not train.tokens:
        raise DataError(f"the {len(files)} source file(s) hold no text to train on")
    writers = dict(zip(SPLITS, (train, validation), strict=True))
    return Meta(
        dtype=type_name,
        vocab_size=vocab_size,
        eos_id=eos,
        tokens={split: writer.tokens for split, writer in writers.items()},
        documents={split: writer.documents for split, writer in writers.items()},
        sha256={split: writer.digest.hexdigest() for split, writer in writers.items()},
    )


def _held_out(number: int, fraction: float) -> bool:
    """Whether the ``number``-th document (from 1) goes to validation: evenly spread ones do."""
    return math.floor(number * fraction) > math.floor((number - 1) * fraction)


def _id_bound(tokenizer: Tokenizer) -> int:
    """One more than the largest id, which may exceed the number of tokens where ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def _encode(documents: Iterable[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    # The name of a special token inside a text is text: it must not end the document.
    tokenizer.encode_special_tokens = True
    remaining = iter(documents)
    while batch := list(islice(remaining, _BATCH)):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            yield encoding.ids


def _documents(files: list[InputFile], progress: Progress, what: str) -> Iterator[str]:
    """All documents that are not empty, with progress by bytes of finished files."""
    task = progress.add_task(what, total=sum(file.size for file in files))
    for file in files:
        yield from (text for text in file.documents() if text)
        progress.advance(task, file.size)


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)
