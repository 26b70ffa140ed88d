"""One class of parameters in flat buffers, and the views into the buffers.

[Note: where gradients add up] A window's gradients of all micro-batches add up in one flat buffer
of ``ddp.grad_dtype``. There are three ways into the buffer. The first two are chosen per parameter
in ``_attach`` below, the third in ``DDPModel``:

1. *View.* The parameter's ``.grad`` is a view of the buffer, and autograd adds to it in place. This
   needs equal types of weight and gradient, or a torch with ``Tensor.grad_dtype``.
2. *Hook.* A hook adds each micro-batch's gradient to the buffer and drops it. This is the way if
   the types differ, and either torch has no ``grad_dtype`` or the parameter is read in a compiled
   graph (torch.compile refuses a ``.grad`` of another type).
3. *Experts' operator.* Backward of the routed experts adds weight gradients to an FP32 ``.grad``
   view inside its own matrix products, and returns no gradient to autograd
   (``RoutedExperts.accumulate_into_main_grads``). With a bf16 buffer the first way applies.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from olmo_shard.config import ParallelConfig
from olmo_shard.errors import TrainingError
from olmo_shard.kernels.accumulate_grad import accumulate_grad
from olmo_shard.kernels.backend import Backend
from olmo_shard.parallel.buckets import Bucket, Piece, make_buckets, pieces
from olmo_shard.parallel.shards import InitialValue, LogicalParameter, OwnedSlice, ParameterShard

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
"""Whether this torch allows a gradient of another type than its parameter."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FlatBucket(OwnedSlice):
    """This rank's slice of a bucket, and the bucket's views of the flat buffers.

    n is the bucket's number of elements and W the number of ranks in its group. The tensors that
    ``OwnedSlice`` declares have n / W elements.
    """

    names: tuple[str, ...]
    """Names of the bucket's parameters."""
    group: dist.ProcessGroup
    """Ranks that share the bucket."""
    grads: Tensor
    """[n] in ``grad_dtype``: this rank's gradients, summed over the window."""
    weights: Tensor
    """[n] in compute precision: the model's weights."""
    main_grads: Tensor
    """FP32 [n / W]: this rank's slice of the gradients, summed over the group."""

    def gradient(self) -> Tensor:
        """``main_grads``."""
        return self.main_grads


class FlatSpace:
    """Moves parameters into flat buffers and makes backward add to them.

    :param parameters: parameters of one class: all are reduced over ``group``.
    :param initial: returns the value of each parameter.
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

        # Lay out the class, and allocate one buffer each for all weights and all gradients.
        sizes = {name: model.get_parameter(name).numel() for name in self._logical}
        cap = int(config.ddp.bucket_cap_mb * 2**20 / torch.float32.itemsize)
        layout = make_buckets(sizes, group.size(), cap)
        length = layout[-1].end
        dtype = getattr(torch, config.compute_dtype)
        self.weights = torch.zeros(length, dtype=dtype, device=device)
        """[total] in compute precision; each parameter is a view."""
        grad_dtype = getattr(torch, config.ddp.grad_dtype)
        self.grads = torch.zeros(length, dtype=grad_dtype, device=device)
        """[total] in ``grad_dtype``; each gradient is a view."""

        # Replace the model's parameters by views, bucket by bucket.
        self._attached: list[tuple[nn.Parameter, Tensor]] = []
        self.buckets = [self._fill(model, bucket, initial) for bucket in layout]

    def begin_window(self) -> None:
        """Zero the gradients, and re-attach them as ``.grad`` if other code replaced them."""
        # zero_grad(set_to_none=True), which is torch's default, removes the views.
        self.grads.zero_()
        for parameter, gradient in self._attached:
            parameter.grad = gradient

    def check_gradients(self) -> None:
        """Check that the ``.grad`` of all parameters is still the view of the flat buffer.

        :raises TrainingError: if a ``.grad`` was replaced inside the window, because the sum would
            lack the gradients that were added elsewhere.
        """
        if any(parameter.grad is not gradient for parameter, gradient in self._attached):
            raise TrainingError(
                "gradients were replaced inside a window: call begin_window before its first "
                "forward, and zero no gradients until the optimizer's step"
            )

    def _fill(self, model: nn.Module, bucket: Bucket, initial: InitialValue) -> FlatBucket:
        """Make a bucket's parameters views of the flat buffers, with their initial values."""
        # FP32 values of the whole bucket, on the CPU. Padding stays zero.
        values = torch.zeros(bucket.end - bucket.start, dtype=torch.float32)
        for span in bucket.spans:
            # A new parameter object: the old one is on the meta device.
            old = model.get_parameter(span.name)
            value = initial(self._logical[span.name])
            values[span.start - bucket.start : span.end - bucket.start] = value.flatten()
            view = slice(span.start, span.end)
            parameter = nn.Parameter(self.weights[view].view(old.shape))
            self._attach(parameter, self.grads[view].view(old.shape), self._logical[span.name])
            owner, _, name = span.name.rpartition(".")
            setattr(model.get_submodule(owner), name, parameter)
        # One copy per bucket rounds the values to compute precision.
        weights = self.weights[bucket.start : bucket.end]
        weights.copy_(values)

        # This rank's slice. In FP32 main weights and main gradients are views of the flat buffers;
        # in another type each needs a tensor of its own.
        rank, size = self.group.rank(), self.group.size()
        start, end = bucket.slice_of(rank, size)
        main, model_copy = self.weights[start:end], None
        if main.dtype != torch.float32:
            model_copy = main
            main = values[start - bucket.start : end - bucket.start].clone().to(weights.device)
        main_grads = self.grads[start:end]
        if main_grads.dtype != torch.float32:
            main_grads = torch.zeros_like(main)
        return FlatBucket(
            main=main,
            model_copy=model_copy,
            shards=tuple(self._shard(piece, start) for piece in pieces(bucket, rank, size)),
            names=tuple(span.name for span in bucket.spans),
            group=self.group,
            grads=self.grads[bucket.start : bucket.end],
            weights=weights,
            main_grads=main_grads,
        )

    def _attach(self, parameter: nn.Parameter, gradient: Tensor, logical: LogicalParameter) -> None:
        """Make backward add to a view of the flat gradients: see [Note: where gradients add up]."""
        # Routed experts are never compiled.
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

    def add_and_drop(param: Tensor) -> None:
        """Add the micro-batch's gradient to the flat gradients, and free it."""
        assert param.grad is not None
        accumulate_grad(gradient, param.grad, backend)
        param.grad = None

    parameter.register_post_accumulate_grad_hook(add_and_drop)
