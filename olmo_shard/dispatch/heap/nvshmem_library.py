"""Finds NVSHMEM: the host library and the device bitcode of one installed wheel.

[Note: one wheel] Kernels link the device bitcode, and processes load the host library. Both read
one structure, the device state, whose layout changes between releases (776 bytes in 3.4.5, 848 in
3.8.0). So the bitcode must be the one next to the host library of the installed wheel. The host
library that is loaded must have the wheel's version: another one may come first on the loader's
path, or may be loaded already. Nothing in this file imports CUDA.

Wheels up to 3.6 hold one bitcode for all GPUs, ``libnvshmem_device.bc``. Later wheels hold one for
each architecture, such as ``libnvshmem_device_sm_90.bc``. It serves all GPUs of the same major
number whose minor number is not lower.
"""

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from olmo_shard.errors import HeapError

_CUDA_MAJORS = ("12", "13")
"""Major versions of CUDA with wheels. All wheels install into the same folder."""
_SINGLE = "libnvshmem_device.bc"


class NvshmemLibrary(NamedTuple):
    """An installed wheel of NVSHMEM."""

    folder: Path
    """Holds the host library and the bitcode."""
    package: str
    version: str


def refusal(problem: str) -> HeapError:
    """The error for a problem. Its text also says how to train without NVSHMEM."""
    return HeapError(f"{problem}; on one host, parallel.symmetric_heap: torch needs no NVSHMEM")


def installed_library(cuda: str | None) -> NvshmemLibrary:
    """The wheel of NVSHMEM that fits torch.

    :param cuda: version of CUDA with which torch is built, ``torch.version.cuda``.
    :raises HeapError: if a package is missing, is for another CUDA, or lacks its host library.
    """
    if cuda is None:
        raise refusal("NVSHMEM needs a torch built with CUDA, and this one is built without")
    # 1. The wheel must be for torch's CUDA, and no other wheel may share its folder.
    major = cuda.partition(".")[0]
    package = f"nvidia-nvshmem-cu{major}"
    wheel, bindings = _installed(package), _installed(f"nvshmem4py-cu{major}")
    others = [f"nvidia-nvshmem-cu{other}" for other in _CUDA_MAJORS if other != major]
    # A wheel for another CUDA overwrites files of this one: they share a folder.
    foreign = [other for other in others if _installed(other)]
    if wheel is None:
        instead = f", only {', '.join(foreign)}" if foreign else ""
        raise refusal(
            f"{package} is not installed{instead}, and torch is built with CUDA {cuda}: "
            f"{_install(major)}"
        )
    if foreign:
        raise refusal(
            f"{package} and {', '.join(foreign)} are both installed, into one folder: uninstall "
            f"both, then {_install(major)}"
        )
    # 2. The bindings, and the library itself.
    if bindings is None:
        raise refusal(f"nvshmem4py-cu{major} is not installed: {_install(major)}")
    folder = Path(str(wheel.locate_file("nvidia/nvshmem/lib")))
    if not any(folder.glob("libnvshmem_host.so.*")):
        raise refusal(
            f"{folder} holds no libnvshmem_host.so.*, though {package} {wheel.version} is "
            "installed: install it again"
        )
    return NvshmemLibrary(folder, package, wheel.version)


def find_bitcode(folder: Path, capability: tuple[int, int]) -> Path:
    """The device bitcode for a GPU.

    It is for the GPU's architecture, for a lower one of the same major number, or for all GPUs.

    :param folder: folder of the host library.
    :param capability: compute capability of the GPU, major and minor.
    :raises HeapError: if there is none.
    """
    major, minor = capability
    names = [f"libnvshmem_device_sm_{major}{lower}.bc" for lower in range(minor, -1, -1)]
    for name in [*names, _SINGLE]:
        if (folder / name).is_file():
            return folder / name
    others = sorted(path.name for path in folder.glob("libnvshmem_device*.bc"))
    looked_for = ", ".join([*names, _SINGLE])
    if others:
        raise refusal(
            f"{folder} holds no NVSHMEM bitcode for sm_{major}{minor} ({looked_for}), only "
            f"{', '.join(others)}"
        )
    raise refusal(f"{folder} holds no NVSHMEM bitcode ({looked_for})")


def check_host_library(library: NvshmemLibrary, loaded: str) -> None:
    """Check that the loaded host library is the wheel's: see [Note: one wheel].

    :param loaded: version that the host library in this process reports.
    :raises HeapError: if it is not the wheel's version.
    """
    if _release(loaded) != _release(library.version):
        raise refusal(
            f"the host library of NVSHMEM in this process is {loaded}, the bitcode is of "
            f"{library.package} {library.version}: they must be of one version, so leave only the "
            "wheel's libnvshmem_host.so on the loader's path"
        )


def _installed(package: str) -> Distribution | None:
    try:
        return distribution(package)
    except PackageNotFoundError:
        return None


def _install(major: str) -> str:
    if major == "13":
        return "pip install 'olmo-shard[nvshmem]'"
    return f"pip install nvidia-nvshmem-cu{major} nvshmem4py-cu{major}"


def _release(version: str) -> list[int]:
    """Major, minor and patch number."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
