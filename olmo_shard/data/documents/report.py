"""Counts and first examples of skipped, replaced and empty input."""

from dataclasses import dataclass, field

from olmo_shard.errors import DataError

HIDDEN = "skipped: hidden files and folders"
UNKNOWN = "skipped: files with an unknown ending"
SPECIAL = "skipped: FIFOs, sockets and devices"
LINKED = "skipped: links to folders"
PREPARED = "skipped: folders that prepare wrote"
BAD = "skipped: bad files and records"
EMPTY = "skipped: empty documents"
REPLACED = "replaced by U+FFFD: bytes that are not UTF-8"
SURROGATE = "replaced by '?': halves of surrogate pairs"
NUL = "kept: NUL characters"
_EXAMPLES = 3
"""Number of places listed per reason."""


class BadInputError(DataError):
    """A file or record without readable text. ``--skip-bad`` skips such input."""


@dataclass
class _Count:
    """Count for one reason."""

    number: int = 0
    """Number of cases."""
    places: int = 0
    """Number of files, lines or rows with such cases."""
    examples: list[str] = field(default_factory=list)


class Report:
    """Collection of what the readers skipped or replaced.

    :param skip_bad: if true, bad input is skipped and counted. If false, it raises an error.
    """

    def __init__(self, *, skip_bad: bool = False) -> None:
        self.skip_bad = skip_bad
        self._counts: dict[str, _Count] = {}

    def count(self, reason: str, place: str, number: int = 1) -> None:
        """Count ``number`` cases at one place, which is a file, a line or a row."""
        count = self._counts.setdefault(reason, _Count())
        count.number += number
        count.places += 1
        if len(count.examples) < _EXAMPLES:
            count.examples.append(place if number == 1 else f"{place} ({number:,})")

    def bad(self, problem: str) -> None:
        """Count bad input.

        :raises DataError: with the problem, unless bad input is skipped.
        """
        if not self.skip_bad:
            raise DataError(f"{problem} [--skip-bad leaves bad input out and counts it]")
        self.count(BAD, problem)

    def number(self, reason: str) -> int:
        """Return the number of cases for a reason."""
        return self._counts[reason].number if reason in self._counts else 0

    def lines(self) -> list[str]:
        """Return one line per reason, with the number of cases and the first places."""
        return [_line(reason, count) for reason, count in self._counts.items()]


def _line(reason: str, count: _Count) -> str:
    """The line of one reason."""
    verb, what = reason.split(": ", 1)
    more = count.places - len(count.examples)
    rest = f"; and {more:,} more" if more else ""
    line = f"{verb}: {count.number:,} {what}: {'; '.join(count.examples)}{rest}"
    # File names may contain bytes that are not UTF-8, which a terminal cannot print.
    return line.encode("utf-8", errors="replace").decode("utf-8")
