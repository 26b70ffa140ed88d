"""Part "machine" of the GPU check: the device, its memory, and whether a kernel runs on it.

The note of a failed row tells the user what to do. ``preflight.py`` looks for packages and programs
before this part starts.
"""

import os
from collections.abc import Iterator

import torch
from torch.distributed import _symmetric_memory as symmetric_memory

from olmo_shard.dispatch.heap import nvshmem
from olmo_shard.kernels.language import tl, triton
from scripts.gpu_check.compare import Setup
from scripts.gpu_check.preflight import requirement
from scripts.gpu_check.row import DEVICE, Check, Row

CAPABILITY = (8, 0)
"""Lowest compute capability that the kernels support."""
MEMORY_BYTES = 60e9
"""Free memory in bytes that suffices for every part."""
KERNEL_MENDING = "mend the failed rows above; rm -r ~/.triton/cache removes compiled kernels"


def checks(setup: Setup) -> Iterator[Check]:
    """The checks of the machine; without a device only the first."""
    has_device = not setup.tiny and torch.cuda.is_available()
    yield Check(DEVICE, lambda: [check_device(setup.device)])
    for name, look in {
        "compute capability": check_capability,
        "free memory": check_memory,
        "symmetric memory": check_symmetric_memory,
        "NVSHMEM": check_nvshmem,
    }.items():
        if has_device:
            yield Check(name, lambda name=name, look=look: [look(name, setup.device)])
        elif setup.tiny:
            yield Check(name, lambda name=name: [Row(name, "skipped", note="needs a GPU")])
    if has_device or setup.tiny:
        yield Check("one-line kernel", lambda: [check_kernel(setup)], KERNEL_MENDING)


def check_device(device: torch.device) -> Row:
    """Test whether torch is built for CUDA and finds the device."""
    if device.type == "cpu":
        return Row(DEVICE, "skipped", note="needs a GPU")
    if torch.version.cuda is None:
        install = f"pip install --force-reinstall '{requirement('torch')}'"
        problem = f"torch {torch.__version__} is built without CUDA"
        return Row(DEVICE, "failed", note=f"{problem}: {install}")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "" if visible is None else f" with CUDA_VISIBLE_DEVICES = {visible!r}; unset it"
        note = f"torch finds no device{hidden}: nvidia-smi lists the devices of the driver"
        return Row(DEVICE, "failed", note=note)
    note = f"{torch.cuda.get_device_name(device)}; torch is built for CUDA {torch.version.cuda}"
    return Row(DEVICE, "passed", note=note)


def check_capability(name: str, device: torch.device) -> Row:
    """Compare the compute capability with the lowest supported one."""
    capability = torch.cuda.get_device_capability(device)
    measured, target = (f"{major}.{minor}" for major, minor in (capability, CAPABILITY))
    if capability < CAPABILITY:
        note = f"{measured}: the kernels are for an A100, H100, H200 or B200"
        return Row(name, "failed", target=f">= {target}", note=note)
    return Row(name, "passed", target=f">= {target}", note=measured)


def check_memory(name: str, device: torch.device) -> Row:
    """Compare the free memory with the need of the parts."""
    free, total = torch.cuda.mem_get_info(device)
    target, note = f">= {MEMORY_BYTES / 1e9:.0f}", f"of {total / 1e9:.0f} GB"
    if free >= MEMORY_BYTES:
        return Row(name, "passed", free / 1e9, "GB", target=target, note=note)
    note += "; nvidia-smi names the processes that hold memory: end them, or use a larger GPU"
    return Row(name, "failed", free / 1e9, "GB", target=target, note=note)


def check_symmetric_memory(name: str, device: torch.device) -> Row:
    """Report the back end of symmetric memory. Part e skips rows if it is unsuitable."""
    backend = symmetric_memory.get_backend(device)
    if backend != "CUDA":
        note = f"the back end is {backend}, the heap needs CUDA: unset TORCH_SYMMMEM"
        return Row(name, "skipped", note=note)
    return Row(name, "passed", note="the back end is CUDA")


def check_nvshmem(name: str, device: torch.device) -> Row:
    """Look for the packages of NVSHMEM. Part e skips rows if one is missing."""
    problem = nvshmem.unsupported(device)
    if problem is not None:
        return Row(name, "skipped", note=problem)
    return Row(name, "passed", note="host library, bitcode for this GPU and bindings are installed")


@triton.jit
def _add_one_kernel(x_ptr):
    tl.store(x_ptr + tl.arange(0, 16), tl.load(x_ptr + tl.arange(0, 16)) + 1)


def check_kernel(setup: Setup) -> Row:
    """Compile and launch a kernel, which also builds Triton's launcher and driver module."""
    x = torch.arange(16, device=setup.device)
    _add_one_kernel[(1,)](x)
    if x.tolist() != list(range(1, 17)):
        return Row("one-line kernel", "failed", note=f"0 .. 15 plus 1 gave {x.tolist()}")
    how = "interpreted" if setup.tiny else "compiled and launched"
    return Row("one-line kernel", "passed", note=how)
