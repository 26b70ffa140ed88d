"""The first joint action of the ranks: compare the configs and versions that each started with.

The comparison uses the store only and comes before any process group. Groups and devices follow
from the config, so ranks with different configs would create different groups and wait for ever.

[Note: comparison] Rank 0 publishes its values, and every other rank compares them with its own.
A rank that finds a difference adds a sentence to a shared list. The rank that is counted last
publishes the verdict, and all ranks read the verdict. So each rank makes a fixed number of
requests, however many ranks there are.
"""

import json
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch.distributed as dist

from olmo_shard.errors import ConfigurationError

_PACKAGES = ("olmo-shard", "torch", "triton", "numpy", "nvshmem4py-cu13")
"""Packages whose versions decide what a rank computes and sends to its peers."""
_FIRST, _COUNT, _DIFFERENCES, _VERDICT, _READERS, _ALL_HAVE_READ = (
    f"alike/{name}"
    for name in ("first", "count", "differences", "verdict", "readers", "all have read")
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
    """
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
    verdict = store.get(_VERDICT).decode()
    if verdict:
        # Rank 0 may serve the store, so it leaves last.
        if store.add(_READERS, 1) == world_size:
            store.set(_ALL_HAVE_READ, "")
        if rank == 0:
            store.get(_ALL_HAVE_READ)
        raise ConfigurationError(verdict)


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
    return None
