"""Ranks that were started differently all say so, with one message."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from olmo_shard.distributed.started_alike import Fields, check_started_alike, versions
from olmo_shard.errors import ConfigurationError

CONFIG: dict[str, object] = {"parallel.expert_parallel": 1, "optim.lr": 0.01, "data.sources": ["a"]}


def outcomes(by_rank: list[dict[str, Fields]]) -> list[str]:
    """What each rank raised, or "alike"; the ranks are threads that share a store."""
    store = dist.HashStore()

    def outcome(rank: int) -> str:
        try:
            check_started_alike(store, rank, len(by_rank), by_rank[rank])
        except ConfigurationError as error:
            return str(error)
        return "alike"

    with ThreadPoolExecutor(len(by_rank)) as pool:
        return list(pool.map(outcome, range(len(by_rank))))


def test_equal_ranks_agree() -> None:
    kinds = {"configs": CONFIG, "versions": versions()}
    assert outcomes([kinds] * 4) == ["alike"] * 4
    assert outcomes([kinds]) == ["alike"]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("parallel.expert_parallel", 2, "1 on rank 0, 2 on rank 2"),
        ("data.sources", ["b"], "['a'] on rank 0, ['b'] on rank 2"),
        ("model.moe", None, None),
        ("model.extra", 3, "None on rank 0, 3 on rank 2"),
    ],
)
def test_the_first_field_that_differs_is_named_on_every_rank(
    name: str, value: object, shown: str | None
) -> None:
    same: dict[str, Fields] = {"configs": CONFIG}
    found = outcomes([same, same, {"configs": CONFIG | {name: value}}, same])
    if shown is None:  # a missing field is null
        assert found == ["alike"] * 4
        return
    difference = f"{name} = {shown}; start every rank with the same configs"
    assert found == [f"the ranks have different configs: {difference}"] * 4


def test_the_lowest_rank_that_differs_is_named() -> None:
    by_rank: list[dict[str, Fields]] = [{"configs": {"optim.lr": lr}} for lr in (1, 1, 2, 3)]
    assert all("1 on rank 0, 2 on rank 2" in message for message in outcomes(by_rank))


def test_other_versions_are_refused() -> None:
    here: dict[str, Fields] = {"configs": CONFIG, "versions": versions()}
    there: dict[str, Fields] = {"configs": CONFIG, "versions": versions() | {"torch": "2.0.0"}}
    (message,) = set(outcomes([here, there]))
    torch = versions()["torch"]
    assert message.startswith(
        f"the ranks have different versions: torch = {torch!r} on rank 0, '2.0.0' on rank 1"
    )


def test_versions_are_those_of_the_packages() -> None:
    found = versions()
    assert found["olmo-shard"] == "0.1.0"
    assert found["python"].count(".") == 1
    assert set(found) == {"python", "olmo-shard", "torch", "triton", "numpy", "nvshmem4py-cu13"}
