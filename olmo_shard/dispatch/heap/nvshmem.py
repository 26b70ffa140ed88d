"""A symmetric heap of the GPUs of one host or of many: NVSHMEM through nvshmem4py.

Shape letters: W ranks of the group.

[Note: NVSHMEM] A process can initialise NVSHMEM once: after it is finalised, NVSHMEM keeps its
connections to the same processes. So NVSHMEM is initialised over the ranks of the heap's group
alone, and a process creates at most one heap of this kind. The memory is then symmetric over the
group, and no other rank takes part in creating or closing it. PE numbers should equal the ranks of
the group. They are read and exchanged nevertheless, since they alone decide where a kernel sends
rows.

[Note: all or none] Allocating, freeing and finalising are collective in NVSHMEM and have no
timeout: a rank that calls them alone waits forever. So each rank first checks what it can check by
itself (packages, bitcode, versions, free memory on the GPU), and the ranks agree on the result
before any of them calls NVSHMEM. If NVSHMEM then fails on one rank only, memory is not freed piece
by piece, since another rank may have none. Finalising gives all of it back.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.dispatch.heap.nvshmem_library import (
    NvshmemLibrary,
    check_host_library,
    find_bitcode,
    installed_library,
    refusal,
)
from olmo_shard.dispatch.heap.nvshmem_modules import ModuleHook
from olmo_shard.dispatch.heap.symmetric_heap import GpuHeap
from olmo_shard.distributed.agree import on_every_rank, on_first_rank
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.host_memory import format_bytes
from olmo_shard.errors import HeapError

_ALIGNMENT = 128
"""Alignment in bytes of arena, flags and staging: one line of the GPU's cache."""
_FLAG_BYTES = 8
_OLDEST_CAPABILITY = (7, 0)
_NOT_INITIALIZED = 0
"""What ``nvshmemx_init_status`` returns in a process that has not used NVSHMEM yet."""


def unsupported(device: torch.device) -> str | None:
    """Why this rank cannot have such a heap; ``None`` if nothing is missing. Allocates nothing."""
    if device.type != "cuda":
        return f"NVSHMEM is for GPUs, this is a run on {device.type}"
    try:
        _installed_for(device)
    except HeapError as error:
        return str(error)
    return None


