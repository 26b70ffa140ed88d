"""FSDP2's communication through our collectives, and its prefetch, so that a comparison is fair.

It gets the same reduce-scatter (gloo's own moves twice the bytes), its bytes are counted, and each
block fetches the next one explicitly. What it cannot have on a CPU is an asynchronous reduce:
FSDP2 reads the result at once.
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
from olmo_shard.nn.transformer import Block


class _FreshBuffers:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_FreshBuffers, AllGather):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        work = all_gather_start(output_tensor, input_tensor, group, kind="gather")
        if async_op:
            return _AwaitedByFSDP(work)
        _wait(work)
        return None


class CountedReduceScatter(_FreshBuffers, ReduceScatter):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType | dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        assert op == dist.ReduceOp.SUM
        assert not async_op
        _wait(reduce_scatter_start(output_tensor, input_tensor, group, kind="reduce"))


class _AwaitedByFSDP(dist.Work):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self._ours = work

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._ours.wait()
        return True


def _wait(work: Work) -> None:
    """On CUDA, FSDP2 waits on a stream beside the computation: that is not exposed time."""
    if work.device.type == "cuda":
        work.wait_untimed()
    else:
        work.wait()


def set_up(model: nn.Module, device: torch.device) -> None:
    """Give all FSDP modules of a model our collectives and explicit prefetch."""
    for module in _fsdp_modules(model):
        module.set_custom_all_gather(CountedAllGather())
        module.set_custom_reduce_scatter(CountedReduceScatter())
    root = _fsdp_modules(model)[:1]
    if device.type == "cpu":  # no streams there: without this a prefetch would wait at once
        root[0]._set_unshard_async_op(True)
    blocks = [_fsdp_modules(module) for module in model.modules() if isinstance(module, Block)]
    for block, following in pairwise([root, *blocks]):
        # Not for the experts inside: a recompute in backward runs their forward hooks again.
        block[0].set_modules_to_forward_prefetch(following)
    for block, following in pairwise([root, *reversed(blocks)]):
        # Never a block's own experts: FSDP2 prefetches at every output that gets a gradient, a
        # block has several (its balancing losses), and experts that are done would come again.
        for module in block:
            module.set_modules_to_backward_prefetch(following)


def _fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Itself and those inside, outermost first."""
    return [each for each in module.modules() if isinstance(each, FSDPModule)]
