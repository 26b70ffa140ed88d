"""Which transport is taken, why, and what is refused. Runs on gloo."""

import gc
import platform
from typing import Any

import pytest
import torch

from olmo_shard.config import ParallelConfig
from olmo_shard.dispatch.heap import shared_memory
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import ConfigurationError
from olmo_shard.parallel import host_mailbox
from olmo_shard.parallel.apply import parallelize
from tests.support.ranks import mesh_of
from tests.support.tiny import meta_model, model_config


def connect_case(
    rank: Runtime,
    parallel: dict[str, Any],
    max_tokens: int | None = 64,
    here: dict[int, dict[str, Any]] | None = None,
    model: dict[str, Any] | None = None,
) -> tuple[str, str]:
    """Name and note of what was taken, or the error.

    :param here: what the machine of some ranks says of itself, by rank.
    """
    config = ParallelConfig.model_validate(parallel)
    mesh = mesh_of(rank, config.expert_parallel)
    said = (here or {}).get(rank.rank, {})
    with pytest.MonkeyPatch.context() as patch:
        if "machine" in said:
            patch.setattr(platform, "machine", lambda: said["machine"])
        if "host" in said:
            patch.setattr(host_mailbox, "host_identity", lambda: (said["host"], 1))
        if "available" in said:
            patch.setattr(host_mailbox, "available_memory", lambda: said["available"])
        if "allocate" in said:
            patch.setattr(shared_memory, "_allocate", refuse)
        try:
            built = parallelize(
                meta_model(model_config(**(model or {}))), mesh, config, max_tokens=max_tokens
            )
        except ConfigurationError as error:
            return "error", str(error)
    taken = built.connection
    assert taken is not None
    name, note = taken.dispatcher.name, taken.note
    built.close()
    return name, note


def refuse(num_bytes: int, descriptors: Any) -> int:
    raise shared_memory.HeapError("nothing left")


def same_on_all(found: list[tuple[str, str]]) -> tuple[str, str]:
    assert all(each == found[0] for each in found), found
    return found[0]


LAYOUT = "mailboxes of 2 slots x 1 peer(s) x 64 rows x 160 B = 20,608 bytes (20.1 KiB) a rank"


def test_auto_takes_rowwise_and_says_its_size(ranks):
    name, note = ranks(4).run(connect_case, {"expert_parallel": 2})[0]
    assert name == "rowwise"
    assert note.startswith(f"rowwise (parallel.dispatch = auto): {LAYOUT}; ")
    assert note.endswith("GiB) available")


@pytest.mark.parametrize(
    ("parallel", "name"),
    [
        ({}, "local"),
        ({"dispatch": "local"}, "local"),
        ({"dispatch": "collective"}, "collective"),
        ({"dispatch": "rowwise"}, "rowwise"),
        ({"expert_parallel": 2, "dispatch": "collective"}, "collective"),
        ({"expert_parallel": 2, "dispatch": "rowwise"}, "rowwise"),
    ],
)
def test_what_the_config_names_is_taken(ranks, parallel, name):
    for found, note in ranks(2).run(connect_case, parallel):
        assert found == name
        assert note.startswith(f"{name} (parallel.dispatch = {parallel.get('dispatch', 'auto')})")


OBSTACLES = [
    ({1: {"machine": "aarch64"}}, 64, "rank 1: it needs Linux on x86-64, this is linux on aarch64"),
    ({3: {"host": "elsewhere"}}, 64, "ranks 2 to 3 do not share a host and a process namespace"),
    ({}, None, "rank 0: parallelize was not told max_tokens, by which mailboxes are sized"),
    ({2: {"available": 80_000}}, 64, "the mailboxes of 4 rank(s) need 82,432 bytes (80.5 KiB) of"),
    ({3: {"allocate": True}}, 64, "rank 3: nothing left"),
]


@pytest.mark.parametrize(("here", "max_tokens", "reason"), OBSTACLES)
def test_where_rowwise_cannot_run_auto_says_why_and_a_config_that_wants_it_is_refused(
    ranks, here, max_tokens, reason
):
    """On every rank alike, whichever one has the obstacle."""
    auto = {"expert_parallel": 2}
    name, note = same_on_all(ranks(4).run(connect_case, auto, max_tokens, here))
    assert name == "collective"
    assert note.startswith(
        f"collective (parallel.dispatch = auto): rowwise cannot run here: {reason}"
    )
    wanted = {"expert_parallel": 2, "dispatch": "rowwise"}
    name, message = same_on_all(ranks(4).run(connect_case, wanted, max_tokens, here))
    assert name == "error"
    assert message.startswith(f"parallel.dispatch = rowwise cannot run here: {reason}")
    assert message.endswith("; use collective, or auto, which takes what can run")


def test_too_little_memory_names_both_numbers_and_what_to_lower(ranks):
    """Four ranks on the host; one of them sees less than the others."""
    here = {2: {"available": 80_000}}
    wanted = {"expert_parallel": 2, "dispatch": "rowwise"}
    _, message = same_on_all(ranks(4).run(connect_case, wanted, 64, here))
    assert (
        "the mailboxes of 4 rank(s) need 82,432 bytes (80.5 KiB) of shared memory, 80,000 bytes "
        f"(78.1 KiB) are available; {LAYOUT}: lower train.micro_batch_tokens, or set "
        "parallel.capacity_factor"
    ) in message
    here = {2: {"available": 90_000}}
    assert ranks(4).run(connect_case, wanted, 64, here)[0][0] == "rowwise"


def test_capacity_makes_mailboxes_smaller(ranks):
    """64 tokens, K = 2 of 8 experts, 4 on a rank: 4 x ceil(0.5 x 64 x 2 / 8) = 32 rows."""
    parallel = {"expert_parallel": 2, "capacity_factor": 0.5}
    _, note = ranks(2).run(connect_case, parallel)[0]
    assert "2 slots x 1 peer(s) x 32 rows x 160 B" in note


def test_a_dense_model_needs_no_transport(ranks):
    ranks(2).run(dense_case)


def dense_case(rank: Runtime) -> None:
    config = ParallelConfig(dispatch="rowwise")
    model = meta_model(model_config(moe=None, n_dense_layers=0))
    built = parallelize(model, mesh_of(rank), config)
    assert built.connection is None
    built.close()


def closed_case(rank: Runtime) -> int:
    """Twice in one process; returns how many mappings more there are at the end."""
    config = ParallelConfig(expert_parallel=2)
    gc.collect()  # what other cases have left
    gc.disable()
    before = mapped()
    for _ in range(2):
        built = parallelize(meta_model(model_config()), mesh_of(rank, 2), config, max_tokens=64)
        ids = torch.zeros(2, 13, dtype=torch.int64)
        built.model(ids[:, :-1], ids[:, 1:]).loss.backward()
        assert mapped() == before + 2
        built.close()
    gc.enable()
    return mapped() - before


def mapped() -> int:
    with open("/proc/self/maps", encoding="ascii") as maps:
        return sum("memfd:olmo_shard" in line for line in maps)


def test_closed_it_can_be_made_again_and_leaves_nothing(ranks):
    assert ranks(2).run(closed_case) == [0, 0]
