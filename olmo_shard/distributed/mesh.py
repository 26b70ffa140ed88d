"""The process groups of a run; nothing else makes any.

N ranks. Dense parameters belong to all of them. For experts the same ranks are seen as ``ep_dp x
ep`` with ``ep`` innermost, so that neighbours form a group and a node is filled first:

    N = 8, ep = 4:   ep groups     [0 1 2 3] [4 5 6 7]        exchange token rows
                     ep_dp groups  [0 4] [1 5] [2 6] [3 7]    hold the same experts, reduce their
                     gradients

[Note: four groups] Bulk transfers, scalars and token rows each get a group of their own, and the
default group is never used: collectives of one group run in order, so a scalar would wait behind a
dozen pending gathers, and a different order on two ranks would abort the process.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from olmo_shard.config.layout import check_expert_groups
from olmo_shard.distributed.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Mesh:
    rank: int
    world_size: int
    device: torch.device
    bulk: dist.ProcessGroup
    """All ranks: gradients and weights of what every rank holds."""
    control: dist.ProcessGroup
    """All ranks: scalars, the control vector, objects."""
    ep: dist.ProcessGroup
    """The ranks that hold one copy of the experts together."""
    ep_dp: dist.ProcessGroup
    """The ranks that hold the same experts: their gradients and weights."""
    timeout: timedelta
    """How long a rank waits for its peers."""

    @property
    def expert_parallel(self) -> int:
        return self.ep.size()

    def local_experts(self, num_experts: int) -> range:
        """Global ids of this rank's experts."""
        local = num_experts // self.ep.size()
        return range(self.ep.rank() * local, (self.ep.rank() + 1) * local)

    def device_mesh(self, group: dist.ProcessGroup) -> DeviceMesh:
        """One of the groups as FSDP2 wants it."""
        return DeviceMesh.from_group(group, self.device.type)


def build_mesh(runtime: Runtime, expert_parallel: int = 1) -> Mesh:
    """Make the groups; collective over all ranks.

    :param expert_parallel: ranks over which the experts of a layer are spread.
    :raises ConfigurationError: where it does not divide the number of ranks.
    """
    size, ep = runtime.world_size, expert_parallel
    check_expert_groups(ep, size)
    everyone = list(range(size))
    ep_groups = [everyone[start : start + ep] for start in range(0, size, ep)]
    ep_dp_groups = [everyone[start::ep] for start in range(ep)]
    mesh = Mesh(
        rank=runtime.rank,
        world_size=size,
        device=runtime.device,
        bulk=_own_group([everyone], runtime),
        control=_own_group([everyone], runtime),
        ep=_own_group(ep_groups, runtime),
        ep_dp=_own_group(ep_dp_groups, runtime),
        timeout=runtime.timeout,
    )
    if runtime.device.type == "cuda":
        # NCCL connects at the first collective, and the host waits for that: not in backward.
        for group in (mesh.bulk, mesh.control, mesh.ep, mesh.ep_dp):
            dist.all_reduce(torch.zeros(1, device=runtime.device), group=group)
    return mesh


def _own_group(groups: list[list[int]], runtime: Runtime) -> dist.ProcessGroup:
    """Every rank makes every group, in one order; returned is the one that it belongs to."""
    made = [(ranks, dist.new_group(ranks, timeout=runtime.timeout)) for ranks in groups]
    mine = next(group for ranks, group in made if runtime.rank in ranks)
    assert isinstance(mine, dist.ProcessGroup)
    return mine
