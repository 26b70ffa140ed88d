"""CPU threads per rank follow from the cores that the local ranks may use."""

from concurrent.futures import ThreadPoolExecutor
from threading import local

import pytest
import torch.distributed as dist

from olmo_shard.distributed import runtime


@pytest.mark.parametrize(
    ("cores_of", "threads"),
    [
        ([range(8)] * 4, [2, 2, 2, 2]),  # all share: taskset, torchrun
        ([range(8 * rank, 8 * rank + 8) for rank in range(4)], [8, 8, 8, 8]),  # srun binds tasks
        ([range(4)] * 2 + [range(4, 12)] * 2, [2, 2, 4, 4]),  # two ranks per NUMA node
        ([range(1)] * 3, [1, 1, 1]),
        ([range(3)] * 2, [1, 1]),
    ],
)
def test_a_core_is_divided_among_the_ranks_that_may_use_it(
    cores_of: list[range], threads: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, this = dist.HashStore(), local()
    monkeypatch.setattr(runtime, "_usable_cores", lambda: list(cores_of[this.rank]))

    def share(rank: int) -> int:
        this.rank = rank
        return runtime._thread_share(store, rank, len(cores_of))

    with ThreadPoolExecutor(len(cores_of)) as pool:
        assert list(pool.map(share, range(len(cores_of)))) == threads
