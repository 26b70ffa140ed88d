"""Section ``parallel``: how weights, gradients and experts are distributed over the ranks."""

from typing import Literal

from pydantic import Field, model_validator

from olmo_shard.config.section import Section


class DDPConfig(Section):
    """Options of ``parallel.mode: ddp``."""

    bucket_cap_mb: float = Field(default=32.0, gt=0)
    """Size of a gradient bucket, in MiB of FP32. A larger parameter is a bucket by itself."""
    overlap_grad_reduce: bool = True
    """If true, each bucket is reduced during the window's last backward, as soon as its gradients
    are complete. If false, all buckets are reduced after that backward.
    """
    overlap_param_gather: bool = True
    """If true, each bucket's new weights are gathered during the next forward. If false, all
    buckets are gathered before it.
    """
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which a rank accumulates the gradients of a window. The sum over ranks is computed in
    FP32 in either case.
    """
    wire_dtype: Literal["float32", "bfloat16"] | None = None
    """Type in which gradients are sent between ranks. Null means the same as grad_dtype."""

    @model_validator(mode="after")
    def _wire_is_not_wider(self) -> "DDPConfig":
        if self.grad_dtype == "bfloat16" and self.wire_dtype == "float32":
            raise ValueError(
                "wire_dtype = float32 would send twice the bytes of grad_dtype = bfloat16 without "
                "more precision; leave wire_dtype out, or use grad_dtype float32"
            )
        return self


class FSDPConfig(Section):
    """Options of ``parallel.mode: fsdp``."""

    reshard: Literal["forward", "window"] = "forward"
    """``forward`` frees the gathered weights after each forward and reduces gradients in every
    micro-batch. ``window`` keeps whole weights and whole FP32 gradients on each rank until the end
    of the accumulation window, and reduces once per window.
    """


class ParallelConfig(Section):
    """Data parallelism, expert parallelism, precision, and the implementation of kernels."""

    mode: Literal["ddp", "fsdp"] = "ddp"
    """``ddp``: dense weights are whole on each rank, main weights and optimizer state are sharded
    (a distributed optimizer, or ZeRO-1/2). ``fsdp``: PyTorch's FSDP2 shards the weights as well.
    """
    expert_parallel: int = Field(default=1, gt=0)
    """Number of ranks over which the routed experts of a layer are distributed."""
    dispatch: Literal["auto", "local", "collective", "rowwise"] = "auto"
    """Transport of token rows between ranks. ``local``: no transport, for one rank per group.
    ``collective``: all-to-all. ``rowwise``: each row is written directly into the memory of the
    destination rank, on CPUs of one host or on GPUs with peer access. ``auto``: ``local`` if
    expert_parallel is 1, else ``rowwise`` if it can run, else ``collective``. The log names the
    choice.
    """
    symmetric_heap: Literal["auto", "nvshmem", "torch"] = "auto"
    """Memory of ``rowwise`` on GPUs. ``nvshmem``: NVSHMEM's heap, on any number of nodes.
    ``torch``: PyTorch's symmetric memory, on one host. ``auto``: NVSHMEM if it is installed, else
    PyTorch's. The log names the choice.
    """
    capacity_factor: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Limit on the tokens that an expert takes from one rank's micro-batch, as a multiple of its
    even share of the labelled tokens. Routes beyond the limit are dropped: tokens without a label
    first, then the routes with the lowest weights. Null drops no route.
    """
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations in forward and backward. Main weights are FP32 always."""
    kernels: Literal["auto", "triton", "reference"] = "auto"
    """Implementation of the routed experts and of the optimizer's update. ``triton``: Triton
    kernels, on GPUs. ``reference``: plain PyTorch. ``auto``: ``triton`` on CUDA devices, else
    ``reference``.
    """
    compile: bool = False
    """If true, torch.compile compiles attention and the dense feed-forward layers. Routers and
    routed experts stay eager.
    """
    activation_checkpointing: Literal["none", "full"] = "none"
    """``full`` recomputes every block in backward, instead of storing its activations."""
    ddp: DDPConfig = DDPConfig()
    fsdp: FSDPConfig = FSDPConfig()

    @model_validator(mode="after")
    def _heap_is_for_rowwise(self) -> "ParallelConfig":
        if self.symmetric_heap != "auto" and self.dispatch in ("local", "collective"):
            raise ValueError(
                f"symmetric_heap = {self.symmetric_heap} is memory for dispatch rowwise, but "
                f"dispatch = {self.dispatch}; leave symmetric_heap out, or use dispatch auto or "
                "rowwise"
            )
        return self

    @model_validator(mode="after")
    def _local_needs_one_rank(self) -> "ParallelConfig":
        if self.dispatch == "local" and self.expert_parallel > 1:
            raise ValueError(
                f"dispatch = local keeps rows on their rank, but expert_parallel = "
                f"{self.expert_parallel}; use dispatch auto, rowwise or collective, or "
                "expert_parallel 1"
            )
        return self
