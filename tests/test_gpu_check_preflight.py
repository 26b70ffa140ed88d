"""The GPU check's look at a machine before it starts a part."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux alone")

from scripts.gpu_check import machine, part, preflight, process
from scripts.gpu_check.process import ROOT
from tests.support.blocked import without


def dependencies() -> set[str]:
    """Names of all packages that the project requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {re.split(r"[^\w.-]", each)[0] for each in project["dependencies"]}


@pytest.mark.parametrize("name", ["abce", "d"])
def test_a_part_imports_no_package_but_those_that_the_preflight_looks_for(
    tmp_path: Path, name: str
) -> None:
    """Parts a, b, c and e start with torch and Triton alone."""
    parts = ["machine", *name] if name == "abce" else [name]
    needed = {module for each in parts for module in preflight.MODULES[each]}
    assert needed == {"torch", "triton"} or name == "d"
    modules = [f"{part.PACKAGE}.{module}" for each in parts for module in part.MODULES[each]]
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(modules)}"],
        env=without(tmp_path, *(dependencies() - needed)) | {"TRITON_INTERPRET": "0"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_missing_modules_are_named_with_the_command_that_installs_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("pydantic", "ruamel", "ruamel.yaml"):
        monkeypatch.setitem(sys.modules, name, None)
    found = preflight.preflight("cd", "cuda")
    problem = "pydantic, ruamel.yaml are missing: pip install 'pydantic>=2.9' 'ruamel.yaml>=0.18.6'"
    assert found.lacking == {"d": problem}
    rows = {row.check: row for row in found.rows}
    assert (rows["modules of part d"].outcome, rows["modules of part d"].note) == (
        "failed",
        problem,
    )
    assert rows["modules of part c"].outcome == "passed"
    assert f"torch {torch.__version__}" in rows["modules of part c"].note


@pytest.mark.parametrize(
    ("version", "problem"),
    [
        ("2.10.1+cu128", "torch 2.10.1+cu128 is too old: pip install 'torch>=2.11,<2.15'"),
        ("2.11", ""),
        ("2.11.0+cu130", ""),
        ("of unknown version", ""),
    ],
)
def test_a_module_that_is_too_old_is_named(
    monkeypatch: pytest.MonkeyPatch, version: str, problem: str
) -> None:
    monkeypatch.setattr(preflight, "_version", lambda _: version)
    assert preflight.modules_problem(["torch"]) == problem


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_compiler_that_compiles_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    install = "apt-get install gcc libc6-dev"
    assert preflight.compiler() == (False, f"neither gcc nor clang is there: {install}")
    gcc = program(tmp_path / "gcc", "exit 0")
    assert preflight.compiler() == (True, str(gcc))
    program(gcc, "echo 'stdlib.h: No such file or directory' >&2; exit 1")
    problem = f"{gcc} compiles nothing (stdlib.h: No such file or directory): {install}"
    assert preflight.compiler() == (False, problem)
    monkeypatch.setenv("CC", "icc")
    assert preflight.compiler() == (False, f"CC = icc is no program: unset CC, or {install}")


def test_the_header_of_python_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(preflight.sysconfig, "get_paths", lambda **_: {"include": str(tmp_path)})
    package = f"python{sys.version_info[0]}.{sys.version_info[1]}-dev"
    problem = f"{tmp_path}/Python.h is missing: apt-get install {package}"
    assert preflight.python_header() == (False, problem)
    (tmp_path / "Python.h").touch()
    assert preflight.python_header() == (True, f"{tmp_path}/Python.h")


def test_the_drivers_library_is_looked_for_where_triton_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("TRITON_LIBCUDA_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(preflight, "LDCONFIG", str(tmp_path / "ldconfig"))
    fine, note = preflight.driver_library()
    assert not fine
    assert note.endswith("which Triton calls, is missing: apt-get install libc-bin")
    library = tmp_path / "libcuda.so.1"
    listed = f"echo '\tlibcuda.so.1 (libc6,x86-64) => {library}'"
    program(tmp_path / "ldconfig", listed)
    fine, note = preflight.driver_library()  # the cache is older than the driver
    assert not fine
    assert "run ldconfig as root" in note
    library.touch()
    assert preflight.driver_library() == (True, str(library))
    program(tmp_path / "ldconfig", "exit 0")
    assert not preflight.driver_library()[0]
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert preflight.driver_library() == (True, str(library))


def test_without_a_gpu_what_only_a_gpu_needs_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("compiler", "python_header", "driver_library"):
        monkeypatch.setattr(preflight, name, lambda: (False, "missing"))
    for device, outcome in (("cpu", "skipped"), ("cuda", "failed")):
        rows = {row.check: row.outcome for row in preflight.preflight("a", device).rows}
        names = ("C compiler", "Python.h", "libcuda")
        assert [rows[each] for each in names] == [outcome] * 3


CUDA = torch.device("cuda:0")


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Answers of ``torch.cuda``."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def test_a_device_that_is_not_there_is_told_from_a_torch_without_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    row = machine.check_device(CUDA)
    assert row.outcome == "failed"
    assert row.note.endswith("without CUDA: pip install --force-reinstall 'torch>=2.11,<2.15'")
    on_a_gpu(monkeypatch, is_available=False, get_device_name="NVIDIA H200")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    row = machine.check_device(CUDA)
    assert row.outcome == "failed"
    assert "CUDA_VISIBLE_DEVICES = ''; unset it" in row.note
    on_a_gpu(monkeypatch, is_available=True)
    row = machine.check_device(CUDA)
    assert (row.outcome, row.note) == ("passed", "NVIDIA H200; torch is built for CUDA 13.0")


def test_capability_memory_and_back_end_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_a_gpu(monkeypatch, get_device_capability=(7, 5), mem_get_info=(50 * 10**9, 150 * 10**9))
    row = machine.check_capability("c", CUDA)
    assert row.outcome == "failed"
    assert "7.5" in row.note
    row = machine.check_memory("m", CUDA)
    assert (row.outcome, row.measured, row.unit) == ("failed", 50.0, "GB")
    assert "nvidia-smi names the processes" in row.note
    on_a_gpu(monkeypatch, get_device_capability=(9, 0), mem_get_info=(79 * 10**9, 80 * 10**9))
    assert machine.check_capability("c", CUDA).outcome == "passed"
    assert machine.check_memory("m", CUDA).outcome == "passed"
    for backend, outcome in (("CUDA", "passed"), ("NVSHMEM", "skipped")):
        monkeypatch.setattr(machine.symmetric_memory, "get_backend", lambda _, name=backend: name)
        row = machine.check_symmetric_memory("s", CUDA)
        assert row.outcome == outcome
        assert backend in row.note


def failed_rows(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str) -> list[Any]:
    monkeypatch.setenv("PYTHONPATH", environ["PYTHONPATH"])
    report = process.run_part(name, "cpu", 0, 120.0, process.PART)
    return [(row.check, row.note) for row in report.rows if row.outcome == "failed"]


def test_the_reason_of_a_failed_start_is_in_the_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preflight finds a module by its name; the import of the module may fail nevertheless."""
    environ = without(tmp_path, "pydantic_core")
    ((check, note),) = failed_rows(environ, monkeypatch, "d")
    assert check == "start of training"
    assert "ModuleNotFoundError" in note
    assert "pydantic_core" in note
    environ = without(tmp_path, "torch")
    ((check, note),) = failed_rows(environ, monkeypatch, "a")
    assert check == "start of part a"
    assert note == "ModuleNotFoundError: import of torch halted; None in sys.modules"


def test_without_torch_the_script_names_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "scripts.gpu_check",
            "--device",
            "cpu",
            "--json",
            tmp_path / "x.json",
        ],
        cwd=ROOT,
        env=without(tmp_path, "torch", "triton"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert not done.stderr
    problem = "torch, triton are missing: pip install 'torch>=2.11,<2.15' 'triton>=3.6,<3.9'"
    parts = json.loads((tmp_path / "x.json").read_text())["parts"]
    assert [each["part"] for each in parts] == ["machine", *"abcde"]
    assert [each["rows"][-1]["outcome"] for each in parts] == ["skipped"] * 6
    assert all(problem in each["rows"][-1]["note"] for each in parts)
