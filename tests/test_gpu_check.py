"""The GPU check on a CPU: tiny sizes in Triton's interpreter.

The tests show that the check runs, compares and reports; its results on a GPU need a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux alone")

from olmo_shard.distributed.runtime import Runtime
from scripts.gpu_check import __main__ as program
from scripts.gpu_check import compare, two_ranks
from scripts.gpu_check.process import ROOT
from scripts.gpu_check.row import Row
from tests.support.blocked import without
from tests.support.device_heap import SharedGpuHeap
from tests.support.ranks import Groups, mesh_of

# Part a has a wrong reference and a check that raises; part b crashes, part c hangs.
# Parts b and c start without torch, so that part c is far from its time limit when it hangs.
BROKEN = """
import os, signal, sys, time, types
from scripts.gpu_check import part
from scripts.gpu_check.row import Check, Row

def light(self, device, seed):
    self.setup = types.SimpleNamespace(device=types.SimpleNamespace(type=device))
    return []

if sys.argv[1] == "a":
    from scripts.gpu_check import kernels
    kernels.sum_pairs_ref = lambda y, pairs: y.new_zeros(len(pairs), y.shape[1])
elif sys.argv[1] in ("b", "c"):
    part.Part.start = light

def raises():
    raise ValueError("out of luck")

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def module(name, *checks):
    module = types.ModuleType(name)
    module.checks = lambda setup: iter(checks)
    sys.modules[f"{{part.PACKAGE}}.{{name}}"] = module

