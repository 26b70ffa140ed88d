"""Phase *gather*: the new weights of all ranks reach every model, during the next forward.

The optimizer updates slice by slice in the order of forward, and starts each slice's all-gather at
once. Before a module reads a parameter, a hook waits for the bucket that contains it; [Note:
readers] in ``nn/readers.py`` says which module reads which parameter.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn

from olmo_shard.distributed.collectives import all_gather_start
from olmo_shard.distributed.work import CommStream, Work
from olmo_shard.nn.readers import parameter_readers
from olmo_shard.parallel.flat_space import FlatBucket


class BucketGather:
    """Gathers buckets, and makes modules wait for the buckets that they read.

    :param buckets: in the order of forward.
    :param overlap: whether a gather runs during the next forward; without it ``start`` waits.
    """

    def __init__(
        self, model: nn.Module, buckets: list[FlatBucket], comm_stream: CommStream, *, overlap: bool
    ) -> None:
        self.buckets, self.comm_stream, self.overlap = buckets, comm_stream, overlap
        self._under_way: dict[FlatBucket, Work] = {}
        """Gathers that have been started and not been awaited."""
        bucket_of = {name: bucket for bucket in buckets for name in bucket.names}
        needed: dict[nn.Module, set[FlatBucket]] = {}
        for name, readers in parameter_readers(model).items():
            for reader in readers:
                needed.setdefault(reader, set()).add(bucket_of[name])
        for module, read_first in needed.items():
            self._await_before(module, [bucket for bucket in buckets if bucket in read_first])

    def start(self, bucket: FlatBucket) -> None:
        """Start to gather a bucket after the update of this rank's slice."""
        assert bucket not in self._under_way, "the previous gather of this bucket was never awaited"

        def launch() -> Work:
            """Start the bucket's all-gather."""
            return all_gather_start(
                bucket.weights, bucket.model_weights, bucket.group, kind="gather"
            )

        self._under_way[bucket] = self.comm_stream.start(launch)
        if not self.overlap:
            self._wait_for([bucket])

    def wait(self) -> None:
        """Wait for all buckets."""
        self._wait_for(list(self._under_way))

    def _wait_for(self, buckets: list[FlatBucket]) -> None:
        for bucket in buckets:
            work = self._under_way.pop(bucket, None)
            if work is not None:
                work.wait()

    def _await_before(self, module: nn.Module, buckets: list[FlatBucket]) -> None:
        """Wait for buckets before a module's forward, and before its other entry points."""
        module.register_forward_pre_hook(lambda *_: self._wait_for(buckets))
        # Hooks run around ``forward`` only. Only whole models have other entry points.
        for name in getattr(module, "entry_points", ()):
            setattr(module, name, self._after_wait(getattr(module, name), buckets))

    def _after_wait(
        self, method: Callable[..., Any], buckets: list[FlatBucket]
    ) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._wait_for(buckets)
            return method(*args, **kwargs)

        return run
