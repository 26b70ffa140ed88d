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
        self._under_way: dict[int, Work] = {}
        """Gathers that have been started and not been awaited, by the index of their bucket."""
        bucket_of = {name: i for i, bucket in enumerate(buckets) for name in bucket.names}
        needed: dict[nn.Module, set[int]] = {}
        for name, readers in parameter_readers(model).items():
            for reader in readers:
                needed.setdefault(reader, set()).add(bucket_of[name])
        for module, indices in needed.items():
            self._await_before(module, sorted(indices))

    def start(self, index: int) -> None:
        """Start to gather a bucket. This rank's slice of the bucket must be up to date."""
        assert index not in self._under_way, "the previous gather of this bucket was never awaited"
        bucket = self.buckets[index]

        def launch() -> Work:
            return all_gather_start(bucket.weights, bucket.owned.model, bucket.group, kind="gather")

        self._under_way[index] = self.comm_stream.start(launch)
        if not self.overlap:
            self._wait_for([index])

    def wait(self) -> None:
        """Wait for all buckets."""
        self._wait_for(list(self._under_way))

    def _wait_for(self, indices: list[int]) -> None:
        for index in indices:
            work = self._under_way.pop(index, None)
            if work is not None:
                work.wait()

    def _await_before(self, module: nn.Module, indices: list[int]) -> None:
        """Wait for buckets before a module's forward, and before its other entry points."""
        module.register_forward_pre_hook(lambda *_: self._wait_for(indices))
        # Hooks run around ``forward`` only. Only whole models have other entry points.
        for name in getattr(module, "entry_points", ()):
            setattr(module, name, self._after_wait(getattr(module, name), indices))

    def _after_wait(self, method: Callable[..., Any], indices: list[int]) -> Callable[..., Any]:
        @wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._wait_for(indices)
            return method(*args, **kwargs)

        return run
