"""Waits that fail, and one that takes time, in the interpreter."""

import threading
import time

import pytest
import torch

from tests.support.ranks import Groups

pytest.importorskip("triton", reason="Triton exists on Linux alone")

from olmo_shard.kernels.signals import AHEAD, MISSING
from tests.support.device_heap import ME, RANKS, SLOTS, neighbourhood, run_alone

ANSWER = 2_000_000_000
"""Nanoseconds, far more than anything here takes."""
SOON = 20
"""Seconds, on a machine that is busy with other things; a tenth of the longest wait."""


def a_missing_peer() -> None:
    """Is named within the bound; afterwards nobody waits, and there are no rows."""
    near = neighbourhood(epoch=6)
    near.arrive(2, num_rows=1, num_routes=1)
    near.flags[ME][0] = 4  # rank 0 is two epochs behind
    error = torch.zeros(RANKS, dtype=torch.int32)
    begun = time.monotonic()
    assert near.wait(error, ANSWER // 10, [0, 1, 0], [0, 1, 0]) == ([0, 0, 0], [0, 0, 1])
    assert time.monotonic() - begun < SOON
    assert error.tolist() == [MISSING, 0, 0]
    for late in (4, 6, 8):  # whatever the flag says then
        near.flags[ME][0] = late
        begun = time.monotonic()
        assert near.wait(error, 100 * ANSWER, [0, 1, 0], [0, 1, 0]) == ([0, 0, 0], [0, 0, 1])
        assert time.monotonic() - begun < SOON
        assert error.tolist() == [MISSING, 0, 0]


def a_peer_ahead() -> None:
    """Ends the wait at once, while another one is still missing."""
    near = neighbourhood(epoch=6)
    near.flags[ME][:] = torch.tensor([4, 0, 8, 99, 99, 99])
    error = torch.zeros(RANKS, dtype=torch.int32)
    begun = time.monotonic()
    assert near.wait(error, 100 * ANSWER, [0, 1, 0], [0, 1, 0]) == ([0, 0, 0], [0, 0, 1])
    assert time.monotonic() - begun < SOON
    assert error.tolist() == [0, 0, AHEAD]


def a_late_peer() -> None:
    near = neighbourhood(epoch=7)
    near.arrive(0, num_rows=3, num_routes=3)
    error = torch.zeros(RANKS, dtype=torch.int32)
    late = threading.Timer(0.2, near.arrive, (2, 1, 2))
    late.start()
    assert near.wait(error, 20 * ANSWER, [0, 0, 0], [0, 0, 0]) == ([3, 0, 1], [4, 5, 0])
    late.join()


def impossible_headers() -> None:
    """No more rows than a region has, no more routes than rows have slots."""
    near = neighbourhood(epoch=6)
    near.arrive(0, num_rows=10**12, num_routes=10**12)
    near.arrive(2, num_rows=-5, num_routes=-5)
    error = torch.zeros(RANKS, dtype=torch.int32)
    assert near.wait(error, ANSWER, [0, 0, 0], [0, 0, 0]) == ([4, 0, 0], [4, 4 * SLOTS, 0])


def test_waits_that_fail_and_one_that_takes_time(interpreted: Groups) -> None:
    interpreted(3).run(run_alone, [a_missing_peer, a_peer_ahead, a_late_peer, impossible_headers])
