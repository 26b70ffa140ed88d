"""Groups and collectives. Runs on gloo, in CI."""

import json
import os
import time

import torch
import torch.distributed as dist

from olmo_shard.distributed import collectives
from olmo_shard.distributed.failure import first_cause, is_lost_peer, read_failure
from olmo_shard.distributed.runtime import Runtime
from tests.support.ranks import mesh_of


def reduce_scatter_case(rank: Runtime) -> tuple[list[float], list[float], int]:
    group = mesh_of(rank).bulk
    flat = torch.arange(6.0) + 10 * rank.rank
    own = flat[2 * rank.rank : 2 * rank.rank + 2]
    before = collectives.traffic.bytes["test"]
    collectives.reduce_scatter(own, flat, group, kind="test")
    sent = collectives.traffic.bytes["test"] - before
    gathered = torch.zeros(6)
    gathered[2 * rank.rank : 2 * rank.rank + 2] = own
    collectives.all_gather(
        gathered, gathered[2 * rank.rank : 2 * rank.rank + 2], group, kind="test"
    )
    return own.tolist(), gathered.tolist(), sent


def test_reduce_scatter_then_all_gather_in_place(ranks):
    results = ranks(3).run(reduce_scatter_case)
    whole = [3 * i + 30.0 for i in range(6)]
    assert [own for own, _, _ in results] == [whole[0:2], whole[2:4], whole[4:6]]
    assert all(gathered == whole for _, gathered, _ in results)
    assert [sent for _, _, sent in results] == [16, 16, 16]  # 4 of 6 FP32 elements


def groups_case(rank: Runtime) -> tuple[list[int], list[int], list[bool]]:
    mesh = mesh_of(rank, 2)
    groups = (mesh.bulk, mesh.control, mesh.ep, mesh.ep_dp)
    distinct = [a is not b for i, a in enumerate(groups) for b in groups[i + 1 :]]
    separate = [group is not dist.group.WORLD for group in groups]
    members = [dist.get_process_group_ranks(group) for group in (mesh.ep, mesh.ep_dp)]
    return *members, distinct + separate  # type: ignore[return-value]


def test_ep_is_innermost_and_no_group_is_shared(ranks):
    results = ranks(4).run(groups_case)
    assert [ep for ep, _, _ in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [ep_dp for _, ep_dp, _ in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(all(separate) for _, _, separate in results)


def experts_case(rank: Runtime) -> list[int]:
    return list(mesh_of(rank, 2).local_experts(6))


def test_each_rank_of_an_ep_group_holds_a_slice_of_the_experts(ranks):
    assert ranks(4).run(experts_case) == [[0, 1, 2], [3, 4, 5]] * 2


def test_the_first_cause_is_not_the_loss_of_a_peer(tmp_path):
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
