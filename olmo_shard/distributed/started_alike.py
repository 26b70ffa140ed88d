"""The first thing that ranks do together: they compare how each of them was started.

The comparison needs the store alone. It comes before any process group, because groups and devices
follow from the config: ranks with different configs would wait for each other in groups that the
others never make.

[Note: comparison] Rank 0 publishes its values, and every other rank compares them with its own.
A rank that finds a difference adds a sentence to a shared list. The rank that is counted last
publishes the verdict, and all ranks read that. So each rank makes a fixed number of requests,
whatever the number of ranks.
"""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist

from olmo_shard.errors import ConfigurationError

_PACKAGES = ("olmo-shard", "torch", "triton", "numpy", "nvshmem4py-cu13")
"""Packages whose versions decide what a rank computes and what it says to its peers."""
_FIRST, _COUNT, _DIFFERENCES, _VERDICT, _READERS, _ALL_HAVE_READ = (
    f"alike/{name}"
    for name in ("first", "count", "differences", "verdict", "readers", "all have read")
)

Fields = Mapping[str, Any]
"""JSON values by name."""


def versions() -> dict[str, str]:
    """Versions of Python (without the patch level) and of the packages that ranks share."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def check_started_alike(
    store: dist.Store, rank: int, world_size: int, kinds: Mapping[str, Fields]
) -> None:
    """Compare this rank's values with rank 0's; collective over the ranks of the store.

    :param kinds: the values by what they are, such as ``{"configs": ..., "versions": ...}``.
    :raises ConfigurationError: on every rank, with the first difference of the lowest such rank.
    """
    mine = json.loads(json.dumps(kinds))
    if rank == 0:
        store.set(_FIRST, json.dumps(mine))
    else:
        difference = _difference(json.loads(store.get(_FIRST)), mine, rank)
        if difference:
            number = store.add(_DIFFERENCES, 1)
            store.set(f"{_DIFFERENCES}/{number}", json.dumps([rank, difference]))
    if store.add(_COUNT, 1) == world_size:
        store.set(_VERDICT, _verdict(store))
    verdict = store.get(_VERDICT).decode()
    if verdict:
        # Rank 0 may serve the store: it leaves after the others have read the verdict.
        if store.add(_READERS, 1) == world_size:
            store.set(_ALL_HAVE_READ, "")
        if rank == 0:
            store.get(_ALL_HAVE_READ)
        raise ConfigurationError(verdict)


def _verdict(store: dist.Store) -> str:
    """The sentence of the lowest rank that found a difference; empty where all ranks agree."""
    count = store.add(_DIFFERENCES, 0)
    found = [json.loads(store.get(f"{_DIFFERENCES}/{number + 1}")) for number in range(count)]
    return min(found)[1] if found else ""


def _difference(first: dict[str, Fields], mine: dict[str, Fields], rank: int) -> str | None:
    for kind, fields in first.items():
        here = mine[kind]
        for name in sorted(fields.keys() | here.keys()):
            if fields.get(name) != here.get(name):
                return (
                    f"the ranks have different {kind}: {name} = {fields.get(name)!r} on rank 0, "
                    f"{here.get(name)!r} on rank {rank}; start every rank with the same {kind}"
                )
    return None
