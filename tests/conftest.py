"""Rank groups shared by all tests of a session."""

from collections.abc import Iterator

import pytest

from tests.support.ranks import RankGroup


class _Groups:
    def __init__(self) -> None:
        self._groups: dict[int, RankGroup] = {}

    def __call__(self, size: int) -> RankGroup:
        if size not in self._groups:
            self._groups[size] = RankGroup(size)
        return self._groups[size]

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[_Groups]:
    """``ranks(4)`` is a running group of four gloo ranks."""
    groups = _Groups()
    yield groups
    groups.close()
