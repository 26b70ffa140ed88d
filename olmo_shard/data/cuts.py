"""Cuts of long documents: places where the pieces have the same ids as the whole document.

Tokenizers need about 190 bytes of memory per byte of text, so a document of 50 MB is encoded in
pieces. A cut is made between a letter and a character c, under two conditions:

1. The normalizer does not change c, turns letters into letters, and normalizes each side of the cut
   as it does within the whole text.
2. The pre-tokenizer always splits between the letter and c, and splits each side of the cut as it
   does within the whole text.

A model encodes each part that the pre-tokenizer made by itself, so the ids do not change. The types
of normalizer and pre-tokenizer decide which c meet the conditions. An unknown type allows no cut.
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
"""Characters after which a document is cut at the next safe place."""
_CONTEXT = 128
"""Characters on each side of a cut that are encoded to verify the cut."""
_COMPOSING = "<=>"
"""Characters that a combining mark after them turns into another character (as in U+2260)."""
RIGHT = frozenset(set(string.printable) - set(string.ascii_letters) - set(_COMPOSING) | set("。、"))
"""All candidates for c."""
_SPACE = frozenset(" ")
_BLANKS = frozenset(" \n")
_PUNCTUATION = frozenset(",.;:!?。、")
_NONE: frozenset[str] = frozenset()
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of the pre-tokenizer ``ByteLevel``."""
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"}
"""Normalizers that do not change any candidate c, and turn letters into letters."""
_MAPPING_NORMALIZERS = {"Nmt", "Precompiled"}
"""Normalizers that may change any character except the space."""


class Cutter:
    """Cuts long documents for one tokenizer.

    :param tokenizer: tokenizer that will encode the pieces. The cutter encodes with it as well.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._place: re.Pattern[str] | None = None
        self.longest_piece = 0
        """Number of characters of the longest piece so far."""

    def pieces(self, text: str) -> Iterator[str]:
        """Yield pieces of about ``PIECE`` characters. Their joined ids are the ids of the text.

        A part of the text without a safe place stays in one piece.
        """
        # Short documents, which are most, take no branch and no copy.
        start = 0
        while len(text) - start > PIECE:
            end = self._next_cut(text, start + PIECE)
            if end is None:
                break
            yield self._counted(text[start:end])
            start = end
        yield self._counted(text[start:] if start else text)

    def _counted(self, piece: str) -> str:
        """Return the piece, after its length is compared with the longest one."""
        self.longest_piece = max(self.longest_piece, len(piece))
        return piece

    def _next_cut(self, text: str, start: int) -> int | None:
        """The first safe place at or after ``start``; ``None`` if there is none."""
        if self._place is None:
            # Built at the first long document: most sources have none.
            allowed = allowed_characters(self._tokenizer)
            # An allowed character after a letter. ``(?!)`` matches nowhere.
            characters = "".join(map(re.escape, sorted(allowed)))
            self._place = re.compile(rf"(?<=[^\W\d_])[{characters}]" if allowed else "(?!)")
        # The analysis says that each match is safe. The ids around it confirm this, in case that
        # another version of the tokenizers package behaves differently.
        for match in self._place.finditer(text, start):
            end = match.start()
            if _is_stable_letter(text[end - 1]) and self._keeps_ids(text, end):
                return end
        return None

    def _keeps_ids(self, text: str, end: int) -> bool:
        """Whether the characters around the cut have the same ids with and without it."""
        left, right = text[max(0, end - _CONTEXT) : end], text[end : end + _CONTEXT]
        whole, *parts = (self._ids(part) for part in (left + right, left, right))
        return whole == parts[0] + parts[1]

    def _ids(self, text: str) -> list[int]:
        """The ids of a short text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids


def _is_stable_letter(character: str) -> bool:
    """Whether every normal form of a letter consists of letters, without accents."""
    in_basic_plane = character <= "\uffff"  # Patterns are analysed on these characters.
    return in_basic_plane and unicodedata.normalize("NFKD", character.lower()).isalpha()


def allowed_characters(tokenizer: Tokenizer) -> frozenset[str]:
    """Return each c for which every place between a letter and c is safe to cut.

    The set is empty if the tokenizer allows no cut.
    """
    settings = json.loads(tokenizer.to_str())
    allowed = _kept_by(settings["normalizer"]) & _split_by(settings["pre_tokenizer"])
    for token in settings["added_tokens"]:
        if not token["special"]:
            # Such tokens are found before the pre-tokenizer splits the text.
            allowed -= set(token["content"])
            allowed -= set(string.digits + "_") if token["single_word"] else _NONE
            allowed = _NONE if token["lstrip"] or token["rstrip"] else allowed
    return allowed


def _kept_by(normalizer: dict[str, Any] | None) -> frozenset[str]:
    """Each c that meets condition 1 for a normalizer."""
    # Unknown types fall through to the end: no character is safe.
    match normalizer:
        case None:
            return RIGHT
        case {"type": kind} if kind in _LOCAL_NORMALIZERS:
            return RIGHT
        case {"type": kind} if kind in _MAPPING_NORMALIZERS:
            return _SPACE
        case {"type": "BertNormalizer"}:
            return _BLANKS | _PUNCTUATION
        # A pattern with letters could span the cut, and a pattern with c would change c.
        case {"type": "Replace", "pattern": {"String": pattern}}:
            changes_letters = any(character.isalpha() for character in pattern)
            return _NONE if changes_letters else RIGHT - set(pattern)
        case {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": content}:
            return _SPACE if content[:1] in (" ", "▁") else _NONE
        case {"type": "Sequence", "normalizers": members}:
            return RIGHT.intersection(*map(_kept_by, members))
    return _NONE


def _split_by(pre_tokenizer: dict[str, Any] | None) -> frozenset[str]:
    """Each c that meets condition 2 for a pre-tokenizer or a sequence of them."""
    members = [pre_tokenizer]
    if pre_tokenizer and pre_tokenizer["type"] == "Sequence":
        members = pre_tokenizer["pretokenizers"]
    # ``unaffected``: each c that no member so far splits differently if the text is cut.
    unaffected, safe = RIGHT, _NONE
    for member in members:
        kept, split = _kept_and_split(member)
        # Once a member has split at c, later members get each side by itself, cut or not.
        safe |= unaffected & split
        unaffected &= kept
    return safe


def _kept_and_split(pre_tokenizer: dict[str, Any] | None) -> tuple[frozenset[str], frozenset[str]]:
    """Two sets of c for one pre-tokenizer.

    :returns: each c before which a cut changes nothing but a split at the cut itself; and, of
        these, each c before which the pre-tokenizer splits the whole text as well.
    """
    # Unknown types fall through to the end: no character is safe.
    match pre_tokenizer:
        case {"type": "ByteLevel", "use_regex": use_regex, "add_prefix_space": prefix}:
            kept, split = splitting_characters(_GPT_2, RIGHT) if use_regex else (RIGHT, _NONE)
            # The pre-tokenizer adds a space to each piece that does not start with one.
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
        # These split only around digits or punctuation: they never join, and need not split at c.
        case {"type": "Digits"} | {"type": "Punctuation", "behavior": "Isolated"}:
            return RIGHT, _NONE
    return _NONE, _NONE
