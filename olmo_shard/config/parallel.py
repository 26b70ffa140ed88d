"""Section ``parallel``: how the model is spread over the ranks."""

from typing import Literal

from pydantic import Field, model_validator

from olmo_shard.config.base import Section


class DDPConfig(Section):
    bucket_cap_mb: float = Field(default=32.0, gt=0)
    """Size of a gradient bucket in MiB of FP32; a larger parameter is a bucket of its own."""
    overlap_grad_reduce: bool = True
    """Reduce each bucket in the window's last backward as soon as it is full; false: after it."""
    overlap_param_gather: bool = True
    """Gather each bucket's new weights during the next forward; false: before it."""
    grad_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which a window's gradients add up on a rank; the sum over ranks is FP32 always."""
    wire_dtype: Literal["float32", "bfloat16"] | None = None
    """Type in which gradients travel between ranks; null: that of grad_dtype."""

    @model_validator(mode="after")
    def _wire_is_not_wider(self) -> "DDPConfig":
        if self.grad_dtype == "bfloat16" and self.wire_dtype == "float32":
            raise ValueError(
                "wire_dtype = float32 would send the zeros that grad_dtype = bfloat16 lacks; "
                "leave wire_dtype out, or use grad_dtype float32"
            )
        return self


class FSDPConfig(Section):
    reshard: Literal["forward", "window"] = "forward"
    """``forward`` frees gathered weights after each forward and reduces every micro-batch;
    ``window`` keeps weights and FP32 gradients whole on each rank and reduces once per window.
    """


class ParallelConfig(Section):
    mode: Literal["ddp", "fsdp"] = "ddp"
    """Distributed optimizer over whole dense weights, or FSDP2."""
    expert_parallel: int = Field(default=1, gt=0)
    """Ranks over which the experts of a layer are spread."""
    dispatch: Literal["auto", "local", "collective", "rowwise"] = "auto"
    """How rows reach their experts: ``rowwise`` writes them into their ranks' memory (CPUs of one
    host; GPUs that reach each other), ``collective`` sends them by all-to-all. ``auto``: ``local``
    on one rank, else ``rowwise`` where it can run, else ``collective``; the log says which.
    """
    symmetric_heap: Literal["auto", "nvshmem", "torch"] = "auto"
    """Whose memory ``rowwise`` uses on GPUs: NVSHMEM's (any number of nodes), or PyTorch's (one
    host). ``auto``: NVSHMEM where it is installed, else PyTorch's; the log says which.
    """
    capacity_factor: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """An expert takes at most this many times its even share of the labelled tokens of a rank's
    micro-batch; of more, the routes with the lowest weights are dropped, tokens without a label
    first. Null drops none.
    """
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights and activations in forward and backward; main weights stay FP32."""
    kernels: Literal["auto", "triton", "reference"] = "auto"
    """What computes routed experts and the optimizer's step: ``triton`` kernels (GPUs), or the
    plain-torch ``reference``. ``auto``: triton on CUDA, reference on CPUs.
    """
    compile: bool = False
    """torch.compile attention and dense feed-forwards (router and routed experts stay eager)."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """Recompute every block in backward."""
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