fine = Check("fine", lambda: [Row("fine", "passed")])
module("first", Check("raises", raises), fine)
module("second", fine, Check("dies", dies))
module("third", fine, Check("hangs", lambda: time.sleep(1000)))
part.MODULES |= {{"a": ("first", "kernels"), "b": ("second",), "c": ("third",)}}
part.main()
"""


def rows_of(path: Path) -> dict[str, list[Row]]:
    """The rows of each part in a JSON document."""
    parts = json.loads(path.read_text())["parts"]
    return {part["part"]: [Row(**row) for row in part["rows"]] for part in parts}


@pytest.mark.slow
def test_on_a_cpu_everything_passes_and_nothing_is_measured(tmp_path: Path) -> None:
    """With torch and Triton alone, part d names the missing packages, and the others run."""
    environ = without(tmp_path, "pydantic", "ruamel", "einops", "rich", "typer")
    arguments = ["--device", "cpu", "--json", tmp_path / "new" / "x.json"]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.gpu_check", *arguments],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 1  # a part could not start
    rows = rows_of(tmp_path / "new" / "x.json")
    assert {row.outcome for part in "ab" for row in rows[part]} == {"passed"}
    assert {row.outcome for row in rows["c"]} == {"not measured"}
    assert {row.note for row in rows["c"]} == {"not measured on a CPU"}
    assert {row.outcome for row in rows["e"]} == {"skipped"}
    assert len(rows["a"]) >= 25
    lacking = (
        "einops, pydantic, ruamel.yaml are missing: "
        "pip install 'einops>=0.8' 'pydantic>=2.9' 'ruamel.yaml>=0.18.6'"
    )
    assert [(row.outcome, row.note) for row in rows["d"]] == [("skipped", lacking)]
    machine = {row.check: row for row in rows["machine"]}
    assert machine["modules of part d"].outcome == "failed"
    assert machine["one-line kernel"].outcome == "passed"
    assert machine["free memory"].note == "needs a GPU"
    assert "| b | 8 ranks: rows as sent |" in done.stdout
    assert "| c | put_rows, uniform |" in done.stdout
    assert f"| d | part d |  |  |  | skipped | {lacking} |" in done.stdout
    document = json.loads((tmp_path / "new" / "x.json").read_text())
    assert document["machine"]["torch"] == torch.__version__
    assert document["date"]


@pytest.mark.slow
def test_failures_are_reported_and_the_other_checks_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "part.py"
    broken.write_text(BROKEN.format())
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    limits = {"machine": 60.0, "a": 250.0, "b": 60.0, "c": 12.0, "e": 60.0}
    monkeypatch.setattr(program, "limit_of", lambda part, device, saved: limits[part])
    arguments = ["--device", "cpu", "--parts", "abce", "--json", f"{tmp_path}/x.json"]
    assert program.main(arguments, [sys.executable, str(broken)]) == 1
    assert "ValueError: out of luck" in capfd.readouterr().err  # with its traceback
    rows = rows_of(tmp_path / "x.json")
    failed = {row.check: row for part in "abc" for row in rows[part] if row.outcome == "failed"}
    assert set(failed) == {"raises", "sum_pairs float32", "sum_pairs bfloat16", "part b", "part c"}
    assert failed["raises"].note == "ValueError: out of luck"
    assert "exit status -9, during dies" in failed["part b"].note
    assert "stopped after" in failed["part c"].note
    assert [row.outcome for part in "abc" for row in rows[part] if row.check == "fine"] == [
        "passed"
    ] * 3
    assert {row.check for row in rows["a"]} > {"plan", "adamw", "capacity"}
    assert {row.outcome for row in rows["e"]} == {"skipped"}


@pytest.mark.parametrize("arguments", [["--parts", "ax"], ["--parts", ""]])
def test_unknown_parts_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        program.main(arguments)
    assert "name some of abcde" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_exit_code_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main([]) == 2
    printed = capsys.readouterr()
    assert "--device cpu" in printed.err
    assert "| machine | CUDA device |" in printed.out
    assert "| a |" not in printed.out


def skewed_layer(rank: Runtime) -> list[Row]:
    group = mesh_of(rank, 2).ep
    setup = compare.Setup(torch.device("cpu"), 3)
    return two_ranks.equality(
        setup, group, lambda *_: SharedGpuHeap(group, two_ranks.LAYOUT), ("skewed",)
    )


def test_the_two_ranks_of_part_e_agree_with_local(interpreted: Groups) -> None:
    """The heaps of part e need a GPU; its layers also run on a heap in shared memory."""
    for rows in interpreted(2).run(skewed_layer):
        assert [row[:2] for row in rows] == [("skewed", "passed")]


def changed(value: float) -> torch.Tensor:
    tensor = torch.linspace(-1, 1, 101)
    tensor[50] = value
    return tensor


@pytest.mark.parametrize("value", [0.1, float("nan"), float("inf")])
def test_one_wrong_value_fails(value: float) -> None:
    close, equal = compare.close, compare.equal
    expected = changed(0.0)
    pairs: dict[str, Any] = {"x": (changed(value), expected)}
    assert compare.relative_error(*pairs["x"]) >= 0.1
    assert close("c", torch.bfloat16, pairs).outcome == "failed"
    row = equal("c", pairs)
    assert (row.outcome, row.measured) == ("failed", 1)
    assert close("c", torch.float32, {"x": (expected, expected)}).outcome == "passed"
    assert equal("c", {"x": (expected[:100], expected)}).outcome == "failed"
    assert equal("c", {"x": (expected.double(), expected)}).outcome == "failed"


@pytest.mark.parametrize(
    ("measured", "at_most", "outcome"),
    [(1.3, False, "met"), (1.1, False, "not met"), (1.3, True, "not met"), (1.1, True, "met")],
)
def test_only_a_gpu_has_measurements(measured: float, at_most: bool, outcome: str) -> None:
    def row(device: str) -> Row:
        setup = compare.Setup(torch.device(device), 0)
        return compare.measurement(
            setup, "c", "ratio", measured, 1.5, 1.2, at_most=at_most, note="n"
        )

    on_gpu = row("cuda")
    assert on_gpu.outcome == outcome
    assert on_gpu.target == ("<= 1.2" if at_most else ">= 1.2")
    assert row("cpu")._replace(unit="") == Row("c", "not measured", note="not measured on a CPU")
