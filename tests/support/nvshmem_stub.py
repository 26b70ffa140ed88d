"""A stub of nvshmem4py, of cuda.core and of what torch says of a GPU, with memory on the CPU.

It keeps the order in which it is called, and what is allocated; it does not talk to other ranks.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from olmo_shard.dispatch.heap import nvshmem, nvshmem_library
from olmo_shard.distributed import collectives

gather_objects = collectives.gather_objects
BOTH = ("nvidia-nvshmem", "nvshmem4py")
"""The packages, but for the version of CUDA behind their names."""


class NvshmemError(Exception):
    pass


class NvshmemInvalid(Exception):  # noqa: N818  (nvshmem4py's name)
    pass


class BindingsError(Exception):
    pass


class Memory(torch.Tensor):
    """Logs when it is zeroed; what is sliced from it is a plain tensor."""

    steps: list[str]

    def zero_(self) -> torch.Tensor:
        self.steps.append("zero")
        return super().zero_()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Nvshmem:
    """Stands for nvshmem4py and cuda.core in one process, and for the GPU.

    :param pes: PE of each rank.
    :param reachable: ranks whose memory this one can store into.
    """

    version = "3.4.5"
    status = 0
    capability: tuple[int, int] = (9, 0)
    free = 2**30
    num_pes: int | None = None

    def __init__(self, rank: int, pes: list[int], reachable: set[int]) -> None:
        self.rank, self.pes, self.reachable = rank, pes, reachable
        self.log: list[str] = []
        self.allocated: list[torch.Tensor] = []
        self.failing: str | None = None
        self.init_arguments: dict[str, Any] = {}

    def step(self, name: str) -> None:
        self.log.append(name)
        if name == self.failing:
            raise NvshmemError(f"{name} went wrong")

    def init(self, **arguments: Any) -> None:
        self.step("init")
        self.init_arguments = arguments

    def tensor(self, shape: tuple[int], dtype: torch.dtype) -> torch.Tensor:
        self.step("tensor")
        room = torch.full((shape[0] + 128,), 255, dtype=dtype)
        start = -room.data_ptr() % 128
        memory = room[start : start + shape[0]].as_subclass(Memory)
        memory.steps = self.log
        self.allocated.append(memory)
        return memory

    def free_tensor(self, memory: torch.Tensor) -> None:
        self.step(f"free {memory.numel()}")
        self.allocated = [each for each in self.allocated if each is not memory]

    def finalize(self) -> None:
        self.step("finalize")
        self.allocated = []

    def ptr(self, address: int, pe: int) -> int:
        """Made up, but for the own: a PE's memory is 1 TiB times (1 + PE) above it."""
        self.step(f"ptr {pe}")
        rank = self.pes.index(pe)
        if rank == self.rank:
            return address
        return address + (pe + 1) * 2**40 if rank in self.reachable else 0

    def gather(self, value: Any, group: dist.ProcessGroup) -> list[Any]:
        self.log.append("agree")
        return gather_objects(value, group)

    def get_version(self) -> SimpleNamespace:
        self.step("version")
        return SimpleNamespace(libnvshmem_version=self.version)

    def get_unique_id(self) -> str:
        self.step("unique id")
        return "the id"

    def modules(self) -> dict[str, ModuleType]:
        core = module("nvshmem.core", NvshmemError=NvshmemError, NvshmemInvalid=NvshmemInvalid)
        for name in ("init", "tensor", "free_tensor", "finalize", "get_version", "get_unique_id"):
            setattr(core, name, getattr(self, name))
        core.my_pe = lambda: self.pes[self.rank]
        core.n_pes = lambda: self.num_pes or len(self.pes)
        bindings = module(
            "nvshmem.bindings",
            NVSHMEMError=BindingsError,
            ptr=self.ptr,
            barrier_all=lambda: self.step("barrier_all"),
            init_status=lambda: self.status,
            cumodule_init=lambda handle: 0,
            cumodule_finalize=lambda handle: 0,
        )
        gpu = SimpleNamespace(set_current=lambda: self.step("current"))
        cuda = module("cuda.core", Device=lambda index: self.log.append(f"gpu {index}") or gpu)
        return {each.__name__: each for each in (core, bindings, cuda)}


def module(name: str, **members: Any) -> Any:
    made = ModuleType(name)
    vars(made).update(members)
    return made


class Hook:
    """In place of the hook for modules, which has tests of its own."""

    log: list[str]

    def __init__(self, init: Callable[[int], int], finalize: Callable[[int], int]) -> None:
        assert init is sys.modules["nvshmem.bindings"].cumodule_init  # type: ignore[attr-defined]
        assert finalize is sys.modules["nvshmem.bindings"].cumodule_finalize  # type: ignore[attr-defined]
        self.log.append("hook")

    def close(self) -> None:
        self.log.append("unhook")


@contextmanager
def installed(stub: Nvshmem, packages: tuple[str, ...] = BOTH) -> Iterator[Path]:
    """A process on a GPU, with the stub for NVSHMEM 3.4.5.

    :returns: the folder of its libraries.
    """
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        site = Path(folder)
        library = site / "nvidia" / "nvshmem" / "lib"
        library.mkdir(parents=True)
        (library / "libnvshmem_host.so.3").touch()
        (library / "libnvshmem_device.bc").touch()
        for package in packages:
            info = site / f"{package.replace('-', '_')}_cu13-3.4.5.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Name: {package}-cu13\nVersion: 3.4.5\n")

        def distribution(name: str) -> metadata.Distribution:
            for found in metadata.distributions(name=name, path=[folder]):
                return found
            raise metadata.PackageNotFoundError(name)

        def synchronize(device: torch.device) -> None:
            stub.step("synchronize")

        patch.setattr(nvshmem_library, "distribution", distribution)
        for name, made in stub.modules().items():
            patch.setitem(sys.modules, name, made)
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "get_device_capability", lambda device: stub.capability)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (stub.free, 2**40))
        patch.setattr(torch.cuda, "synchronize", synchronize)
        patch.setattr(collectives, "gather_objects", stub.gather)
        patch.setattr(nvshmem, "gather_objects", stub.gather)
        patch.setattr(nvshmem, "ModuleHook", type("LoggedHook", (Hook,), {"log": stub.log}))
        yield library
