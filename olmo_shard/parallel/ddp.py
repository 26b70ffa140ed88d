"""Mode ``ddp``: whole dense weights on every rank, flat buckets, one reduction per window.

Each class of parameters (dense: all ranks; experts: the ranks that hold the same ones) has two flat
buffers, the weights in compute precision and the gradients. Parameters and their gradients are
views of them, and backward accumulates straight into the second. In a steady state nothing is
allocated but staging for two buckets.
"""

import torch
import torch.distributed as dist
from torch import nn

from olmo_shard.config import ParallelConfig
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.distributed.work import CommStream
from olmo_shard.kernels.backend import Backend
from olmo_shard.nn.experts import RoutedExperts
from olmo_shard.parallel.flat_space import FlatBucket, FlatSpace
from olmo_shard.parallel.gather import BucketGather
from olmo_shard.parallel.reduce import BucketReducer
from olmo_shard.parallel.shards import InitialValue, LogicalParameter, ParallelModel


class DDPModel(ParallelModel):
    """See the module's docstring.

    :param model: cut to this rank's experts already; its parameters move into the flat buffers.
    :param parameters: what ``shard_experts`` returned.
    :param initial: the value of each parameter.
    :param backend: back end of the kernels, chosen once for the model.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        config: ParallelConfig,
        parameters: list[LogicalParameter],
        initial: InitialValue,
        backend: Backend = "reference",
    ) -> None:
        self.model, self.backend = model, backend
        self.spaces = [
            FlatSpace(model, members, group, mesh.device, config, initial, backend)
            for group, members in _classes(mesh, parameters)
        ]
        buckets = _in_order_of_backward(self.spaces, parameters)
        for module in model.modules():
            if isinstance(module, RoutedExperts):
                module.accumulate_into_main_grads = True
        comm_stream = CommStream(mesh.device)
        self._reducer = BucketReducer(
            model,
            buckets,
            comm_stream,
            overlap=config.ddp.overlap_grad_reduce,
            wire_dtype=getattr(torch, config.ddp.wire_dtype or config.ddp.grad_dtype),
        )
        in_order_of_forward = buckets[::-1]
        self.slices = [bucket.owned for bucket in in_order_of_forward]
        self._gather = BucketGather(
            model, in_order_of_forward, comm_stream, overlap=config.ddp.overlap_param_gather
        )
        model.register_state_dict_pre_hook(lambda *_: self.wait())

    def begin_window(self) -> None:
        self._reducer.begin_window()
        for space in self.spaces:
            space.begin_window()

    def begin_microbatch(self, *, last: bool) -> None:
        self._reducer.begin_microbatch(last=last)

    def reduce(self) -> None:
        """Each slice's gradient holds the sum over its group.

        :raises TrainingError: where gradients were replaced inside the window.
        """
        for space in self.spaces:
            space.check_gradients()
        # What the model did not use nobody has waited for, and the step is about to write it.
        self.wait()
        self._reducer.finish()

    def gather(self, index: int) -> None:
        self._gather.start(index)

    def wait(self) -> None:
        self._gather.wait()


def _classes(
    mesh: Mesh, parameters: list[LogicalParameter]
) -> list[tuple[dist.ProcessGroup, list[LogicalParameter]]]:
    """The groups of ranks over which parameters are reduced, each with its parameters."""
    if mesh.expert_parallel == 1:  # all ranks hold everything: one class, in backward's order
        return [(mesh.bulk, parameters)]
    dense = [parameter for parameter in parameters if parameter.experts is None]
    experts = [parameter for parameter in parameters if parameter.experts is not None]
    classes = [(mesh.bulk, dense), (mesh.ep_dp, experts)]
    return [(group, members) for group, members in classes if members]


def _in_order_of_backward(
    spaces: list[FlatSpace], parameters: list[LogicalParameter]
) -> list[FlatBucket]:
    """All buckets, by the parameter that backward reaches last: the one defined first."""
    place = {parameter.name: index for index, parameter in enumerate(parameters)}
    buckets = [bucket for space in spaces for bucket in space.buckets]
    return sorted(buckets, key=lambda bucket: -min(place[name] for name in bucket.names))
