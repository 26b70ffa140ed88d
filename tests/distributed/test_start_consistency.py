"""Ranks that were started differently all raise one message."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from olmo_shard.distributed.start_consistency import Fields, check_consistent_start, versions
from olmo_shard.errors import ConfigurationError, LaunchError, OlmoShardError

CONFIG: dict[str, object] = {"parallel.expert_parallel": 1, "optim.lr": 0.01, "data.sources": ["a"]}


def outcomes(by_rank: list[dict[str, Fields]]) -> list[str]:
    """Each rank's error text, or "equal"; the ranks are threads that share a store."""
    store = dist.HashStore()

    def outcome(rank: int) -> str:
        try:
            check_consistent_start(store, rank, len(by_rank), by_rank[rank])
        except ConfigurationError as error:
            return str(error)
        return "equal"

    with ThreadPoolExecutor(len(by_rank)) as pool:
        return list(pool.map(outcome, range(len(by_rank))))


def test_equal_ranks_agree() -> None:
    kinds = {"configs": CONFIG, "versions": versions()}
    assert outcomes([kinds] * 4) == ["equal"] * 4
    assert outcomes([kinds]) == ["equal"]


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
    messages = outcomes([same, same, {"configs": CONFIG | {name: value}}, same])
    if shown is None:  # a missing field is null
        assert messages == ["equal"] * 4
        return
    difference = f"{name} = {shown}; start every rank with the same configs"
    assert messages == [f"the ranks have different configs: {difference}"] * 4


def test_the_lowest_rank_that_differs_is_named() -> None:
    by_rank: list[dict[str, Fields]] = [{"configs": {"optim.lr": lr}} for lr in (1, 1, 2, 3)]
    assert all("1 on rank 0, 2 on rank 2" in message for message in outcomes(by_rank))


def test_other_versions_are_refused() -> None:
    first: dict[str, Fields] = {"configs": CONFIG, "versions": versions()}
    second: dict[str, Fields] = {"configs": CONFIG, "versions": versions() | {"torch": "2.0.0"}}
    (message,) = set(outcomes([first, second]))
    torch = versions()["torch"]
    assert message.startswith(
        f"the ranks have different versions: torch = {torch!r} on rank 0, '2.0.0' on rank 1"
    )


def test_another_order_is_refused() -> None:
    first: dict[str, Fields] = {"configs": {"data.validation.a": 1, "data.validation.b": 2}}
    second: dict[str, Fields] = {"configs": {"data.validation.b": 2, "data.validation.a": 1}}
    (message,) = set(outcomes([first, first, second]))
    assert "data.validation.a on rank 0 stands where rank 2 has data.validation.b" in message


def test_other_numbers_of_ranks_are_refused_at_once() -> None:
    """Rank 0 counts two ranks, rank 1 three: neither waits for a third one."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=60))

    def outcome(rank: int) -> str:
        with pytest.raises(OlmoShardError) as caught:
            check_consistent_start(store, rank, 2 + rank, {"configs": CONFIG})
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        (message,) = set(pool.map(outcome, range(2)))
    assert "WORLD_SIZE = 2 on rank 0, 3 on rank 1" in message


def test_a_rank_that_never_comes_is_one_message() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(LaunchError, match=r"rank 0 waited in vain for the 2 ranks"):
        check_consistent_start(store, 0, 2, {"configs": CONFIG})


def test_versions_are_those_of_the_packages() -> None:
    by_package = versions()
    assert by_package["olmo-shard"] == "0.1.0"
    assert by_package["python"].count(".") == 1
    assert set(by_package) == {
        "python",
        "olmo-shard",
        "torch",
        "triton",
        "numpy",
        "nvshmem4py-cu13",
    }