class NvshmemHeap(GpuHeap):
    """See :class:`GpuHeap` and [Note: NVSHMEM]. Creating it is collective over the group.

    :param group: the ranks. The group must outlive the heap.
    :param device: this rank's GPU.
    :param arena_bytes: bytes of the arena of each rank.
    :param num_flags: number of flags of each rank.
    :raises HeapError: on every rank, if one of them lacks a package, a GPU that NVSHMEM supports,
        or free memory, or has used NVSHMEM before.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, arena_bytes: int, num_flags: int
    ) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group, self._device = group, device
        self._nvshmem, self.bitcode = on_every_rank(group, lambda: _ready(device))
        # 1. What one rank can find missing by itself is already agreed on: see [Note: all or none].
        flags_at = _aligned(arena_bytes)
        flags_end = flags_at + num_flags * _FLAG_BYTES
        # 2. The collective part. If it fails, ``undo`` gives back what there is.
        with ExitStack() as undo:
            self._initialise(undo)
            pes = self._exchange_pes()
            memory = self._allocate(flags_end, undo)
            addresses = [self._address(memory, pe) for pe in pes]
            self.remote_ranks = tuple(rank for rank, at in enumerate(addresses) if not at)
            # Allocating is collective, so one remote pair gives every rank a staging buffer.
            any_remote = any(gather_objects(bool(self.remote_ranks), group))
            self.staging = self._allocate(arena_bytes, undo) if any_remote else None
            # 3. The tables of addresses that kernels read.
            self.pes = torch.tensor(pes, dtype=torch.int32, device=device)
            self.arena_ptrs = torch.tensor(addresses, dtype=torch.int64, device=device)
            flag_addresses = [at + flags_at if at else 0 for at in addresses]
            self.flag_ptrs = torch.tensor(flag_addresses, dtype=torch.int64, device=device)
            self.arena = memory[:arena_bytes]
            self.flags = memory[flags_at:flags_end].view(torch.int64)
            self._closing = undo.pop_all()

    def close(self) -> None:
        """Free the memory and finalise NVSHMEM; collective, while the process group exists.

        Calling it again does nothing.
        """
        if not hasattr(self, "arena"):
            return
        del self.arena, self.flags, self.arena_ptrs, self.flag_ptrs, self.staging, self.pes
        torch.cuda.synchronize(self._device)
        # A lost rank is an error here; NVSHMEM itself would wait for it forever.
        gather_objects(None, self._group)
        with _explained(self._nvshmem, "give its memory back"):
            self._nvshmem.bindings.barrier_all()  # completes the puts that are in flight (quiet)
            self._closing.close()

    def _initialise(self, undo: ExitStack) -> None:
        core, bindings = self._nvshmem.core, self._nvshmem.bindings
        uid = on_first_rank(self._group, lambda: _unique_id(self._nvshmem))

        def init() -> None:
            """Initialise NVSHMEM over the ranks of the group."""
            with _explained(self._nvshmem, "initialise"):
                gpu = self._nvshmem.gpu(self._device.index)
                gpu.set_current()
                core.init(
                    device=gpu,
                    uid=uid,
                    rank=self.rank,
                    nranks=self.size,
                    initializer_method="uid",
                )

        on_every_rank(self._group, init)
        # Callbacks run in reverse: modules are finalised before NVSHMEM is.
        undo.callback(core.finalize)
        hook = ModuleHook(bindings.cumodule_init, bindings.cumodule_finalize)
        undo.callback(hook.close)

    def _exchange_pes(self) -> list[int]:
        """The PE of each rank.

        :raises HeapError: on every rank, if NVSHMEM runs over other processes than the group.
        """
        core = self._nvshmem.core
        gathered = gather_objects((int(core.my_pe()), int(core.n_pes())), self._group)
        pes, num_pes = [pe for pe, _ in gathered], [number for _, number in gathered]
        if sorted(pes) != list(range(self.size)) or set(num_pes) != {self.size}:
            raise refusal(
                f"the {self.size} ranks of the group see PEs {pes} of {num_pes}: "
                "NVSHMEM was initialised over other processes"
            )
        return pes

    def _allocate(self, num_bytes: int, undo: ExitStack) -> Tensor:
        """uint8 [num_bytes] of symmetric memory, zeroed on every rank. See [Note: all or none]."""
        on_every_rank(self._group, lambda: _check_room(self._device, num_bytes))

        def allocate() -> Tensor:
            """Allocate symmetric memory and zero it."""
            with _explained(self._nvshmem, f"allocate {format_bytes(num_bytes)}"):
                memory = self._nvshmem.core.tensor((num_bytes,), dtype=torch.uint8)
                memory.zero_()
                torch.cuda.synchronize(self._device)
                return memory

        # The agreement is also a barrier: no rank puts before every rank's memory is zero.
        memory = on_every_rank(self._group, allocate)
        undo.callback(self._nvshmem.core.free_tensor, memory)
        assert memory.data_ptr() % _ALIGNMENT == 0
        return memory

    def _address(self, memory: Tensor, pe: int) -> int:
        """Address at which this process's kernels reach a PE's memory; 0 if they cannot."""
        # Not core.get_peer_tensor: it raises the same error for every cause, and for this rank's PE
        # it counts a reference that keeps the memory from being freed.
        return int(self._nvshmem.bindings.ptr(memory.data_ptr(), pe))


class _Nvshmem(NamedTuple):
    """The modules of nvshmem4py that are used here. They have no type stubs."""

    core: Any
    bindings: Any
    gpu: Any
    """``cuda.core.Device``."""


def _installed_for(device: torch.device) -> tuple[NvshmemLibrary, str]:
    """The installed NVSHMEM, and the path of its bitcode for a GPU."""
    library = installed_library(torch.version.cuda)
    capability = torch.cuda.get_device_capability(device)
    if capability < _OLDEST_CAPABILITY:
        oldest, own = (f"{major}.{minor}" for major, minor in (_OLDEST_CAPABILITY, capability))
        raise refusal(f"NVSHMEM needs compute capability {oldest}, {device} has {own}")
    return library, str(find_bitcode(library.folder, capability))


def _ready(device: torch.device) -> tuple[_Nvshmem, str]:
    """NVSHMEM, loaded and not yet initialised, and the path of its bitcode."""
    library, bitcode = _installed_for(device)
    try:
        nvshmem = _Nvshmem(
            import_module("nvshmem.core"),
            import_module("nvshmem.bindings"),
            import_module("cuda.core").Device,
        )
    except ImportError as error:
        raise refusal(f"nvshmem4py cannot be imported: {error}") from error
    with _explained(nvshmem, "load its host library"):
        loaded = nvshmem.core.get_version().libnvshmem_version
        status = int(nvshmem.bindings.init_status())
    check_host_library(library, loaded)
    if status != _NOT_INITIALIZED:
        raise refusal(
            "NVSHMEM was initialised in this process before, which it can be only once: by another "
            "heap, or by another library"
        )
    return nvshmem, bitcode


def _unique_id(nvshmem: _Nvshmem) -> Any:
    with _explained(nvshmem, "make a unique id"):
        return nvshmem.core.get_unique_id()


def _check_room(device: torch.device, num_bytes: int) -> None:
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes > free:
        raise refusal(
            f"NVSHMEM needs {format_bytes(num_bytes)} on {device}, {format_bytes(free)} are free: "
            "lower train.micro_batch_tokens, or set parallel.capacity_factor"
        )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@contextmanager
def _explained(nvshmem: _Nvshmem, what: str) -> Iterator[None]:
    """Raise errors of nvshmem4py, its bindings, the loader and CUDA as HeapError."""
    core, bindings = nvshmem.core, nvshmem.bindings
    try:
        yield
    except (
        core.NvshmemError,
        core.NvshmemInvalid,
        bindings.NVSHMEMError,
        RuntimeError,
    ) as error:
        raise refusal(f"NVSHMEM cannot {what}: {error}") from error
