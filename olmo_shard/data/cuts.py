"""Where a long document can be cut so that the ids of its pieces are those of the whole.

Tokenizers need about 190 bytes of memory per byte of text, so a document of 50 MB is encoded in
pieces. A cut lies between a letter and a character c that meet two conditions:

1. The normalizer keeps c, keeps letters letters, and treats each side alone as in the whole.
2. The pre-tokenizer always splits between the two, and splits each side alone as in the whole.

Models encode the parts that a pre-tokenizer makes one by one, so the ids are equal. The types of
normalizer and pre-tokenizer decide both conditions; an unknown type allows no cut.
"""

import json
import re
import string
import unicodedata
from collections.abc import Iterator
from typing import Any

from tokenizers import Tokenizer

from olmo_shard.data.split_pattern import splitting_characters

PIECE = 1 << 16
"""Characters after which the next safe place is cut."""
_CONTEXT = 128
"""Characters on each side of a cut that are encoded to check the cut."""
_COMPOSING = "<=>"
"""Characters that a combining mark after them changes into another character (as in U+2260)."""
RIGHT = frozenset(set(string.printable) - set(string.ascii_letters) - set(_COMPOSING) | set("。、"))
"""Candidates for c."""
_SPACE = frozenset(" ")
_BLANKS = frozenset(" \n")
_PUNCTUATION = frozenset(",.;:!?。、")
_NONE: frozenset[str] = frozenset()
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern inside of the pre-tokenizer ``ByteLevel``."""
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"}
"""Normalizers that keep every candidate c, and letters letters."""
_MAPPING_NORMALIZERS = {"Nmt", "Precompiled"}
"""Normalizers that may map any character but the space to another one."""


class Cutter:
    """Cuts long documents for one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._place: re.Pattern[str] | None = None
        self.longest_piece = 0
        """Characters of the longest piece so far."""

    def pieces(self, text: str) -> Iterator[str]:
        """Pieces of about ``PIECE`` characters whose ids, joined, are those of the text.

        A stretch without a safe place stays in one piece.
        """
        start = 0
        while len(text) - start > PIECE:
            end = self._next_cut(text, start + PIECE)
            if end is None:
                break
            yield self._counted(text[start:end])
            start = end
        yield self._counted(text[start:] if start else text)

    def _counted(self, piece: str) -> str:
        self.longest_piece = max(self.longest_piece, len(piece))
        return piece

    def _next_cut(self, text: str, start: int) -> int | None:
        if self._place is None:
            # Most sources hold no long document, so the tokenizer is looked at only now.
            allowed = allowed_characters(self._tokenizer)
            characters = "".join(map(re.escape, sorted(allowed)))
            self._place = re.compile(rf"(?<=[^\W\d_])[{characters}]" if allowed else "(?!)")
        for match in self._place.finditer(text, start):
            end = match.start()
            if _is_stable_letter(text[end - 1]) and self._holds(text, end):
                return end
        return None

    def _holds(self, text: str, end: int) -> bool:
        """Whether the cut leaves the ids of its surroundings as they are."""
        left, right = text[max(0, end - _CONTEXT) : end], text[end : end + _CONTEXT]
        whole, *parts = (self._ids(part) for part in (left + right, left, right))
        return whole == parts[0] + parts[1]

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _is_stable_letter(character: str) -> bool:
    """Whether every normal form of a letter is made of letters: no accent stands at its end."""
    in_basic_plane = character <= "\uffff"  # The characters that patterns are tried on.
    return in_basic_plane and unicodedata.normalize("NFKD", character.lower()).isalpha()


def allowed_characters(tokenizer: Tokenizer) -> frozenset[str]:
    """Each c such that every place between a letter and c is safe to cut; may be empty."""
    settings = json.loads(tokenizer.to_str())
    allowed = _kept_by(settings["normalizer"]) & _split_by(settings["pre_tokenizer"])
    for token in settings["added_tokens"]:
        if not token["special"]:
            # Tokens inside of a text are found before the pre-tokenizer splits the text.
            allowed -= set(token["content"])
            allowed -= set(string.digits + "_") if token["single_word"] else _NONE
            allowed = _NONE if token["lstrip"] or token["rstrip"] else allowed
    return allowed


def _kept_by(normalizer: dict[str, Any] | None) -> frozenset[str]:
    """Each c that a normalizer keeps, with a letter before it, on both sides of a cut."""
    match normalizer:
        case None:
            return RIGHT
        case {"type": kind} if kind in _LOCAL_NORMALIZERS:
            return RIGHT
        case {"type": kind} if kind in _MAPPING_NORMALIZERS:
            return _SPACE
        case {"type": "BertNormalizer"}:
            return _BLANKS | _PUNCTUATION
        case {"type": "Replace", "pattern": {"String": pattern}}:
            changes_letters = any(character.isalpha() for character in pattern)
            return _NONE if changes_letters else RIGHT - set(pattern)
        case {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": content}:
            return _SPACE if content[:1] in (" ", "▁") else _NONE
        case {"type": "Sequence", "normalizers": members}:
            return RIGHT.intersection(*map(_kept_by, members))
    return _NONE


def _split_by(pre_tokenizer: dict[str, Any] | None) -> frozenset[str]:
    """Each c before which a pre-tokenizer always splits."""
    members = [pre_tokenizer]
    if pre_tokenizer and pre_tokenizer["type"] == "Sequence":
        members = pre_tokenizer["pretokenizers"]
    undisturbed, found = RIGHT, _NONE
    for member in members:
        kept, split = _kept_and_split(member)
        # Members after a split see each side alone, in the whole text as in the pieces.
        found |= undisturbed & split
        undisturbed &= kept
    return found


def _kept_and_split(pre_tokenizer: dict[str, Any] | None) -> tuple[frozenset[str], frozenset[str]]:
    """Each c before which a cut adds at most a split for one pre-tokenizer, and the c of a split.

    The second set holds each c before which the pre-tokenizer splits the whole text, too.
    """
    match pre_tokenizer:
        case {"type": "ByteLevel", "use_regex": use_regex, "add_prefix_space": prefix}:
            kept, split = splitting_characters(_GPT_2, RIGHT) if use_regex else (RIGHT, _NONE)
            # A prefix space is added to a piece unless the piece starts with a space.
            return (kept & _SPACE, split & _SPACE) if prefix else (kept, split)
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated" | "Removed"}:
            return splitting_characters(pattern, RIGHT)
        case {"type": "Split", "pattern": {"String": pattern}, "behavior": "Isolated" | "Removed"}:
            return RIGHT - set(pattern), _NONE
        case {"type": "Metaspace", "replacement": "▁", "split": split}:
            return _SPACE, _SPACE if split else _NONE
        case {"type": "Whitespace" | "BertPreTokenizer"}:
            return RIGHT, _BLANKS | _PUNCTUATION
        case {"type": "WhitespaceSplit"}:
            return RIGHT, _BLANKS
        case {"type": "Digits"} | {"type": "Punctuation", "behavior": "Isolated"}:
            return RIGHT, _NONE
    return _NONE, _NONE
