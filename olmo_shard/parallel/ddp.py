"""Mode ``ddp``: whole dense weights on every rank, flat buckets, one reduction per window.

Each class of parameters (dense: all ranks; experts: the ranks that hold the same ones) has two flat
buffers, the weights in compute precision and the gradients in FP32. Parameters and their gradients
are views of them. Backward accumulates straight into the FP32 buffer; nothing is allocated in a
steady state but one bucket of staging on gloo.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from olmo_shard.config import ParallelConfig
from olmo_shard.distributed import collectives
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import TrainingError
from olmo_shard.parallel.buckets import Bucket, Piece, make_buckets, pieces
from olmo_shard.parallel.shards import (
    InitialValue,
    LogicalParameter,
    ParallelModel,
    ParameterShard,
)

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
"""Whether a bf16 parameter may have an FP32 gradient in this torch."""


class DDPModel(ParallelModel):
    """See the module's docstring.

    :param model: cut to this rank's experts already; its parameters move into the flat buffers.
    :param parameters: what ``spread_experts`` returned.
    :param initial: the value of each parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        config: ParallelConfig,
        parameters: list[LogicalParameter],
        initial: InitialValue,
    ) -> None:
        self.model = model
        classes = [(mesh.bulk, [p for p in parameters if p.experts is None])]
        classes.append((mesh.ep_dp, [p for p in parameters if p.experts is not None]))
        self.spaces = [
            FlatSpace(model, members, group, mesh.device, config, initial)
            for group, members in classes
            if members
        ]
        self.shards = [shard for space in self.spaces for shard in space.shards]

    def begin_window(self) -> None:
        for space in self.spaces:
            space.begin_window()

    def begin_microbatch(self, *, last: bool) -> None:
        """Nothing to do: micro-batches of a window only add to the local buffers."""

    def reduce(self) -> None:
        for space in self.spaces:
            space.reduce()

    def gather(self) -> None:
        for space in self.spaces:
            space.gather()


class FlatSpace:
    """One class of parameters in flat buffers."""

    def __init__(
        self,
        model: nn.Module,
        parameters: list[LogicalParameter],
        group: dist.ProcessGroup,
        device: torch.device,
        config: ParallelConfig,
        initial: InitialValue,
    ) -> None:
        self.group = group
        # torch.compile refuses a bf16 parameter whose .grad is FP32.
        self._by_hook = config.compile or not HAS_GRAD_DTYPE
        dtype = getattr(torch, config.compute_dtype)
        cap = int(config.ddp.bucket_cap_mb * 2**20 / torch.float32.itemsize)
        self._logical = {parameter.name: parameter for parameter in parameters}
        sizes = {name: model.get_parameter(name).numel() for name in self._logical}
        self.buckets = make_buckets(sizes, group.size(), cap)
        length = self.buckets[-1].end
        self.weights = torch.zeros(length, dtype=dtype, device=device)
        """Compute precision; each parameter is a view."""
        self.grads = torch.zeros(length, dtype=torch.float32, device=device)
        """FP32; each gradient is a view."""
        self.mains = [self._main(bucket) for bucket in self.buckets]
        """FP32 main weights of each bucket's own slice; in FP32 compute views of ``weights``."""
        self._attached: list[tuple[nn.Parameter, Tensor]] = []
        for bucket, main in zip(self.buckets, self.mains, strict=True):
            values = self._move_in(model, bucket, initial)
            self.weights[bucket.start : bucket.end] = values
            main.copy_(self._own(values, bucket, origin=bucket.start))
        self.shards = [
            self._shard(piece, bucket, main)
            for bucket, main in zip(self.buckets, self.mains, strict=True)
            for piece in pieces(bucket, group.rank(), group.size())
        ]

    def begin_window(self) -> None:
        """Zero the gradients, and make them the parameters' again if somebody took them away."""
        self.grads.zero_()
        for parameter, gradient in self._attached:
            parameter.grad = gradient

    def reduce(self) -> None:
        """Sum each bucket over the group; the own slice of ``grads`` holds the result.

        :raises TrainingError: where gradients went elsewhere, and sums would lack them.
        """
        if any(parameter.grad is not gradient for parameter, gradient in self._attached):
            raise TrainingError(
                "gradients were replaced inside a window: call begin_window before its first "
                "forward, and zero no gradients until the optimizer's step"
            )
        for bucket in self.buckets:
            flat = self.grads[bucket.start : bucket.end]
            collectives.reduce_scatter(
                self._own(self.grads, bucket), flat, self.group, kind="reduce"
            )

    def gather(self) -> None:
        """Write the own main weights in compute precision and fetch the slices of the others."""
        for bucket, main in zip(self.buckets, self.mains, strict=True):
            own = self._own(self.weights, bucket)
            if main.data_ptr() != own.data_ptr():
                own.copy_(main)
            flat = self.weights[bucket.start : bucket.end]
            collectives.all_gather(flat, own, self.group, kind="gather")

    def _own(self, flat: Tensor, bucket: Bucket, origin: int = 0) -> Tensor:
        """This rank's slice of a bucket, in a buffer that begins at ``origin`` in flat space."""
        start, end = bucket.slice_of(self.group.rank(), self.group.size())
        return flat[start - origin : end - origin]

    def _main(self, bucket: Bucket) -> Tensor:
        own = self._own(self.weights, bucket)
        return own if own.dtype == torch.float32 else torch.zeros_like(own, dtype=torch.float32)

    def _move_in(self, model: nn.Module, bucket: Bucket, initial: InitialValue) -> Tensor:
        """Make a bucket's parameters views of the flat buffers; returns their values, FP32."""
        values = torch.zeros(bucket.end - bucket.start, dtype=torch.float32)
        for span in bucket.spans:
            old = model.get_parameter(span.name)
            value = initial(self._logical[span.name])
            values[span.start - bucket.start : span.end - bucket.start] = value.flatten()
            view = slice(span.start, span.end)
            parameter = nn.Parameter(self.weights[view].view(old.shape))
            self._attach(parameter, self.grads[view].view(old.shape))
            owner, _, name = span.name.rpartition(".")
            setattr(model.get_submodule(owner), name, parameter)
        return values

    def _attach(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Make backward add to an FP32 view."""
        if parameter.dtype == torch.float32:
            self._attached.append((parameter, gradient))
        elif self._by_hook:
            _add_by_hook(parameter, gradient)
        else:
            parameter.grad_dtype = torch.float32
            self._attached.append((parameter, gradient))

    def _shard(self, piece: Piece, bucket: Bucket, main: Tensor) -> ParameterShard:
        start, _ = bucket.slice_of(self.group.rank(), self.group.size())
        logical = self._logical[piece.name]
        gradient = self.grads[piece.start : piece.start + piece.numel]
        in_slice = piece.start - start
        return ParameterShard(
            name=piece.name,
            shape=logical.shape,
            chunks=((logical.local_offset + piece.offset, piece.numel),),
            main=main[in_slice : in_slice + piece.numel],
            gradient=lambda: gradient,
        )


def _add_by_hook(parameter: nn.Parameter, gradient: Tensor) -> None:
    """Make backward add a parameter's gradient to an FP32 tensor that is not its ``.grad``."""

    def add(param: Tensor) -> None:
        assert param.grad is not None
        gradient.add_(param.grad)
        param.grad = None

    parameter.register_post_accumulate_grad_hook(add)
