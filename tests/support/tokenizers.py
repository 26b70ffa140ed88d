"""Small tokenizers of every kind that pretrained models use, trained on difficult fragments."""

import random
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4 = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
    r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QUIET: dict[str, Any] = {"show_progress": False}
FRAGMENTS = (
    *("the", "quick", "Brown", "FOX's", "it'll", "été", "e\u0301", "İstanbul"),
    *("слово", "字符", "ไทย", "한국어"),
    *(" ", "  ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000"),
    *(".", ",", "...", "。", "、", "'", "!?", "(", ")", "-", "/", "_", "=", "=\u0338", "\u0308"),
    *("1", "12345", "x86", "½", "²", "😀", "<s>", "abc_def", "▁", "\x00"),
)


def text_of(seed: int, fragments: int = 400) -> str:
    """Words and marks in random order, so that every kind of join over a cut occurs."""
    generator = random.Random(seed)
    return "".join(
        generator.choice(FRAGMENTS) + generator.choice(("", " ", " ", "\n"))
        for _ in range(fragments)
    )


def trained(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    """Train a tokenizer on four texts and return it."""
    tokenizer.train_from_iterator([text_of(seed) for seed in range(4)], trainer)
    return tokenizer


def bpe(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    """A BPE over bytes, of 500 ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(
        tokenizer, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, **QUIET)
    )


def split(pattern: str, behavior: str = "isolated", *before: Any) -> Tokenizer:
    """A BPE whose pre-tokenizer splits by a pattern, after other pre-tokenizers."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    members = [*before, pre_tokenizers.Split(Regex(pattern), behavior), byte_level]
    return bpe(pre_tokenizers.Sequence(members))


def deepseek() -> Tokenizer:
    """DeepSeek's sequence of three splits."""
    before = (r"\p{N}{1,3}", "[一-龥\u3040-ゟ\u30a0-ヿ]+")
    return split(
        DEEPSEEK, "isolated", *(pre_tokenizers.Split(Regex(p), "isolated") for p in before)
    )


def word_piece() -> Tokenizer:
    """BERT's kind of tokenizer."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return trained(
        tokenizer, trainers.WordPieceTrainer(vocab_size=400, special_tokens=["[UNK]"], **QUIET)
    )


def unigram(scheme: Any, *members: Any) -> Tokenizer:
    """T5's kind of tokenizer, with NFKC and further normalizers."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), *members])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], **QUIET
    )
    return trained(tokenizer, trainer)


def word_level() -> Tokenizer:
    """One id per word."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return trained(tokenizer, trainers.WordLevelTrainer(special_tokens=["[UNK]"], **QUIET))


def llama_2() -> Tokenizer:
    """Llama 2's kind of tokenizer, which has no pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=300, **QUIET))


def with_added(**settings: bool) -> Tokenizer:
    """A BPE with two added tokens that are not special."""
    tokenizer = bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.add_tokens([AddedToken("quick", **settings), AddedToken("fox\n", normalized=False)])
    return tokenizer


# Tokenizers that allow cuts, and tokenizers with which documents stay whole.
CUT: dict[str, Callable[[], Tokenizer]] = {
    "byte-level": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "byte-level, prefix space": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "byte-level, NFC": lambda: bpe(pre_tokenizers.ByteLevel(False), normalizers.NFC()),
    "byte-level, NFD": lambda: bpe(pre_tokenizers.ByteLevel(False), normalizers.NFD()),
    "byte-level, lower": lambda: bpe(pre_tokenizers.ByteLevel(False), normalizers.Lowercase()),
    "llama 3": lambda: split(LLAMA_3),
    "gpt-4": lambda: split(GPT_4),
    "gpt-4o": lambda: split(GPT_4O),
    "deepseek": deepseek,
    "word piece": word_piece,
    "word level": word_level,
    "unigram, always": lambda: unigram("always"),
    "unigram, first": lambda: unigram("first"),
    "single word": lambda: with_added(single_word=True),
}
WHOLE: dict[str, Callable[[], Tokenizer]] = {
    "llama 2": llama_2,
    "strip": lambda: unigram("always", normalizers.Strip()),
    "look-behind": lambda: split(r"(?<=\s)\S+"),
    "anchor": lambda: split(r"^\S+|\s+"),
    "any character": lambda: split(r".+\n?|\n"),
    "merged": lambda: split(r"\s+", "merged_with_next"),
    "added, strips": lambda: with_added(rstrip=True),
}
