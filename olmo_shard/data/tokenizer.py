"""Tokenizers: one given as tokenizer.json, or a byte-level BPE trained on the source."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_shard.data.signals import call_in_thread
from olmo_shard.errors import DataError

EOS = "<|endoftext|>"
_EOS_NAMES = (EOS, "</s>", "<eos>", "<|end_of_text|>", "[EOS]")
_TRAINING_CHARACTERS = 4_000_000
"""BPE is trained on a sample of this size: more changes an 8k vocabulary little and takes longer.
"""
_SWITCHED_OFF = ("truncation", "padding", "post_processor")
"""Settings of a tokenizer.json that shorten documents or add ids to them."""
_SAMPLED = ("dropout", "alpha", "nbest_size")
"""Settings of a model that make its ids random."""


def new_byte_level() -> Tokenizer:
    """A byte-level BPE that is not trained yet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_bpe(tokenizer: Tokenizer, texts: Iterator[str], vocab_size: int) -> None:
    """Train a byte-level BPE that ends documents with ``EOS``.

    :param texts: documents, or pieces of documents.
    :raises DataError: where the source is too small for the vocabulary.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise DataError(
            f"--train-bpe {vocab_size}: a byte-level vocabulary needs more than {len(alphabet)} ids"
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    call_in_thread(tokenizer.train_from_iterator, texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise DataError(
            f"--train-bpe {vocab_size}: the source yields only {tokenizer.get_vocab_size()} ids; "
            "give more text or a smaller vocabulary"
        )


def sample(documents: Iterator[str], every: int) -> Iterator[str]:
    """Every n-th document, so that a sample spans the whole source."""
    return (text for index, text in enumerate(documents) if index % every == 0)


def sampling_step(total_bytes: int) -> int:
    """Documents per document of the sample."""
    return max(1, total_bytes // _TRAINING_CHARACTERS)


def load_tokenizer(path: Path, note: Callable[[str], None]) -> Tokenizer:
    """Load a tokenizer.json, without its settings that change the ids of a document.

    Truncation, padding, the post-processor (which adds tokens such as BOS) and random choices of
    the model (BPE dropout) are switched off.

    :param note: called with one line where settings were switched off.
    :raises DataError: where the file is missing or is no tokenizer.json.
    """
    if not path.is_file():
        raise DataError(f"--tokenizer {path}: no such file")
    try:
        settings = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"--tokenizer {path}: not a tokenizer.json: {error}") from error
    removed = _switch_off(settings)
    # The Rust library raises bare Exceptions.
    try:
        tokenizer = Tokenizer.from_str(json.dumps(settings))
    except Exception as error:
        raise DataError(f"--tokenizer {path}: not a tokenizer.json: {error}") from error
    if removed:
        note(f"tokenizer: switched off, as documents are encoded whole: {', '.join(removed)}")
    return tokenizer


def _switch_off(settings: Any) -> list[str]:
    """Remove the settings; returns what the file had set."""
    removed: list[str] = []
    if not isinstance(settings, dict):
        return removed
    model = settings.get("model")
    for part, names in ((settings, _SWITCHED_OFF), (model, _SAMPLED)):
        for name in names:
            if isinstance(part, dict) and _is_set(part.get(name)):
                removed.append(_described(name, part[name]))
                part[name] = None
    return removed


def _is_set(value: Any) -> bool:
    # The post-processor ByteLevel moves offsets, and no id.
    return value is not None and not (isinstance(value, dict) and value.get("type") == "ByteLevel")


def _described(name: str, value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("max_length") or value.get("type") or "on"
    return f"{name} ({value})"


def add_eos(tokenizer: Tokenizer, name: str | None) -> None:
    """Add a special token that ends documents, as one more id.

    :param name: the token; ``None`` means ``EOS``.
    :raises DataError: where the tokenizer has the token, or no free id after its last one.
    """
    name = name or EOS
    vocabulary = tokenizer.get_vocab()
    if name in vocabulary:
        special = name in _special_tokens(tokenizer)
        way_out = "drop --add-eos" if special else "name another one with --eos"
        kind = "special token" if special else "piece of ordinary text"
        raise DataError(f"--add-eos: the tokenizer has {name} already, as a {kind}; {way_out}")
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    if tokenizer.token_to_id(name) in vocabulary.values():
        raise DataError(
            f"--add-eos: the ids of the tokenizer have gaps: {len(vocabulary):,} tokens, but the "
            f"largest id is {max(vocabulary.values()):,}; add {name} to the tokenizer.json yourself"
        )


def eos_id(tokenizer: Tokenizer, name: str | None) -> int:
    """Id of the token that ends a document.

    :param name: the token; ``None`` tries the usual names.
    :raises DataError: where the vocabulary has none. A piece of ordinary text will not do: wherever
        the text holds it, a document would end.
    """
    special = _special_tokens(tokenizer)
    names = (name,) if name else _EOS_NAMES
    for each in names:
        if each in special:
            return special[each]
    raise DataError(
        f"the tokenizer has no special token {' or '.join(names)} to end documents; name one "
        f"of its special tokens with --eos: {', '.join(special) or 'it has none'}; or add one "
        "with --add-eos"
    )


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the added tokens that text cannot hold."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {token.content: number for number, token in added if token.special}
