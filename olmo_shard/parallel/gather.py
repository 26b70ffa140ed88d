"""Phase *gather*: every rank's new weights reach every model, during the next forward.

The optimizer updates slice by slice in the order of forward, and each slice's all-gather starts at
once. Before a module reads a parameter, a forward pre-hook waits for the bucket that holds it.
"""

from typing import Any

from torch import nn

from olmo_shard.distributed.collectives import all_gather_start
from olmo_shard.distributed.work import CommStream, Work
from olmo_shard.nn.feed_forward import FeedForward
from olmo_shard.nn.router import Router
from olmo_shard.nn.transformer import Block, Transformer
from olmo_shard.parallel.flat_space import FlatBucket


class BucketGather:
    """Gathers buckets, and makes modules wait for theirs.

    :param buckets: in the order of forward.
    :param overlap: let forward wait where it must; else ``start`` waits.
    """

    def __init__(
        self, model: nn.Module, buckets: list[FlatBucket], comm_stream: CommStream, *, overlap: bool
    ) -> None:
        self.buckets, self.comm_stream, self.overlap = buckets, comm_stream, overlap
        self._under_way: dict[FlatBucket, Work] = {}
        bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
        needed: dict[nn.Module, set[FlatBucket]] = {}
        for name, module in first_readers(model).items():
            needed.setdefault(module, set()).add(bucket_of[name])
        for module, read_first in needed.items():
            self._await_before(module, [bucket for bucket in buckets if bucket in read_first])

    def start(self, bucket: FlatBucket) -> None:
        """Start to gather a bucket after the update of this rank's slice."""
        assert bucket not in self._under_way, "the last gather of this bucket was not awaited"

        def launch() -> Work:
            """Start the bucket's all-gather."""
            return all_gather_start(
                bucket.weights, bucket.model_weights, bucket.group, kind="gather"
            )

        self._under_way[bucket] = self.comm_stream.start(launch)
        if not self.overlap:
            self._wait_for(bucket)

    def wait(self) -> None:
        """Wait for all buckets."""
        for bucket in list(self._under_way):
            self._wait_for(bucket)

    def _wait_for(self, bucket: FlatBucket) -> None:
        work = self._under_way.pop(bucket, None)
        if work is not None:
            work.wait()

    def _await_before(self, module: nn.Module, buckets: list[FlatBucket]) -> None:
        def wait(_: nn.Module, __: Any) -> None:
            for bucket in buckets:
                self._wait_for(bucket)

        module.register_forward_pre_hook(wait)


def first_readers(model: nn.Module) -> dict[str, nn.Module]:
    """For each parameter the module before whose forward it must be there.

    As a rule that is the module that owns it. Others read it for the owner: a router its gate, the
    transformer its head (after the last norm), and what may be compiled as one graph (the attention
    half of a block, a dense feed-forward) has no hooks inside.
    """
    readers: dict[str, nn.Module] = {}
    # Parents come first, so the outermost reader stays.
    for prefix, module in model.named_modules():
        for name, _ in module.named_parameters(recurse=isinstance(module, FeedForward | Router)):
            readers.setdefault(f"{prefix}.{name}" if prefix else name, module)
        if isinstance(module, Block):
            for part in ("attention", "attention_norm"):
                for name, _ in module.get_submodule(part).named_parameters():
                    readers[f"{prefix}.{part}.{name}"] = module
        if isinstance(module, Transformer) and module.lm_head is not None:
            readers[f"{prefix}.lm_head.weight" if prefix else "lm_head.weight"] = module.norm
    return readers
