"""The preflight of the GPU check: the packages and programs that each part needs.

The parent process looks before it starts a part. This file imports the standard library alone, so
that a missing package becomes a row with the command that installs it. ``gpu_check_machine.py``
looks at the GPU.
"""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

from gpu_check_row import Row

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
KERNELS = ("torch", "triton")
MODULES = {
    "machine": KERNELS,
    "a": KERNELS,
    "b": KERNELS,
    "c": KERNELS,
    "d": (*KERNELS, "numpy", "einops", "pydantic", "ruamel.yaml"),
    "e": KERNELS,
}
"""The modules that a part imports, each under the name of its package."""
INTERPRETER = ("numpy",)
"""The modules that Triton's interpreter imports besides."""
LDCONFIG = "/sbin/ldconfig"
"""The program by which Triton finds the driver's library."""
COMPILERS = ("gcc", "clang")
"""In Triton's order."""


class Preflight(NamedTuple):
    rows: list[Row]
    lacking: dict[str, str]
    """Why a part cannot start, for each part that cannot."""


def preflight(parts: str, device: str) -> Preflight:
    """Look for the modules of parts, and for what Triton needs to launch a kernel on a GPU.

    :param parts: letters.
    :param device: ``cuda`` or ``cpu``. Triton's interpreter needs no compiler and no driver: there
        a missing one is no failure.
    """
    lacking: dict[str, str] = {}
    rows: list[Row] = []
    for part in ["machine", *parts]:
        needed = dict.fromkeys(MODULES[part] + (INTERPRETER if device == "cpu" else ()))
        name = "modules of the preflight" if part == "machine" else f"modules of part {part}"
        problem = modules_problem(list(needed))
        if problem:
            lacking[part] = problem
            rows.append(Row(name, "failed", note=problem))
        else:
            found = ", ".join(f"{each} {_version(each)}" for each in needed)
            rows.append(Row(name, "passed", note=found))
    for name, look in (
        ("C compiler", compiler),
        ("Python.h", python_header),
        ("libcuda", driver_library),
    ):
        fine, note = look()
        missing = "skipped" if device == "cpu" else "failed"
        rows.append(Row(name, "passed" if fine else missing, note=note))
    return Preflight(rows, lacking)


def modules_problem(modules: list[str]) -> str:
    """The modules that are missing or too old, and the command that installs them.

    Empty if nothing is wrong.
    """
    missing = [each for each in modules if not _installed(each)]
    old = [each for each in modules if each not in missing and _is_old(each)]
    said = [f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"] * bool(missing)
    said += [f"{each} {_version(each)} is too old" for each in old]
    wanted = " ".join(f"'{requirement(each)}'" for each in [*missing, *old])
    return f"{', '.join(said)}: pip install {wanted}" if said else ""


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that holds the module is missing
        return False


def requirement(package: str) -> str:
    """The project's requirement for a package: its name and the versions that fit."""
    wanted = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    found = [each.partition(";")[0] for each in wanted if re.match(rf"{package}\b", each)]
    return found[0] if found else package


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return "of unknown version"


def _is_old(package: str) -> bool:
    """Whether a version is known, and lower than the project's lower bound."""
    bound = re.search(r">=([\d.]+)", requirement(package))
    version = re.match(r"[\d.]*\d", _version(package))
    return bound is not None and version is not None and _release(version[0]) < _release(bound[1])


def _release(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def compiler() -> tuple[bool, str]:
    """Whether the C compiler that Triton takes makes a shared library."""
    install = "apt-get install gcc libc6-dev"
    named = os.environ.get("CC")
    found = next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)
    if found is None:
        missing = f"CC = {named} is no program" if named else "neither gcc nor clang is there"
        return False, f"{missing}: {'unset CC, or ' if named else ''}{install}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.c"
        source.write_text("#include <stdlib.h>\n", encoding="ascii")
        command = [found, str(source), "-shared", "-fPIC", "-o", f"{folder}/empty.so"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no message"])[0]
        return False, f"{found} compiles nothing ({said}): {install}"
    return True, found


def python_header() -> tuple[bool, str]:
    """Whether the folder in which Triton looks for ``Python.h`` has it."""
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's own scheme names a folder without headers
        scheme = "posix_prefix"
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    if header.is_file():
        return True, str(header)
    major, minor = sys.version_info[:2]
    return False, f"{header} is missing: apt-get install python{major}.{minor}-dev"


def driver_library() -> tuple[bool, str]:
    """Whether Triton finds the driver's ``libcuda.so.1``."""
    name = "libcuda.so.1"
    folders = [os.environ.get("TRITON_LIBCUDA_PATH") or ""]
    if Path(LDCONFIG).exists():
        listed = subprocess.run([LDCONFIG, "-p"], capture_output=True, text=True, check=False)
        lines = [line for line in listed.stdout.splitlines() if name in line]
        folders += [os.path.dirname(line.split()[-1]) for line in lines]
    elif not folders[0]:
        return False, f"{LDCONFIG} is missing, which Triton calls: apt-get install libc-bin"
    folders += os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    found = [folder for folder in folders if folder and (Path(folder) / name).exists()]
    if found:
        return True, str(Path(found[0]) / name)
    return False, (
        f"{name} of the NVIDIA driver is not in the loader's cache: start the container with "
        "--gpus all, or install the driver and run ldconfig as root"
    )
