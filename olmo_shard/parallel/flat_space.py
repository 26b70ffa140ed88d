"""One class of parameters in flat buffers, and the views into them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from olmo_shard.config import ParallelConfig
from olmo_shard.errors import TrainingError
from olmo_shard.kernels.accumulate_grad import accumulate_grad
from olmo_shard.kernels.backend import Backend
from olmo_shard.parallel.buckets import Bucket, Piece, make_buckets, pieces
from olmo_shard.parallel.shards import InitialValue, LogicalParameter, MainSlice, ParameterShard

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
"""Whether a parameter may have a gradient of another type in this torch."""


@dataclass(frozen=True, kw_only=True)
class FlatBucket:
    """A bucket's views of the flat buffers: what is reduced, updated and gathered at once."""

    names: tuple[str, ...]
    """Of its parameters."""
    group: dist.ProcessGroup
    grads: Tensor
    """[n] in ``grad_dtype``: this rank's sums over the window."""
    weights: Tensor
    """[n] in compute precision."""
    owned: MainSlice
    """[n / W]: this rank's slice; its ``model`` is a view of ``weights``."""
    main_grads: Tensor
    """FP32 [n / W]: the gradient summed over the group."""


class FlatSpace:
    """Moves parameters into flat buffers and makes backward add to them.

    :param parameters: of one class: reduced over the same group.
    :param initial: the value of each parameter.
    :param backend: back end of the kernels, chosen once for the model.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: list[LogicalParameter],
        group: dist.ProcessGroup,
        device: torch.device,
        config: ParallelConfig,
        initial: InitialValue,
        backend: Backend,
    ) -> None:
        self.group = group
        self._compiled = config.compile
        self._backend: Backend = backend
        self._logical = {parameter.name: parameter for parameter in parameters}
        sizes = {name: model.get_parameter(name).numel() for name in self._logical}
        cap = int(config.ddp.bucket_cap_mb * 2**20 / torch.float32.itemsize)
        layout = make_buckets(sizes, group.size(), cap)
        length = layout[-1].end
        dtype = getattr(torch, config.compute_dtype)
        self.weights = torch.zeros(length, dtype=dtype, device=device)
        """Compute precision; each parameter is a view."""
        grad_dtype = getattr(torch, config.ddp.grad_dtype)
        self.grads = torch.zeros(length, dtype=grad_dtype, device=device)
        """``grad_dtype``; each gradient is a view."""
        self._attached: list[tuple[nn.Parameter, Tensor]] = []
        self.buckets = [self._fill(model, bucket, initial) for bucket in layout]

    def begin_window(self) -> None:
        """Zero the gradients, and make them the parameters' again if somebody took them away."""
        self.grads.zero_()
        for parameter, gradient in self._attached:
            parameter.grad = gradient

    def check_gradients(self) -> None:
        """:raises TrainingError: where gradients went elsewhere, and sums would lack them."""
        if any(parameter.grad is not gradient for parameter, gradient in self._attached):
            raise TrainingError(
                "gradients were replaced inside a window: call begin_window before its first "
                "forward, and zero no gradients until the optimizer's step"
            )

    def _fill(self, model: nn.Module, bucket: Bucket, initial: InitialValue) -> FlatBucket:
        """Make a bucket's parameters views of the flat buffers, with their initial values."""
        rank, size = self.group.rank(), self.group.size()
        start, end = bucket.slice_of(rank, size)
        values = torch.zeros(bucket.end - bucket.start, dtype=torch.float32)
        for span in bucket.spans:
            old = model.get_parameter(span.name)
            value = initial(self._logical[span.name])
            values[span.start - bucket.start : span.end - bucket.start] = value.flatten()
            view = slice(span.start, span.end)
            parameter = nn.Parameter(self.weights[view].view(old.shape))
            self._attach(parameter, self.grads[view].view(old.shape), self._logical[span.name])
            owner, _, name = span.name.rpartition(".")
            setattr(model.get_submodule(owner), name, parameter)
        weights = self.weights[bucket.start : bucket.end]
        weights.copy_(values)
        own_weights = self.weights[start:end]
        main = own_weights
        if main.dtype != torch.float32:
            main = values[start - bucket.start : end - bucket.start].clone().to(weights.device)
        main_grads = self.grads[start:end]
        if main_grads.dtype != torch.float32:
            main_grads = torch.zeros_like(main)
        return FlatBucket(
            names=tuple(span.name for span in bucket.spans),
            group=self.group,
            grads=self.grads[bucket.start : bucket.end],
            weights=weights,
            main_grads=main_grads,
            owned=MainSlice(
                main=main,
                model=own_weights,
                gradient=lambda: main_grads,
                shards=tuple(self._shard(piece, start) for piece in pieces(bucket, rank, size)),
            ),
        )

    def _attach(self, parameter: nn.Parameter, gradient: Tensor, logical: LogicalParameter) -> None:
        """Make backward add to a view of the flat gradients."""
        # torch.compile refuses a parameter whose .grad is of another type; experts stay eager.
        compiled = self._compiled and logical.experts is None
        if parameter.dtype == gradient.dtype:
            self._attached.append((parameter, gradient))
        elif compiled or not HAS_GRAD_DTYPE:
            _add_by_hook(parameter, gradient, self._backend)
        else:
            parameter.grad_dtype = gradient.dtype
            self._attached.append((parameter, gradient))

    def _shard(self, piece: Piece, slice_start: int) -> ParameterShard:
        logical = self._logical[piece.name]
        return ParameterShard(
            name=piece.name,
            shape=logical.shape,
            chunks=((logical.local_offset + piece.offset, piece.numel),),
            start=piece.start - slice_start,
        )


def _add_by_hook(parameter: nn.Parameter, gradient: Tensor, backend: Backend) -> None:
    """Make backward add a parameter's gradient to a tensor that is not its ``.grad``."""

    def add(param: Tensor) -> None:
        assert param.grad is not None
        accumulate_grad(gradient, param.grad, backend)
        param.grad = None

    parameter.register_post_accumulate_grad_hook(add)
