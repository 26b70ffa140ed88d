"""Groups and collectives. Runs on gloo."""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from olmo_shard.distributed import collectives
from olmo_shard.distributed.comm_stats import comm_stats
from olmo_shard.distributed.failure import first_cause, is_lost_peer, read_failure
from olmo_shard.distributed.runtime import Runtime
from tests.support.close import BARS, close
from tests.support.ranks import Groups, mesh_of


def reduce_scatter_case(rank: Runtime) -> tuple[list[float], list[float], int]:
    group = mesh_of(rank).bulk
    flat = torch.arange(6.0) + 10 * rank.rank
    own = flat[2 * rank.rank : 2 * rank.rank + 2]
    before = comm_stats.bytes["test"]
    collectives.reduce_scatter_start(own, flat, group, kind="test").wait()
    sent = comm_stats.bytes["test"] - before
    gathered = torch.zeros(6)
    gathered[2 * rank.rank : 2 * rank.rank + 2] = own
    slot = gathered[2 * rank.rank : 2 * rank.rank + 2]
    collectives.all_gather_start(gathered, slot, group, kind="test").wait()
    return own.tolist(), gathered.tolist(), sent


def test_reduce_scatter_then_all_gather_in_place(ranks: Groups) -> None:
    results = ranks(3).run(reduce_scatter_case)
    whole = [3 * i + 30.0 for i in range(6)]
    assert [own for own, _, _ in results] == [whole[0:2], whole[2:4], whole[4:6]]
    assert all(gathered == whole for _, gathered, _ in results)
    assert [sent for _, _, sent in results] == [16, 16, 16]  # 4 of 6 FP32 elements


