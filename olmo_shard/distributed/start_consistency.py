"""The first joint action of the ranks: compare the configs and versions that each started with.

The comparison uses the store only and comes before any process group. Groups and devices follow
from the config, so ranks with different configs would create different groups and wait for ever.

[Note: comparison] Rank 0 publishes its values, and every other rank compares them with its own.
A rank that finds a difference adds a sentence to a shared list. The rank that is counted last
publishes the verdict, and all ranks read the verdict. So each rank makes a fixed number of
requests, however many ranks there are.

Ranks that disagree about the number of ranks cannot count each other. A rank that finds this
difference publishes the verdict itself, at once.
"""

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist

from olmo_shard.errors import ConfigurationError, LaunchError

_PACKAGES = ("olmo-shard", "torch", "triton", "numpy", "nvshmem4py-cu13")
"""Packages whose versions decide what a rank computes and sends to its peers."""
_LEAVE = timedelta(seconds=10)
"""Longest time that rank 0, which may serve the store, waits for the others to read the verdict."""
_SIZE, _FIRST, _COUNT, _DIFFERENCES, _VERDICT, _READERS, _ALL_HAVE_READ = (
    f"alike/{name}"
    for name in (
        "world size",
        "first",
        "count",
        "differences",
        "verdict",
        "readers",
        "all have read",
    )
)

Fields = Mapping[str, Any]
"""JSON values by name."""


def versions() -> dict[str, str]:
    """Return the versions of Python (major and minor) and of the packages that matter to peers."""
    by_package = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            by_package[package] = "not installed"
    return by_package


def check_consistent_start(
    store: dist.Store, rank: int, world_size: int, kinds: Mapping[str, Fields]
) -> None:
    """Compare this rank's values with rank 0's; collective over the ranks of the store.

    See [Note: comparison].

    :param kinds: the values by kind, such as ``{"configs": ..., "versions": ...}``.
    :raises ConfigurationError: on every rank, with the first difference of the lowest rank that
        has one.
    :raises LaunchError: if ranks were started with different numbers of ranks, or are missing.
    """
    try:
        _check_world_size(store, rank, world_size)
        verdict = _compared(store, rank, world_size, kinds)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise LaunchError(
            f"rank {rank} waited in vain for the {world_size} ranks to compare their configs: "
            f"{str(error).splitlines()[0]}; start all ranks, with the same WORLD_SIZE"
        ) from error
    if verdict:
        _leave(store, rank, world_size)
        raise ConfigurationError(verdict)


def _check_world_size(store: dist.Store, rank: int, world_size: int) -> None:
    """:raises LaunchError: on the ranks whose world size differs from rank 0's."""
    if rank == 0:
        store.set(_SIZE, str(world_size))
        return
    first = int(store.get(_SIZE))
    if first != world_size:
        verdict = (
            f"the ranks were started with different numbers of ranks: WORLD_SIZE = {first} on rank "
            f"0, {world_size} on rank {rank}; start every rank with the same one"
        )
        store.set(_VERDICT, verdict)
        # Rank 0 waits for as many readers as it counts ranks.
        _leave(store, rank, first)
        raise LaunchError(verdict)


def _compared(store: dist.Store, rank: int, world_size: int, kinds: Mapping[str, Fields]) -> str:
    """Compare the values; return the verdict, which is empty if all ranks agree."""
    # Through JSON, as rank 0's values come: tuples become lists.
    own = json.loads(json.dumps(kinds))
    if rank == 0:
        store.set(_FIRST, json.dumps(own))
    else:
        difference = _difference(json.loads(store.get(_FIRST)), own, rank)
        if difference:
            number = store.add(_DIFFERENCES, 1)
            store.set(f"{_DIFFERENCES}/{number}", json.dumps([rank, difference]))
    # All ranks have compared by the time the last one is counted.
    if store.add(_COUNT, 1) == world_size:
        store.set(_VERDICT, _verdict(store))
    return store.get(_VERDICT).decode()


def _leave(store: dist.Store, rank: int, world_size: int) -> None:
    """Leave the store after a verdict; rank 0, which may serve the store, leaves last."""
    if store.add(_READERS, 1) == world_size:
        store.set(_ALL_HAVE_READ, "")
    if rank == 0:
        # A rank that never came, or that counts other peers, must not hold up the message.
        with suppress(dist.DistStoreError):
            store.wait([_ALL_HAVE_READ], _LEAVE)


def _verdict(store: dist.Store) -> str:
    """The sentence of the lowest rank with a difference; empty if all ranks agree."""
    count = store.add(_DIFFERENCES, 0)
    sentences = [json.loads(store.get(f"{_DIFFERENCES}/{number + 1}")) for number in range(count)]
    return min(sentences)[1] if sentences else ""


def _difference(first: dict[str, Fields], own: dict[str, Fields], rank: int) -> str | None:
    for kind, fields in first.items():
        for name in sorted(fields.keys() | own[kind].keys()):
            expected, value = fields.get(name), own[kind].get(name)
            if value != expected:
                return (
                    f"the ranks have different {kind}: {name} = {expected!r} on rank 0, "
                    f"{value!r} on rank {rank}; start every rank with the same {kind}"
                )
        # The order decides, for example, which validation set is evaluated first.
        for expected, name in zip(fields, own[kind], strict=False):
            if name != expected:
                return (
                    f"the ranks have different {kind}: {expected} on rank 0 stands where rank "
                    f"{rank} has {name}; start every rank with the same {kind}, in one order"
                )
    return None
