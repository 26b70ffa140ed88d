"""Rank groups shared by all tests of a session, the commands in this process, and which tests are
the numeric part.
"""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from olmo_shard import cli
from tests.support.cpu_kernels import compile_cache, describe
from tests.support.ranks import RankGroup

NUMERIC = (
    "test_cpu_kernels.py",
    "dispatch/test_capacity.py",
    "dispatch/test_dispatchers.py",
    "dispatch/test_rowwise_device.py",
    "dispatch/test_sum_rows.py",
    "distributed/test_collectives.py",
    "kernels/test_accumulate_grad.py",
    "kernels/test_adamw.py",
    "kernels/test_grouped_kernels.py",
    "kernels/test_grouped_mlp.py",
    "kernels/test_transport.py",
    "nn/",
    "optim/",
    "parallel/test_ddp.py",
    "parallel/test_gather.py",
    "parallel/test_layouts.py",
    "parallel/test_main_grads.py",
    "parallel/test_reduce.py",
    "parallel/test_triton_training.py",
    "train/test_checkpoint.py",
    "train/test_trainer.py",
)
"""The files and folders whose tests compare floating-point numbers. ``make test-slow`` runs them
again with other CPU kernels, which add in other orders.
"""


def pytest_configure() -> None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compile_cache()))


def pytest_report_header() -> str:
    return describe()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the numeric part; compiling for a GPU computes nothing."""
    for item in items:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        if path.startswith(NUMERIC) and "ahead_of_time" not in item.name:
            item.add_marker(pytest.mark.numeric)


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