def rounded_case(rank: Runtime, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """This rank's slice of a sum that travels in bf16, its own values, bytes sent."""
    group = mesh_of(rank).bulk
    generator = torch.Generator().manual_seed(rank.rank)
    flat = torch.randn(3 * 40_000, generator=generator) * 10 ** torch.linspace(-30, 30, 3 * 40_000)
    flat = flat.to(dtype)
    output = torch.full((40_000,), torch.nan)
    before = comm_stats.bytes["test"]
    collectives.reduce_scatter_start(
        output, flat, group, kind="test", wire_dtype=torch.bfloat16
    ).wait()
    return output, flat, comm_stats.bytes["test"] - before


def test_a_sum_over_a_bf16_wire_is_off_by_one_rounding_of_each_value(ranks: Groups) -> None:
    """The stated bound, element by element, over 60 orders of magnitude; half the bytes."""
    results = ranks(3).run(rounded_case, torch.float32)
    values = torch.stack([flat for _, flat, _ in results]).double()
    found = torch.cat([output for output, _, _ in results]).double()
    rounding = BARS[torch.bfloat16].rounding + BARS[torch.float32].sums  # travel, then addition
    bound = rounding * values.abs().sum(dim=0)
    error = (found - values.sum(dim=0)).abs()
    assert (error <= bound).all()
    assert (error > bound / 4).any(), "the bound is not tight"
    assert [sent for _, _, sent in results] == [2 * 40_000 * 2] * 3


def test_bf16_values_are_summed_in_fp32(ranks: Groups) -> None:
    results = ranks(3).run(rounded_case, torch.bfloat16)
    values = torch.stack([flat for _, flat, _ in results]).double()
    found = torch.cat([output for output, _, _ in results]).double()
    scale = values.abs().sum(dim=0)
    close(found, values.sum(dim=0), scale=scale, dtype=torch.float32)


def many_case(rank: Runtime) -> list[list[float]]:
    """Six collectives of two kinds under way at once on one group, awaited out of order."""
    group = mesh_of(rank).bulk
    works, outputs = [], []
    for index in range(3):
        flat = torch.arange(4.0) + 10 * rank.rank + 100 * index
        summed, gathered = torch.zeros(2), torch.zeros(4)
        own = torch.full((2,), float(rank.rank + 10 * index))
        works.append(collectives.reduce_scatter_start(summed, flat, group, kind="test"))
        works.append(collectives.all_gather_start(gathered, own, group, kind="test"))
        outputs += [summed, gathered]
    for work in reversed(works):
        work.wait()
        work.wait()
    return [output.tolist() for output in outputs]


def test_several_are_under_way_at_once(ranks: Groups) -> None:
    first, second = ranks(2).run(many_case)
    for index in range(3):
        base = 200.0 * index + 10
        assert first[2 * index] == [base, base + 2]
        assert second[2 * index] == [base + 4, base + 6]
        assert (
            first[2 * index + 1]
            == second[2 * index + 1]
            == [10.0 * index] * 2 + [1 + 10.0 * index] * 2
        )


def exposed_case(rank: Runtime) -> tuple[float, float, dict[str, int]]:
    """Rank 1 comes a second late: the wait of rank 0, and its bytes, in a stretch of their own."""
    group = mesh_of(rank).bulk
    dist.barrier(group=group)
    with comm_stats.measure() as stretch:
        time.sleep(rank.rank)
        collectives.all_reduce(torch.ones(4), group, kind="late")
    collectives.all_reduce(torch.ones(4), group, kind="after")
    with comm_stats.measure() as hidden:
        flat = torch.ones(4)
        work = collectives.all_gather_start(flat, flat[:2], group, kind="hidden")
        time.sleep(0.2)
        work.wait()
    late, quick = stretch.exposed_seconds(), hidden.exposed_seconds()
    assert late.keys() == {"late"}
    return late["late"], quick["hidden"], dict(stretch.bytes)


def test_waiting_is_timed_and_what_overlaps_is_not(ranks: Groups) -> None:
    (waited, hidden, sent), (late, _, _) = ranks(2).run(exposed_case)
    # Against each other, not against a clock: a second of sleep leaves room for a busy machine.
    assert waited > 2 * late
    assert waited > 2 * hidden
    assert sent == {"late": 16}


def groups_case(rank: Runtime) -> tuple[list[int], list[int], list[bool]]:
    mesh = mesh_of(rank, 2)
    groups = (mesh.bulk, mesh.control, mesh.ep, mesh.ep_dp)
    distinct = [a is not b for i, a in enumerate(groups) for b in groups[i + 1 :]]
    separate = [group is not dist.group.WORLD for group in groups]
    members = [dist.get_process_group_ranks(group) for group in (mesh.ep, mesh.ep_dp)]
    return *members, distinct + separate  # type: ignore[return-value]


def test_ep_is_innermost_and_no_group_is_shared(ranks: Groups) -> None:
    results = ranks(4).run(groups_case)
    assert [ep for ep, _, _ in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [ep_dp for _, ep_dp, _ in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(all(separate) for _, _, separate in results)


def experts_case(rank: Runtime) -> list[int]:
    return list(mesh_of(rank, 2).local_experts(6))


def test_each_rank_of_an_ep_group_holds_a_slice_of_the_experts(ranks: Groups) -> None:
    assert ranks(4).run(experts_case) == [[0, 1, 2], [3, 4, 5]] * 2


def test_the_first_cause_is_not_the_loss_of_a_peer(tmp_path: Path) -> None:
    def record(rank: int, message: str) -> None:
        path = tmp_path / f"{rank}.json"
        path.write_text(json.dumps({"message": {"message": message}}))
        os.utime(path, (rank, rank))

    record(0, "TrainingError: rank 0 lost a peer: Connection closed by peer")
    record(1, "RuntimeError: [gloo] Connection reset by peer")
    failures = [read_failure(tmp_path / f"{rank}.json", rank, 1) for rank in (0, 1)]
    killed = read_failure(tmp_path / "2.json", 2, -9)
    assert killed.message == "killed by signal 9"
    assert killed.when <= time.time()
    assert first_cause([*failures, killed]) is killed
    record(3, "DataError: bad file")
    assert first_cause([*failures, read_failure(tmp_path / "3.json", 3, 2)]).rank == 3
    assert is_lost_peer("... Connection closed by peer [127.0.0.1]:123")
    assert not is_lost_peer("KeyError: 'x'")
