"""Tokenizers: loaded from a tokenizer.json, or a byte-level BPE trained on the sources."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from olmo_shard.data.termination import call_in_thread
from olmo_shard.errors import DataError

EOS = "<|endoftext|>"
"""Default name of the token that ends a document."""
_EOS_NAMES = (EOS, "</s>", "<eos>", "<|end_of_text|>", "[EOS]")
_TRAINING_CHARACTERS = 4_000_000
"""Characters of the sample for BPE training. More text changes an 8k vocabulary little."""
_SWITCHED_OFF = ("truncation", "padding", "post_processor")
"""Settings of a tokenizer.json that remove ids of documents or add ids to them."""
_SAMPLED = ("dropout", "alpha", "nbest_size")
"""Settings of the tokenizer's model that make its ids random."""


def new_byte_level() -> Tokenizer:
    """Return a byte-level BPE that is not trained yet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_bpe(tokenizer: Tokenizer, texts: Iterator[str], vocab_size: int) -> None:
    """Train a byte-level BPE, with ``EOS`` as its end token.

    :param tokenizer: untrained tokenizer; it is changed in place.
    :param texts: documents, or pieces of documents.
    :param vocab_size: number of ids.
    :raises DataError: if the sources are too small for the vocabulary.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise DataError(
            f"--train-bpe {vocab_size}: a byte-level vocabulary needs more than {len(alphabet)} ids"
        )
    # With the whole alphabet, every text can be encoded, whatever the sample contained.
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
    """Yield each ``every``-th document, so that the sample spans all sources."""
    return (text for index, text in enumerate(documents) if index % every == 0)


def sampling_step(total_bytes: int) -> int:
    """Return the number of documents per document of the sample, for sources of this size."""
    return max(1, total_bytes // _TRAINING_CHARACTERS)


def load_tokenizer(path: Path, note: Callable[[str], None]) -> Tokenizer:
    """Load a tokenizer.json without the settings that would change the ids of documents.

    These are truncation, padding, the post-processor, which adds tokens such as BOS, and random
    choices of the model, such as BPE dropout.

    :param note: called with one line if settings were switched off.
    :raises DataError: if the file is missing or is not a tokenizer.json.
    """
    if not path.is_file():
        raise DataError(f"--tokenizer {path}: no such file")
    try:
        settings = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"--tokenizer {path}: not a tokenizer.json: {error}") from error
    # Change the JSON, not the loaded tokenizer, so that a setting without an API is removed, too.
    removed = _switch_off(settings)
    # The tokenizers package raises plain Exceptions.
    try:
        tokenizer = Tokenizer.from_str(json.dumps(settings))
    except Exception as error:
        raise DataError(f"--tokenizer {path}: not a tokenizer.json: {error}") from error
    if removed:
        note(f"tokenizer: switched off, as documents are encoded whole: {', '.join(removed)}")
    return tokenizer


def _switch_off(settings: Any) -> list[str]:
    """Remove the settings in place, and return a description of each one that was set."""
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
    """Whether a setting has an effect on ids."""
    # The post-processor ByteLevel changes offsets only.
    return value is not None and not (isinstance(value, dict) and value.get("type") == "ByteLevel")


def _described(name: str, value: Any) -> str:
    """A setting for a message: its name, and its length, type or value."""
    if isinstance(value, dict):
        value = value.get("max_length") or value.get("type") or "on"
    return f"{name} ({value})"


def add_eos(tokenizer: Tokenizer, name: str | None) -> None:
    """Add a special token that ends documents. The vocabulary grows by one id.

    :param name: name of the token; ``None`` means ``EOS``.
    :raises DataError: if the tokenizer has the token already, or has no free id after its last id.
    """
    name = name or EOS
    vocabulary = tokenizer.get_vocab()
    if name in vocabulary:
        special = name in _special_tokens(tokenizer)
        way_out = "drop --add-eos" if special else "name another one with --eos"
        kind = "special token" if special else "piece of ordinary text"
        raise DataError(f"--add-eos: the tokenizer has {name} already, as a {kind}; {way_out}")
    # The package gives the new token the id len(vocabulary), which may be taken if ids have gaps.
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    if tokenizer.token_to_id(name) in vocabulary.values():
        raise DataError(
            f"--add-eos: the ids of the tokenizer have gaps: {len(vocabulary):,} tokens, but the "
            f"largest id is {max(vocabulary.values()):,}; add {name} to the tokenizer.json yourself"
        )


def eos_id(tokenizer: Tokenizer, name: str | None) -> int:
    """Return the id of the special token that ends documents.

    :param name: name of the token; ``None`` means the first of the usual names that exists.
    :raises DataError: if there is no such special token. A token that text may contain would end a
        document in the middle.
    """
    special = _special_tokens(tokenizer)
    names = (name,) if name else _EOS_NAMES
    for candidate in names:
        if candidate in special:
            return special[candidate]
    raise DataError(
        f"the tokenizer has no special token {' or '.join(names)} to end documents; name one "
        f"of its special tokens with --eos: {', '.join(special) or 'it has none'}; or add one "
        "with --add-eos"
    )


def _special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the special tokens, which text cannot contain, by name."""
    added = tokenizer.get_added_tokens_decoder().items()
    return {token.content: number for number, token in added if token.special}
