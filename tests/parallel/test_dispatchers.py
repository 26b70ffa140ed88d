"""Which transport is chosen, why, and what is refused."""

import gc
import platform
from typing import Any

import pytest
import torch

from olmo_shard.config import ParallelConfig
from olmo_shard.dispatch.heap import shared_memory
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import ConfigurationError
from olmo_shard.parallel import rowwise_on_cpu
from olmo_shard.parallel.apply import parallelize
from olmo_shard.parallel.dispatchers import CANDIDATES
from tests.support.ranks import StartRanks, mesh_of
from tests.support.tiny import meta_model, model_config


def choice_case(
    rank: Runtime,
    parallel: dict[str, Any],
    max_tokens: int | None = 64,
    machines: dict[int, dict[str, Any]] | None = None,
    model: dict[str, Any] | None = None,
) -> tuple[str, str]:
    """Name and note of the choice, or the error.

    :param machines: what is different on the machines of some ranks, by rank.
    """
    config = ParallelConfig.model_validate(parallel)
    mesh = mesh_of(rank, config.expert_parallel)
    machine = (machines or {}).get(rank.rank, {})
    with pytest.MonkeyPatch.context() as patch:
        if "machine" in machine:
            patch.setattr(platform, "machine", lambda: machine["machine"])
        if "host" in machine:
            patch.setattr(rowwise_on_cpu, "host_identity", lambda: (machine["host"], 1))
        if "available" in machine:
            patch.setattr(rowwise_on_cpu, "available_memory", lambda: machine["available"])
        if "allocate" in machine:
            patch.setattr(shared_memory, "_allocate", refuse)
        try:
            built = parallelize(
                meta_model(model_config(**(model or {}))), mesh, config, max_tokens=max_tokens
            )
        except ConfigurationError as error:
            return "error", str(error)
    choice = built.dispatcher_choice
    assert choice is not None
    name, note = choice.dispatcher.transport.name, choice.note
    built.close()
    return name, note


def refuse(num_bytes: int, descriptors: Any) -> int:
    """An allocation that fails."""
    raise shared_memory.HeapError("nothing left")


def same_on_all(results: list[tuple[str, str]]) -> tuple[str, str]:
    """The result, which must be equal on all ranks."""
    assert all(result == results[0] for result in results), results
    return results[0]


LAYOUT = "mailboxes of 2 buffers x 1 peer(s) x 64 rows x 160 B = 20,608 bytes (20.1 KiB) per rank"


def test_candidates_are_in_order_of_preference() -> None:
    """``auto`` takes the first one that can run, and the last one can run everywhere."""
    names = [candidate.name for candidate in CANDIDATES]
    assert names == ["local", "rowwise", "rowwise", "collective"]


def test_auto_takes_rowwise_and_states_its_size(ranks: StartRanks) -> None:
    name, note = ranks(4).run(choice_case, {"expert_parallel": 2})[0]
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
def test_what_the_config_names_is_taken(
    ranks: StartRanks, parallel: dict[str, Any], name: str
) -> None:
    for chosen, note in ranks(2).run(choice_case, parallel):
        assert chosen == name
        assert note.startswith(f"{name} (parallel.dispatch = {parallel.get('dispatch', 'auto')})")


OBSTACLES = [
    ({1: {"machine": "aarch64"}}, 64, "rank 1: it needs Linux on x86-64, this is linux on aarch64"),
    ({3: {"host": "elsewhere"}}, 64, "ranks 2 to 3 do not share a host and a process namespace"),
    ({}, None, "rank 0: parallelize got no max_tokens, by which mailboxes are sized"),
    ({2: {"available": 80_000}}, 64, "the mailboxes of 4 rank(s) need 82,432 bytes (80.5 KiB) of"),
    ({3: {"allocate": True}}, 64, "rank 3: nothing left"),
]


@pytest.mark.parametrize(("machines", "max_tokens", "reason"), OBSTACLES)
def test_where_rowwise_cannot_run_auto_says_why_and_a_config_that_wants_it_is_refused(
    ranks: StartRanks, machines: dict[int, dict[str, Any]], max_tokens: int | None, reason: str
) -> None:
    """The result is the same on every rank, whichever rank has the obstacle."""
    auto = {"expert_parallel": 2}
    name, note = same_on_all(ranks(4).run(choice_case, auto, max_tokens, machines))
    assert name == "collective"
    assert note.startswith(
        f"collective (parallel.dispatch = auto): rowwise cannot run here: {reason}"
    )
    wanted = {"expert_parallel": 2, "dispatch": "rowwise"}
    name, message = same_on_all(ranks(4).run(choice_case, wanted, max_tokens, machines))
    assert name == "error"
    assert message.startswith(f"parallel.dispatch = rowwise cannot run here: {reason}")
    assert message.endswith(
        "; use collective, or auto, which takes the first transport that can run"
    )


def test_too_little_memory_names_both_numbers_and_what_to_lower(ranks: StartRanks) -> None:
    """Four ranks on the host; one of them sees less memory than the others."""
    machines = {2: {"available": 80_000}}
    wanted = {"expert_parallel": 2, "dispatch": "rowwise"}
    _, message = same_on_all(ranks(4).run(choice_case, wanted, 64, machines))
    assert (
        "the mailboxes of 4 rank(s) need 82,432 bytes (80.5 KiB) of shared memory, 80,000 bytes "
        f"(78.1 KiB) are available; {LAYOUT}: lower train.micro_batch_tokens, or set "
        "parallel.capacity_factor"
    ) in message
    machines = {2: {"available": 90_000}}
    assert ranks(4).run(choice_case, wanted, 64, machines)[0][0] == "rowwise"


def test_capacity_makes_mailboxes_smaller(ranks: StartRanks) -> None:
    """64 tokens, K = 2 of 8 experts, 4 on a rank: 4 x ceil(0.5 x 64 x 2 / 8) = 32 rows."""
    parallel = {"expert_parallel": 2, "capacity_factor": 0.5}
    _, note = ranks(2).run(choice_case, parallel)[0]
    assert "2 buffers x 1 peer(s) x 32 rows x 160 B" in note


def test_a_dense_model_needs_no_transport(ranks: StartRanks) -> None:
    ranks(2).run(dense_case)


def dense_case(rank: Runtime) -> None:
    config = ParallelConfig(dispatch="rowwise")
    model = meta_model(model_config(moe=None, n_dense_layers=0))
    built = parallelize(model, mesh_of(rank), config)
    assert built.dispatcher_choice is None
    built.close()


def closed_case(rank: Runtime) -> int:
    """Build and close a model twice; returns the number of mappings that are left."""
    config = ParallelConfig(expert_parallel=2)
    gc.collect()  # frees what other cases have left
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
    """Number of arenas that this process maps."""
    with open("/proc/self/maps", encoding="ascii") as maps:
        return sum("memfd:olmo_shard" in line for line in maps)


def test_closed_it_can_be_made_again_and_leaves_nothing(ranks: StartRanks) -> None:
    assert ranks(2).run(closed_case) == [0, 0]
