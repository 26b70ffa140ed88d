"""The preflight of the GPU check: which packages and programs of a part are missing.

It runs before any part starts. The file imports the standard library alone, so that a missing
package becomes a row with the command that installs it. ``machine.py`` examines the GPU.
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

from scripts.gpu_check.row import Row

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
KERNELS = ("torch", "triton")
MODULES = {
    "machine": KERNELS,
    "a": KERNELS,
    "b": KERNELS,
    "c": KERNELS,
    "d": (*KERNELS, "numpy", "einops", "pydantic", "ruamel.yaml"),
    "e": KERNELS,
}
"""Modules that each part imports, under the names of their packages."""
INTERPRETER = ("numpy",)
"""Modules that Triton's interpreter also imports."""
LDCONFIG = "/sbin/ldconfig"
"""Program with which Triton finds the driver's library."""
COMPILERS = ("gcc", "clang")
"""C compilers that Triton tries, in its order."""


class Preflight(NamedTuple):
    """The result of the preflight."""

    rows: list[Row]
    lacking: dict[str, str]
    """Part to the reason why it cannot start; a part that can start is absent."""


def preflight(parts: str, device: str) -> Preflight:
    """Look for the modules of parts, and for the programs with which Triton launches kernels.

    :param parts: letters of the parts.
    :param device: ``cuda`` or ``cpu``. Triton's interpreter needs no compiler and no driver, so a
        missing one is no failure on ``cpu``.
    """
    lacking: dict[str, str] = {}
    rows: list[Row] = []
    # Python modules, part by part.
    for part in ["machine", *parts]:
        needed = dict.fromkeys(MODULES[part] + (INTERPRETER if device == "cpu" else ()))
        name = "modules of the preflight" if part == "machine" else f"modules of part {part}"
        problem = modules_problem(list(needed))
        if problem:
            lacking[part] = problem
            rows.append(Row(name, "failed", note=problem))
        else:
            versions = ", ".join(f"{module} {_version(module)}" for module in needed)
            rows.append(Row(name, "passed", note=versions))
    # Programs and files that Triton needs to compile and launch a kernel.
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
    """Name modules that are missing or too old, and the command that installs them.

    :returns: an empty text if there are none.
    """
    missing = [module for module in modules if not _installed(module)]
    old = [module for module in modules if module not in missing and _is_old(module)]
    problems: list[str] = []
    if missing:
        problems.append(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    problems += [f"{module} {_version(module)} is too old" for module in old]
    wanted = " ".join(f"'{requirement(module)}'" for module in [*missing, *old])
    return f"{', '.join(problems)}: pip install {wanted}" if problems else ""


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that holds the module is missing
        return False


def requirement(package: str) -> str:
    """The project's requirement for a package: its name and the supported versions."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    lines = [line for line in project["dependencies"] if re.match(rf"{package}\b", line)]
    return lines[0].partition(";")[0] if lines else package


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a source tree, not installed
        return "of unknown version"


def _is_old(package: str) -> bool:
    """Whether the installed version is known, and below the project's lower bound."""
    bound = re.search(r">=([\d.]+)", requirement(package))
    version = re.match(r"[\d.]*\d", _version(package))
    return bound is not None and version is not None and _release(version[0]) < _release(bound[1])


def _release(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def compiler() -> tuple[bool, str]:
    """Test whether Triton's C compiler builds a shared library.

    :returns: success, and the compiler's path or the problem.
    """
    install = "apt-get install gcc libc6-dev"
    named = os.environ.get("CC")
    program = next(filter(None, map(shutil.which, [named] if named else COMPILERS)), None)
    if program is None:
        missing = f"CC = {named} is no program" if named else "neither gcc nor clang is there"
        return False, f"{missing}: {'unset CC, or ' if named else ''}{install}"
    # Triton's launchers include headers of the C library and are linked as shared libraries.
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "empty.c"
        source.write_text("#include <stdlib.h>\n", encoding="ascii")
        command = [program, str(source), "-shared", "-fPIC", "-o", f"{folder}/empty.so"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = (done.stderr.strip().splitlines() or ["no message"])[0]
        return False, f"{program} compiles nothing ({message}): {install}"
    return True, program


def python_header() -> tuple[bool, str]:
    """Test whether ``Python.h`` is in the folder that Triton includes.

    :returns: success, and the header's path or the problem.
    """
    scheme = sysconfig.get_default_scheme()
    if scheme == "posix_local":  # Debian's scheme for local installations has no headers
        scheme = "posix_prefix"
    header = Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"
    if header.is_file():
        return True, str(header)
    major, minor = sys.version_info[:2]
    return False, f"{header} is missing: apt-get install python{major}.{minor}-dev"


def driver_library() -> tuple[bool, str]:
    """Test whether Triton finds the driver's ``libcuda.so.1``.

    :returns: success, and the library's path or the problem.
    """
    name = "libcuda.so.1"
    # Triton looks in these places: a variable, the loader's cache, the loader's search path.
    folders = [os.environ.get("TRITON_LIBCUDA_PATH") or ""]
    if Path(LDCONFIG).exists():
        listed = subprocess.run([LDCONFIG, "-p"], capture_output=True, text=True, check=False)
        lines = [line for line in listed.stdout.splitlines() if name in line]
        folders += [os.path.dirname(line.split()[-1]) for line in lines]
    elif not folders[0]:
        return False, f"{LDCONFIG}, which Triton calls, is missing: apt-get install libc-bin"
    folders += os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    paths = [Path(folder) / name for folder in folders if folder]
    existing = [path for path in paths if path.exists()]
    if existing:
        return True, str(existing[0])
    return False, (
        f"{name} of the NVIDIA driver is not in the loader's cache: start the container with "
        "--gpus all, or install the driver and run ldconfig as root"
    )
