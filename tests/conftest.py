"""Rank groups shared by all tests of a session, the commands in this process, and the parts of the
suite.
"""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from olmo_shard import cli
from tests.support.cpu_kernels import compile_cache, describe
from tests.support.ranks import RankGroup

NUMERIC = (
    "dispatch/test_capacity.py",
    "dispatch/test_dispatcher.py",
    "dispatch/test_rowwise_gpu.py",
    "dispatch/test_sum_returned_rows.py",
    "distributed/test_collectives.py",
    "kernels/test_accumulate_grad.py",
    "kernels/test_fused_adamw.py",
    "kernels/test_grouped_kernels.py",
    "kernels/test_grouped_mlp.py",
    "kernels/test_transport.py",
    "nn/",
    "optim/",
    "parallel/test_ddp.py",
    "parallel/test_first_use.py",
    "parallel/test_gather.py",
    "parallel/test_layouts.py",
    "parallel/test_main_grads.py",
    "parallel/test_reduce.py",
    "parallel/test_triton_training.py",
    "test_cpu_kernels.py",
    "test_resume.py::test_a_resumed_run_is_bitwise_the_uninterrupted_one",
    "test_training.py::test_evaluation_changes_nothing",
    "train/test_checkpoint.py",
    "train/test_no_labels.py",
    "train/test_trainer.py",
)
"""Where floating-point numbers are compared. ``make test-slow`` runs these tests again with other
CPU kernels, which add in other orders.
"""

PROCESSES = (
    "dispatch/test_rowwise_cpu.py",
    "dispatch/test_shared_memory.py",
    "distributed/test_rank_files.py",
    "kernels/test_grouped_ptx.py",
    "kernels/test_transport_ahead.py",
    "test_cpu_kernels.py",
    "test_first_run.py",
    "test_gpu_check",
    "test_jobs.py",
    "test_launch_scripts.py",
    "test_package.py",
    "test_readme.py",
    "train/test_wandb.py",
    "train/tracking/",
)
"""Where other processes run, or a compiler: no part of ``make test-fast``."""


def pytest_configure() -> None:
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compile_cache()))


def pytest_report_header() -> str:
    return describe()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the numeric part, without what is compiled for a GPU and not run, and the fast part."""
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        ahead = "ahead_of_time" in name
        if name.startswith(NUMERIC) and not ahead:
            item.add_marker(pytest.mark.numeric)
        groups = {"ranks", "interpreted"} & set(getattr(item, "fixturenames", ()))
        slow = item.get_closest_marker("slow")
        if not (groups or ahead or slow or name.startswith(PROCESSES)):
            item.add_marker(pytest.mark.fast)


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
