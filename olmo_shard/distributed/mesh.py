"""The process groups of a run. No other module creates any.

All N ranks share the dense parameters. For experts, the ranks form a grid ``ep_dp x ep`` with
``ep`` innermost, so the ranks of an ep group are neighbours and fill one node first:

    N = 8, ep = 4:   ep groups     [0 1 2 3] [4 5 6 7]        exchange token rows
                     ep_dp groups  [0 4] [1 5] [2 6] [3 7]    hold equal experts, reduce gradients

[Note: four groups] Bulk transfers, scalars and token rows each use a group of their own, and the
default group is never used. Collectives of one group run in order: in a shared group a scalar would
wait for a dozen pending gathers, and two ranks with different orders would abort.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from olmo_shard.config.layout import check_expert_groups
from olmo_shard.distributed.long_waits import long_waits
from olmo_shard.distributed.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """This rank, its device, and its four process groups; see [Note: four groups]."""

    rank: int
    world_size: int
    device: torch.device
    bulk: dist.ProcessGroup
    """All ranks; carries gradients and weights of dense parameters."""
    control: dist.ProcessGroup
    """All ranks; carries scalars, the control vector and objects."""
    ep: dist.ProcessGroup
    """Ranks that together hold one copy of the experts; carries token rows."""
    ep_dp: dist.ProcessGroup
    """Ranks that hold equal experts; carries gradients and weights of those experts."""
    timeout: timedelta
    """Longest wait for a peer."""

    @property
    def expert_parallel(self) -> int:
        """Number of ranks in an ep group."""
        return self.ep.size()

    def local_experts(self, num_experts: int) -> range:
        """Return the global ids of this rank's experts.

        :param num_experts: experts of a layer, a multiple of the size of the ep group.
        """
        local = num_experts // self.ep.size()
        return range(self.ep.rank() * local, (self.ep.rank() + 1) * local)

    def device_mesh(self, group: dist.ProcessGroup) -> DeviceMesh:
        """Return one of the groups as a one-dimensional device mesh, for FSDP2."""
        return DeviceMesh.from_group(group, self.device.type)


def build_mesh(runtime: Runtime, expert_parallel: int = 1) -> Mesh:
    """Create the process groups; collective over all ranks.

    :param expert_parallel: number of ranks over which the experts of a layer are sharded.
    :raises ConfigurationError: if it does not divide the number of ranks.
    """
    size, ep = runtime.world_size, expert_parallel
    check_expert_groups(ep, size)
    all_ranks = list(range(size))
    ep_groups = [all_ranks[start : start + ep] for start in range(0, size, ep)]
    ep_dp_groups = [all_ranks[start::ep] for start in range(ep)]
    with long_waits.watch("set-up of process groups", lambda: all_ranks):
        mesh = Mesh(
            rank=runtime.rank,
            world_size=size,
            device=runtime.device,
            bulk=_create_groups([all_ranks], runtime),
            control=_create_groups([all_ranks], runtime),
            ep=_create_groups(ep_groups, runtime),
            ep_dp=_create_groups(ep_dp_groups, runtime),
            timeout=runtime.timeout,
        )
        if runtime.device.type == "cuda":
            # NCCL connects in the first collective, which blocks the host. Do that before training.
            for group in (mesh.bulk, mesh.control, mesh.ep, mesh.ep_dp):
                dist.all_reduce(torch.zeros(1, device=runtime.device), group=group)
    return mesh


def _create_groups(groups: list[list[int]], runtime: Runtime) -> dist.ProcessGroup:
    """Create every group, in the given order on every rank; return the one with this rank."""
    created = [(ranks, dist.new_group(ranks, timeout=runtime.timeout)) for ranks in groups]
    own = next(group for ranks, group in created if runtime.rank in ranks)
    assert isinstance(own, dist.ProcessGroup)
    return own
