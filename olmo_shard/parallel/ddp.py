"""Mode ``ddp``: whole dense weights on every rank, flat buckets, one reduction per window.

Megatron calls this a distributed optimizer, and the ZeRO paper stage 1: weights and gradients are
whole on every rank, main weights and optimizer state are sharded. As in stage 2 the gradients are
reduce-scattered.

Each class of parameters has two flat buffers: weights in compute precision, and gradients. A class
is dense (reduced over all ranks) or experts (reduced over the ranks that hold the same experts).
Parameters and gradients are views of the buffers, and backward adds to the gradients in place. In a
steady state a step allocates only the staging memory of two buckets.
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
from olmo_shard.parallel.shards import (
    InitialValue,
    LogicalParameter,
    OwnedSlice,
    ParallelModel,
)


class DDPModel(ParallelModel):
    """A model in flat buffers; the module's docstring describes the mode.

    :param model: model with this rank's experts only; its parameters move into the flat buffers.
    :param parameters: what ``shard_experts`` returned.
    :param initial: returns the value of each parameter.
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
        self.parameters = parameters
        self.spaces = [
            FlatSpace(model, members, group, mesh.device, config, initial, backend)
            for group, members in _classes(mesh, parameters)
        ]
        # The third way of [Note: where gradients add up] in flat_space.py.
        for module in model.modules():
            if isinstance(module, RoutedExperts):
                module.accumulate_into_main_grads = True

        # Backward fills the buckets in the reverse of the order in which forward reads them.
        buckets = _in_order_of_forward(self.spaces, parameters)
        comm_stream = CommStream(mesh.device)
        self._reducer = BucketReducer(
            model,
            list(reversed(buckets)),
            comm_stream,
            overlap=config.ddp.overlap_grad_reduce,
            wire_dtype=getattr(torch, config.ddp.wire_dtype or config.ddp.grad_dtype),
        )
        self.slices = buckets
        self._gather = BucketGather(
            model, buckets, comm_stream, overlap=config.ddp.overlap_param_gather
        )
        model.register_state_dict_pre_hook(lambda *_: self.wait_for_weights())

    def begin_window(self) -> None:
        """Zero the flat gradients, and mark no bucket as ready."""
        self._reducer.begin_window()
        for space in self.spaces:
            space.begin_window()

    def begin_microbatch(self, *, last: bool) -> None:
        """Let buckets start in the coming backward if it is the window's last."""
        self._reducer.begin_microbatch(last=last)

    def reduce(self) -> None:
        """Finish the reduces, so that each slice's gradient holds the sum over its group.

        :raises TrainingError: if gradients were replaced inside the window.
        """
        for space in self.spaces:
            space.check_gradients()
        # Weights of unused modules may still be in flight, and the step is about to write them.
        self.wait_for_weights()
        self._reducer.finish()

    def gather(self, owned: OwnedSlice) -> None:
        """Start the all-gather of the bucket to which a slice belongs."""
        assert isinstance(owned, FlatBucket)
        self._gather.start(owned)

    def wait_for_weights(self) -> None:
        """Wait for the all-gathers of all buckets."""
        self._gather.wait()

    def release_gathered_weights(self) -> None:
        """Do nothing: the whole weights are the model, and a gather brings them up to date."""


def _classes(
    mesh: Mesh, parameters: list[LogicalParameter]
) -> list[tuple[dist.ProcessGroup, list[LogicalParameter]]]:
    """The groups of ranks over which parameters are reduced, each with its parameters."""
    # Without expert parallelism all ranks hold everything: one class, in backward's order.
    if mesh.expert_parallel == 1:
        return [(mesh.bulk, parameters)]
    dense = [parameter for parameter in parameters if parameter.experts is None]
    experts = [parameter for parameter in parameters if parameter.experts is not None]
    classes = [(mesh.bulk, dense), (mesh.ep_dp, experts)]
    return [(group, members) for group, members in classes if members]


def _in_order_of_forward(
    spaces: list[FlatSpace], parameters: list[LogicalParameter]
) -> list[FlatBucket]:
    """All buckets, sorted by the parameter of each bucket that was defined first."""
    place = {parameter.name: number for number, parameter in enumerate(parameters)}
    buckets = [bucket for space in spaces for bucket in space.buckets]
    return sorted(buckets, key=lambda bucket: min(place[name] for name in bucket.names))
