"""Phase *reduce*: each bucket of gradients is summed over its group, once per window.

[Note: order of reduces] Buckets of all classes start in one order, the same on every rank: an
order that followed from what each rank has ready would differ between ranks, and with it the order
of the collectives of a group. In the window's last backward, hooks mark gradients as ready, and a
bucket starts when it is full and all before it have started. Which gradients a rank has depends on
the model alone, never on data (experts without a token yield zeros), so as a rule all buckets start
in backward. ``finish`` starts what is left: buckets with a parameter that this rank did not use,
and those after them.

Backward never waits for a bucket. Where staging is full the next gradient tries again: a peer that
has not started its bucket may itself wait for rows that only the rest of this backward will send.
"""

from collections import deque

import torch
from torch import nn

from olmo_shard.distributed.collectives import reduce_scatter_start
from olmo_shard.distributed.work import CommStream, Work
from olmo_shard.errors import TrainingError
from olmo_shard.parallel.flat_space import FlatBucket

STAGED_BUCKETS = 2
"""Buckets under way at once where each needs staging memory as large as itself."""


class BucketReducer:
    """Sums buckets over their groups.

    :param model: with its parameters in the flat buffers.
    :param buckets: of all classes, in the order in which backward fills them.
    :param overlap: start buckets in the last backward.
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
        self._pending_params: list[set[str]] = []
        self.begin_window()
        if overlap:
            for index, bucket in enumerate(buckets):
                for name in bucket.names:
                    self._install_hook(model.get_parameter(name), index, name)

    def begin_window(self) -> None:
        """Nothing is ready."""
        if self._in_last_backward:
            # A window that was given up after its backward: how many of its buckets a rank has
            # started is a matter of timing, and all ranks must have made the same exchanges.
            self.finish()
        self._in_last_backward = False
        self._pending_params = [set(bucket.names) for bucket in self.buckets]
        self._started = 0

    def begin_microbatch(self, *, last: bool) -> None:
        """What the coming backward makes ready is final if it is the window's last."""
        self._in_last_backward = last and self.overlap

    def finish(self) -> None:
        """Start what has not been started, and wait for all."""
        while self._started < len(self.buckets):
            if len(self._under_way) == self._limit:
                self._under_way.popleft().wait()
            self._start_next()
        while self._under_way:
            self._under_way.popleft().wait()

    def _install_hook(self, parameter: nn.Parameter, index: int, name: str) -> None:
        def mark_ready(_: nn.Parameter) -> None:
            if self._started > index:
                raise TrainingError(
                    f"a gradient of {name} came after its bucket was reduced: the window's last "
                    "backward must be the only one after begin_microbatch(last=True); or set "
                    "parallel.ddp.overlap_grad_reduce to false"
                )
            if self._in_last_backward:
                self._pending_params[index].discard(name)
                self._start_full()

        parameter.register_post_accumulate_grad_hook(mark_ready)

    def _start_full(self) -> None:
        while self._started < len(self.buckets) and not self._pending_params[self._started]:
            if len(self._under_way) == self._limit:
                if not self._under_way[0].is_ready():
                    return
                self._under_way.popleft().wait()
            self._start_next()

    def _start_next(self) -> None:
        bucket = self.buckets[self._started]
        self._started += 1

        def launch() -> Work:
            return reduce_scatter_start(
                bucket.main_grads,
                bucket.grads,
                bucket.group,
                kind="reduce",
                wire_dtype=self.wire_dtype,
            )

        self._under_way.append(self.comm_stream.start(launch))
