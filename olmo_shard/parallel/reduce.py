"""Phase *reduce*: each bucket of gradients is summed over its group, once per window.

[Note: order of reduces] The buckets of all classes start in one order that is the same on every
rank. If each rank started the buckets that it has ready, the order would differ between ranks, and
with it the order of the collectives of a group.

In the window's last backward, hooks mark gradients as ready. A bucket starts when all its gradients
are ready and all buckets before it have started. Which gradients a rank computes depends on the
model and not on the data (experts without a token yield zeros), so usually all buckets start during
backward. ``finish`` starts the others: each bucket with a parameter that this rank did not use, and
the buckets after it.

Backward never waits for a bucket. If staging memory is full, the next gradient tries again. A
waiting backward could deadlock: a peer that has not started the bucket may itself wait for token
rows that only the rest of this backward sends.
"""

from collections import deque

import torch
from torch import nn

from olmo_shard.distributed.collectives import reduce_scatter_start
from olmo_shard.distributed.work import CommStream, Work
from olmo_shard.errors import TrainingError
from olmo_shard.parallel.flat_space import FlatBucket

STAGED_BUCKETS = 2
"""Largest number of buckets under way if each needs staging memory of its own size."""


class BucketReducer:
    """Sums buckets over their groups.

    :param model: model whose parameters are in the flat buffers.
    :param buckets: buckets of all classes, in the order in which backward fills them.
    :param overlap: whether buckets start during the last backward.
    :param wire_dtype: type in which gradients travel.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: list[FlatBucket],
        comm_stream: CommStream,
        *,
        overlap: bool,
        wire_dtype: torch.dtype,
    ) -> None:
        self.buckets, self.comm_stream = buckets, comm_stream
        self.overlap, self.wire_dtype = overlap, wire_dtype
        # On CUDA the order of the communication stream protects the staging memory: the host never
        # waits before a bucket reuses it.
        limit = STAGED_BUCKETS if overlap else 1
        self._limit = limit if comm_stream.stream is None else len(buckets)
        self._in_last_backward = False
        self._under_way: deque[Work] = deque()
        self._not_started: deque[FlatBucket] = deque()
        """Buckets still to start in this window, the next one first."""
        self._pending_params: dict[FlatBucket, set[str]] = {}
        """Parameters of each bucket to start whose gradients are not ready."""
        self.begin_window()
        if overlap:
            for bucket in buckets:
                for name in bucket.names:
                    self._install_hook(model.get_parameter(name), bucket, name)

    def begin_window(self) -> None:
        """Reset the readiness of all buckets for a new accumulation window."""
        if self._in_last_backward:
            # The last window was abandoned after its backward. How many of its buckets a rank has
            # started depends on timing, and all ranks must make the same collectives.
            self.finish()
        self._in_last_backward = False
        self._not_started = deque(self.buckets)
        self._pending_params = {bucket: set(bucket.names) for bucket in self.buckets}

    def begin_microbatch(self, *, last: bool) -> None:
        """Gradients of the coming backward are final if it is the window's last."""
        self._in_last_backward = last and self.overlap

    def finish(self) -> None:
        """Start the buckets that have not started, and wait for all."""
        # The same order as in backward. Waiting is safe here: this rank's backward has ended.
        while self._not_started:
            if len(self._under_way) == self._limit:
                self._under_way.popleft().wait()
            self._start_next()
        while self._under_way:
            self._under_way.popleft().wait()

    def _install_hook(self, parameter: nn.Parameter, bucket: FlatBucket, name: str) -> None:
        def mark_ready(_: nn.Parameter) -> None:
            """Note that a parameter's gradient is final, and start the buckets that can start."""
            # A bucket that has started is no longer in the mapping.
            if bucket not in self._pending_params:
                raise TrainingError(
                    f"a gradient of {name} came after its bucket was reduced: the window's last "
                    "backward must be the only one after begin_microbatch(last=True); or set "
                    "parallel.ddp.overlap_grad_reduce to false"
                )
            if self._in_last_backward:
                self._pending_params[bucket].discard(name)
                self._start_ready()

        parameter.register_post_accumulate_grad_hook(mark_ready)

    def _start_ready(self) -> None:
        """Start buckets in order until one is not ready or staging memory is full."""
        while self._not_started and not self._pending_params[self._not_started[0]]:
            if len(self._under_way) == self._limit:
                # Staging memory is full. Backward must not wait, so the next gradient tries again.
                if not self._under_way[0].is_ready():
                    return
                self._under_way.popleft().wait()
            self._start_next()

    def _start_next(self) -> None:
        bucket = self._not_started.popleft()
        del self._pending_params[bucket]

        def launch() -> Work:
            """Start the bucket's reduce-scatter."""
            return reduce_scatter_start(
                bucket.main_grads,
                bucket.grads,
                bucket.group,
                kind="reduce",
                wire_dtype=self.wire_dtype,
            )

        self._under_way.append(self.comm_stream.start(launch))
