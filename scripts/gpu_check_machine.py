"""The part "machine" of the GPU check: the device, its memory, and whether a kernel runs on it.

The note of a row that fails says what mends it. ``gpu_check_preflight.py`` looks for packages and
programs before this part starts.
"""

import os
from collections.abc import Iterator

import torch
from gpu_check_preflight import requirement
from gpu_check_report import Setup
from gpu_check_row import DEVICE, Check, Row
from torch.distributed import _symmetric_memory as symmetric_memory

from olmo_shard.dispatch.heap import nvshmem
from olmo_shard.kernels.language import tl, triton

CAPABILITY = (8, 0)
"""The lowest compute capability that the kernels are compiled for."""
MEMORY_BYTES = 60e9
"""Free memory that suffices for every part at full sizes."""
KERNEL_MENDING = "mend the rows above first; rm -r ~/.triton/cache removes what Triton kept"


def checks(setup: Setup) -> Iterator[Check]:
    here = not setup.tiny and torch.cuda.is_available()
    yield Check(DEVICE, lambda: [check_device(setup.device)])
    for name, look in {
        "compute capability": check_capability,
        "free memory": check_memory,
        "symmetric memory": check_symmetric_memory,
        "NVSHMEM": check_nvshmem,
    }.items():
        if here:
            yield Check(name, lambda name=name, look=look: [look(name, setup.device)])
        elif setup.tiny:
            yield Check(name, lambda name=name: [Row(name, "skipped", note="needs a GPU")])
    if here or setup.tiny:
        yield Check("one-line kernel", lambda: [check_kernel(setup)], KERNEL_MENDING)


def check_device(device: torch.device) -> Row:
    if device.type == "cpu":
        return Row(DEVICE, "skipped", note="needs a GPU")
    if torch.version.cuda is None:
        install = f"pip install --force-reinstall '{requirement('torch')}'"
        problem = f"torch {torch.__version__} is built without CUDA"
        return Row(DEVICE, "failed", note=f"{problem}: {install}")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" with CUDA_VISIBLE_DEVICES = {visible!r}; unset it"
        note = f"torch finds no device{hidden}: nvidia-smi says which devices the driver has"
        return Row(DEVICE, "failed", note=note)
    note = f"{torch.cuda.get_device_name(device)}; torch is built for CUDA {torch.version.cuda}"
    return Row(DEVICE, "passed", note=note)


def check_capability(name: str, device: torch.device) -> Row:
    found = torch.cuda.get_device_capability(device)
    said, target = (f"{major}.{minor}" for major, minor in (found, CAPABILITY))
    if found < CAPABILITY:
        note = f"{said}: the kernels are for an A100, H100, H200 or B200"
        return Row(name, "failed", target=f">= {target}", note=note)
    return Row(name, "passed", target=f">= {target}", note=said)


def check_memory(name: str, device: torch.device) -> Row:
    free, total = torch.cuda.mem_get_info(device)
    target, note = f">= {MEMORY_BYTES / 1e9:.0f}", f"of {total / 1e9:.0f} GB"
    if free >= MEMORY_BYTES:
        return Row(name, "passed", free / 1e9, "GB", target=target, note=note)
    note += "; nvidia-smi names the processes that hold memory: end them, or take a larger GPU"
    return Row(name, "failed", free / 1e9, "GB", target=target, note=note)


def check_symmetric_memory(name: str, device: torch.device) -> Row:
    """Look at the back end. Part e skips the rows that need another one: no failure."""
    backend = symmetric_memory.get_backend(device)
    if backend != "CUDA":
        note = f"the back end is {backend}, the heap needs CUDA: unset TORCH_SYMMMEM"
        return Row(name, "skipped", note=note)
    return Row(name, "passed", note="the back end is CUDA")


def check_nvshmem(name: str, device: torch.device) -> Row:
    """Look for NVSHMEM's packages. Part e skips the rows that need them: no failure."""
    problem = nvshmem.unsupported(device)
    if problem is not None:
        return Row(name, "skipped", note=problem)
    return Row(name, "passed", note="host library, bitcode for this GPU and bindings are installed")


@triton.jit
def _add_one_kernel(x_ptr):
    tl.store(x_ptr + tl.arange(0, 16), tl.load(x_ptr + tl.arange(0, 16)) + 1)


def check_kernel(setup: Setup) -> Row:
    """Compile a kernel, its launcher and Triton's module for the driver; launch the kernel."""
    x = torch.arange(16, device=setup.device)
    _add_one_kernel[(1,)](x)
    if x.tolist() != list(range(1, 17)):
        return Row("one-line kernel", "failed", note=f"0 .. 15 plus 1 gave {x.tolist()}")
    how = "interpreted" if setup.tiny else "compiled and launched"
    return Row("one-line kernel", "passed", note=how)
