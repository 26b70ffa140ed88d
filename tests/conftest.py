"""Rank groups of the session, commands in this process, and the parts of the suite."""

import os
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from olmo_shard import cli
from tests.support.cpu_kernels import compile_cache, describe
from tests.support.ranks import Groups

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
"""Tests that compare floating-point numbers.

``make test-slow`` runs them again with CPU kernels that add in other orders, and with the newest
torch.
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
"""Tests that start processes or a compiler; ``make test-fast`` leaves them out."""


def pytest_configure() -> None:
    """Give each set of CPU kernels a cache of compiled code."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(compile_cache()))


def pytest_report_header() -> str:
    """Name torch and its CPU kernels at the start of a run."""
    return describe()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the numeric tests and the fast tests.

    Tests that only compile for a GPU are neither.
    """
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        ahead = "ahead_of_time" in name
        if name.startswith(NUMERIC) and not ahead:
            item.add_marker(pytest.mark.numeric)
        groups = {"ranks", "interpreted"} & set(getattr(item, "fixturenames", ()))
        slow = item.get_closest_marker("slow")
        if not (groups or ahead or slow or name.startswith(PROCESSES)):
            item.add_marker(pytest.mark.fast)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Groups]:
    """``ranks(4)`` is a running group of four gloo ranks."""
    groups = Groups()
    yield groups
    groups.close()


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Groups]:
    """``interpreted(3)`` is a running group of three gloo ranks whose kernels are interpreted."""
    groups = Groups(interpreted=True)
    yield groups
    groups.close()


@pytest.fixture
def main(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """``main(args...)`` runs the command in this process. Returns exit code and printed text."""

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
