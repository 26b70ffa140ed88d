"""Analysis of a pre-tokenizer's regular expression: the places where it always splits.

The usual expressions are alternatives of character classes, for example GPT-2's
``'s| ?\\p{L}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+``. A match may contain a letter directly
before a character c in two cases: an alternative has a repeated class that matches both, or it has
a class that matches letters and a later class that matches c, with only optional classes between.
This module finds the characters c for which no alternative has such a case.

It parses classes, literals, repetitions, groups of contractions, ``(?!\\S)`` and ``$``. An
expression with any other part yields no character.
"""

import re
import unicodedata
from dataclasses import dataclass
from functools import cache

from tokenizers import Regex, pre_tokenizers

_ATOM = re.compile(
    r"""(?P<set>
          \(\?i:['\w|?\[\]]+\)              # contractions, in any case
        | \(\?:['\w|?\[\]]+\)
        | \[\^?(?:\\[^bBAzZGkKxu]|(?!&&)[^\\\[\]])+\]
        | \\[pP]\{\^?\w+\}
        | \\[sSdDwWrnt]
        | \\[^\w]
        | [^\\\[\](){}.*+?^$|]
      )
      (?P<repeat>\{\d+(?:,\d*)?\}|[*+?])?[+?]?
      (?P<ahead>\(\?!\\S\)|\$)?""",
    re.VERBOSE,
)
_LETTERS = "".join(
    chr(code)
    for code in range(0x10000)
    if chr(code).isalpha() and unicodedata.normalize("NFKD", chr(code).lower()).isalpha()
)
_CHUNK = 1000
"""Characters per call of the matcher, whose time grows with the square of the length."""


@dataclass(frozen=True, kw_only=True)
class _Atom:
    """One class of characters with its repetition."""

    takes_letters: bool
    """Whether the class matches letters."""
    takes: frozenset[str]
    """Candidates that the class matches."""
    optional: bool
    """Whether the class may match nothing."""
    single: bool
    """Whether one character is enough for a match."""
    repeated: bool
    """Whether the class may match several characters."""
    looks_ahead: bool
    """Whether a look-ahead follows the class."""


def splitting_characters(
    pattern: str, candidates: frozenset[str]
) -> tuple[frozenset[str], frozenset[str]]:
    """Return two sets of candidates c.

    :returns: each c that no match contains directly after a letter, so that a cut between the two
        changes no match; and, of these, each c that is always matched, so that the pattern splits
        before it.
    """
    nothing: frozenset[str] = frozenset()
    kept, matched = candidates, nothing
    for alternative in _alternatives(pattern):
        atoms = _atoms(alternative, candidates)
        if atoms is None:
            return nothing, nothing
        kept -= _joined(atoms)
        matched |= _taken_alone(atoms)
    return kept, kept & matched


def _alternatives(pattern: str) -> list[str]:
    """The alternatives of the pattern: it is split at each ``|`` that is not in brackets."""
    parts, depth, in_set, escaped = [""], 0, False, False
    for character in pattern:
        if not escaped:
            in_set = character == "[" or (in_set and character != "]")
            depth += 0 if in_set else {"(": 1, ")": -1}.get(character, 0)
            if character == "|" and not depth and not in_set:
                parts.append("")
                continue
        escaped = character == "\\" and not escaped
        parts[-1] += character
    return parts


def _atoms(alternative: str, candidates: frozenset[str]) -> list[_Atom] | None:
    """The atoms of an alternative; ``None`` if this module cannot parse a part of it."""
    atoms, position = [], 0
    while position < len(alternative):
        match = _ATOM.match(alternative, position)
        if match is None:
            return None
        characters, repeat = match["set"], match["repeat"] or ""
        group = characters.startswith("(")
        takes = frozenset(characters) & candidates if group else _taken(characters, candidates)
        atom = _Atom(
            takes_letters=group or _takes_letters(characters),
            takes=takes,
            optional=repeat in ("*", "?") or repeat.startswith("{0"),
            single=not re.match(r"\{([2-9]|\d\d)", repeat) and not group,
            repeated=group or repeat not in ("", "?"),
            looks_ahead=bool(match["ahead"]),
        )
        if atom.looks_ahead and (atom.takes_letters or atom.optional):
            return None
        atoms.append(atom)
        position = match.end()
    return atoms


def _joined(atoms: list[_Atom]) -> frozenset[str]:
    """Each c that a match may contain directly after a letter."""
    joined: frozenset[str] = frozenset()
    for index, first in enumerate(atoms):
        if not first.takes_letters:
            continue
        if first.repeated:
            joined |= first.takes
        # The next character comes from a later class, if only optional classes are between.
        for second in atoms[index + 1 :]:
            joined |= second.takes
            if not second.optional:
                break
    return joined


def _taken_alone(atoms: list[_Atom]) -> frozenset[str]:
    """Each c that the alternative matches in every context."""
    required = [atom for atom in atoms if not atom.optional]
    if len(required) != 1 or required[0].looks_ahead or not required[0].single:
        return frozenset()
    return required[0].takes


@cache
def _takes_letters(characters: str) -> bool:
    """Whether a class matches any letter."""
    chunks = (_LETTERS[start : start + _CHUNK] for start in range(0, len(_LETTERS), _CHUNK))
    return any(_taken(characters, frozenset(chunk)) for chunk in chunks)


def _taken(characters: str, candidates: frozenset[str]) -> frozenset[str]:
    """The candidates that a class matches, by the matcher of the tokenizers package itself."""
    text = "".join(sorted(candidates))
    left = pre_tokenizers.Split(Regex(characters), "removed").pre_tokenize_str(text)
    return candidates - frozenset("".join(part for part, _ in left))
