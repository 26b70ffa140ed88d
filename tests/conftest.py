"""Rank groups shared by all tests of a session, and the commands in this process."""

import signal
import sys
from collections.abc import Iterator

import pytest

from olmo_shard import cli
from tests.support.ranks import RankGroup


class _Groups:
    def __init__(self, *, interpreted: bool = False) -> None:
        self._interpreted = interpreted
        self._groups: dict[int, RankGroup] = {}

    def __call__(self, size: int) -> RankGroup:
        if size not in self._groups:
            self._groups[size] = RankGroup(size, interpreted=self._interpreted)
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


@pytest.fixture(scope="session")
def interpreted() -> Iterator[_Groups]:
    """``interpreted(3)``: the same, with Triton kernels run by the interpreter."""
    groups = _Groups(interpreted=True)
    yield groups
    groups.close()


@pytest.fixture
def main(monkeypatch, capfd):
    """``main(args...)`` runs the command in this process: exit code and all that it printed."""

    def run(*args: object) -> tuple[int, str]:
        handler = signal.getsignal(signal.SIGTERM)
        monkeypatch.setattr(sys, "argv", ["olmo-shard", *map(str, args)])
        try:
            with pytest.raises(SystemExit) as ended:
                cli.main()
        finally:
            signal.signal(signal.SIGTERM, handler)
        out, err = capfd.readouterr()
        code = ended.value.code
        return (code if isinstance(code, int) else 0), out + err

    return run
