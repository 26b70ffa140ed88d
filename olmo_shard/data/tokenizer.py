"""Tokenizers: one given as tokenizer.json, or a byte-level BPE trained on the source."""

from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_shard.errors import DataError

EOS = "<|endoftext|>"
_EOS_NAMES = (EOS, "</s>", "<eos>", "<|end_of_text|>", "[EOS]")
_TRAINING_CHARACTERS = 4_000_000
"""BPE is trained on a sample of this size: more changes an 8k vocabulary little and takes longer.
"""


def train_bpe(documents: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE that ends documents with ``EOS``.

    :raises DataError: where the source is too small for the vocabulary.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise DataError(
            f"--train-bpe {vocab_size}: a byte-level vocabulary needs more than {len(alphabet)} ids"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise DataError(
            f"--train-bpe {vocab_size}: the source yields only {tokenizer.get_vocab_size()} ids; "
            "give more text or a smaller vocabulary"
        )
    return tokenizer


def sample(documents: Iterator[str], every: int) -> Iterator[str]:
    """Every n-th document, so that a sample spans the whole source."""
    return (text for index, text in enumerate(documents) if index % every == 0)


def sampling_step(total_bytes: int) -> int:
    return max(1, total_bytes // _TRAINING_CHARACTERS)


def load_tokenizer(path: Path) -> Tokenizer:
    """:raises DataError: where the file is missing or is no tokenizer.json."""
    if not path.is_file():
        raise DataError(f"--tokenizer {path}: no such file")
    # The Rust library raises bare Exceptions.
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        raise DataError(f"--tokenizer {path}: not a tokenizer.json: {error}") from error


def eos_id(tokenizer: Tokenizer, name: str | None) -> int:
    """Id of the token that ends a document.

    :param name: the token; null tries the usual names.
    :raises DataError: where the vocabulary has none. A piece of ordinary text will not do: wherever
        the text holds it, a document would end.
    """
    special = {
        token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()
    }
    names = (name,) if name else _EOS_NAMES
    for each in names:
        if each in special:
            return special[each]
    raise DataError(
        f"the tokenizer has no special token {' or '.join(names)} to end documents; name one "
        f"of its special tokens with --eos: {', '.join(special) or 'it has none'}"
    )
