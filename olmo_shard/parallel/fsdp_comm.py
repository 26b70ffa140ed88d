"""FSDP2's communication through this package's collectives, so that a comparison is fair.

- FSDP2 uses the reduce-scatter that ``ddp`` uses. Gloo's own moves twice the bytes.
- The bytes and waits of FSDP2 are counted in ``comm_stats``.
- Each block prefetches the next one explicitly.

One advantage of ``ddp`` remains on CPUs: FSDP2 reads the result of a reduce at once, so its reduce
cannot overlap the backward there.
"""

from collections.abc import Sequence
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from olmo_shard.distributed.collectives import all_gather_start, reduce_scatter_start
from olmo_shard.distributed.work import Work
from olmo_shard.nn.protocol import LanguageModel


class _FreshBuffers:
    """Buffers from torch's allocator, as in FSDP2's default collectives."""

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """An uninitialised buffer."""
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_FreshBuffers, AllGather):
    """The all-gather that FSDP2 calls, counted in ``comm_stats``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather into ``output_tensor``; with ``async_op``, return a work to wait for."""
        work = all_gather_start(output_tensor, input_tensor, group, kind="gather")
        if async_op:
            return _AwaitedByFSDP(work)
        _wait(work)
        return None


class CountedReduceScatter(_FreshBuffers, ReduceScatter):
    """The reduce-scatter that FSDP2 calls, counted in ``comm_stats``."""

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType | dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Sum over the ranks, and wait for this rank's part in ``output_tensor``."""
        assert op == dist.ReduceOp.SUM
        assert not async_op
        _wait(reduce_scatter_start(output_tensor, input_tensor, group, kind="reduce"))


class _AwaitedByFSDP(dist.Work):
    """A work of this package as the work type that FSDP2 waits for."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._ours = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the collective."""
        self._ours.wait()
        return True


def _wait(work: Work) -> None:
    """Wait for a collective, and time the wait on CPUs only.

    On CUDA, FSDP2 waits on a stream beside the computation, so the wait is no exposed time.
    """
    if work.device.type == "cuda":
        work.wait_untimed()
    else:
        work.wait()


def set_up(model: LanguageModel, device: torch.device) -> None:
    """Install the counted collectives and explicit prefetch in all FSDP units of a model.

    FSDP2's own prefetch follows the order in which units ran. Explicit prefetch is known before the
    first step.
    """
    for module in _fsdp_modules(model):
        module.set_custom_all_gather(CountedAllGather())
        module.set_custom_reduce_scatter(CountedReduceScatter())
    root = _fsdp_modules(model)[:1]
    if device.type == "cpu":  # CPUs have no streams: without this a prefetch would wait at once.
        root[0]._set_unshard_async_op(True)
    # The units of each block, the block's own first and its experts after it.
    blocks = [_fsdp_modules(block) for block in model.blocks]
    # Forward: the root's unit prefetches block 0, and block i prefetches block i + 1.
    for block, following in pairwise([root, *blocks]):
        # Experts do not prefetch: a recompute in backward runs their forward hooks again.
        block[0].set_modules_to_forward_prefetch(following)
    # Backward: the root's unit prefetches the last block, and block i + 1 prefetches block i.
    for block, following in pairwise([root, *reversed(blocks)]):
        # A block does not prefetch its own experts. FSDP2 prefetches at every output that gets a
        # gradient, and a block has several of these (its balancing losses), so it would gather
        # experts again whose backward has ended.
        for module in block:
            module.set_modules_to_backward_prefetch(following)


def _fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """The FSDP units of a module, outermost first."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
