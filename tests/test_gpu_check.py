"""The script that checks a GPU, on a CPU: tiny sizes in Triton's interpreter.

What it says of a GPU no test here can know; that it runs, compares and reports they can.
"""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux alone")

from olmo_shard.distributed.runtime import Runtime
from tests.support.blocked import without
from tests.support.device_heap import SharedDeviceHeap
from tests.support.ranks import mesh_of

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))  # scripts import each other by their bare names
gpu_check = import_module("gpu_check")
gpu_check_ranks = import_module("gpu_check_ranks")
gpu_check_report = import_module("gpu_check_report")
gpu_check_row = import_module("gpu_check_row")

# Part a has a wrong reference and a check that raises; part b dies in the middle, part c hangs.
# Parts b and c start without torch, so that part c is far from its time limit when it hangs.
BROKEN = """
import os, signal, sys, time, types
sys.path.insert(0, {scripts!r})
import gpu_check_part
from gpu_check_row import Check, Row

def light(self, device, seed):
    self.setup = types.SimpleNamespace(device=types.SimpleNamespace(type=device))
    return []

if sys.argv[1] == "a":
    import gpu_check_kernels
    gpu_check_kernels.sum_pairs_ref = lambda y, pairs: y.new_zeros(len(pairs), y.shape[1])
elif sys.argv[1] in ("b", "c"):
    gpu_check_part.Part.start = light

def raises():
    raise ValueError("out of luck")

def dies():
    os.kill(os.getpid(), signal.SIGKILL)

def module(name, *found):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].checks = lambda setup: iter(found)

fine = Check("fine", lambda: [Row("fine", "passed")])
module("first", Check("raises", raises), fine)
module("second", fine, Check("dies", dies))
module("third", fine, Check("hangs", lambda: time.sleep(1000)))
gpu_check_part.MODULES |= {{
    "a": ("first", "gpu_check_kernels"), "b": ("second",), "c": ("third",)
}}
gpu_check_part.main()
"""


def rows_of(path: Path) -> dict[str, list[Any]]:
    document = json.loads(path.read_text())
    return {
        each["part"]: [gpu_check_row.Row(**row) for row in each["rows"]]
        for each in document["parts"]
    }


@pytest.mark.slow
def test_on_a_cpu_everything_passes_and_nothing_is_measured(tmp_path) -> None:
    """With torch and Triton alone: part d names the packages that it lacks, the others run."""
    environ = without(tmp_path, "pydantic", "ruamel", "einops", "rich", "typer")
    arguments = ["--device", "cpu", "--json", tmp_path / "new" / "x.json"]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "gpu_check.py", *arguments],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 1  # a part could not start
    found = rows_of(tmp_path / "new" / "x.json")
    assert {row.outcome for part in "ab" for row in found[part]} == {"passed"}
    assert {row.outcome for row in found["c"]} == {"not measured"}
    assert {row.note for row in found["c"]} == {"not measured on a CPU"}
    assert {row.outcome for row in found["e"]} == {"skipped"}
    assert len(found["a"]) >= 25
    lacking = (
        "einops, pydantic, ruamel.yaml are missing: "
        "pip install 'einops>=0.8' 'pydantic>=2.9' 'ruamel.yaml>=0.18.6'"
    )
    assert [(row.outcome, row.note) for row in found["d"]] == [("skipped", lacking)]
    machine = {row.check: row for row in found["machine"]}
    assert machine["modules of part d"].outcome == "failed"
    assert machine["one-line kernel"].outcome == "passed"
    assert machine["free memory"].note == "needs a GPU"
    assert "| b | 8 ranks: rows as sent |" in done.stdout
    assert "| c | push_rows, uniform |" in done.stdout
    assert f"| d | part d |  |  |  | skipped | {lacking} |" in done.stdout
    document = json.loads((tmp_path / "new" / "x.json").read_text())
    assert document["machine"]["torch"] == torch.__version__
    assert document["date"]


@pytest.mark.slow
def test_what_fails_is_reported_and_the_rest_runs(tmp_path, capfd, monkeypatch):
    program = tmp_path / "part.py"
    program.write_text(BROKEN.format(scripts=str(SCRIPTS)))
    limits = {"machine": 60.0, "a": 250.0, "b": 60.0, "c": 12.0, "e": 60.0}
    monkeypatch.setattr(gpu_check, "limit_of", lambda part, device, saved: limits[part])
    arguments = ["--device", "cpu", "--parts", "abce", "--json", f"{tmp_path}/x.json"]
    assert gpu_check.main(arguments, program) == 1
    said = capfd.readouterr()
    assert "ValueError: out of luck" in said.err  # with its traceback
    found = rows_of(tmp_path / "x.json")
    failed = {row.check: row for part in "abc" for row in found[part] if row.outcome == "failed"}
    assert set(failed) == {"raises", "sum_pairs float32", "sum_pairs bfloat16", "part b", "part c"}
    assert failed["raises"].note == "ValueError: out of luck"
    assert "exit status -9, during dies" in failed["part b"].note
    assert "stopped after" in failed["part c"].note
    assert [row.outcome for part in "abc" for row in found[part] if row.check == "fine"] == [
        "passed"
    ] * 3
    assert {row.check for row in found["a"]} > {"plan", "adamw", "capacity"}
    assert {row.outcome for row in found["e"]} == {"skipped"}


@pytest.mark.parametrize("arguments", [["--parts", "ax"], ["--parts", ""]])
def test_unknown_parts_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(arguments)
    assert "name some of abcde" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert gpu_check.main([]) == 2
    said = capsys.readouterr()
    assert "--device cpu" in said.err
    assert "| machine | CUDA device |" in said.out
    assert "| a |" not in said.out


def two_ranks(rank: Runtime) -> list[Any]:
    group = mesh_of(rank, 2).ep
    setup = gpu_check_report.Setup(torch.device("cpu"), 3)
    # Rows are sent back as plain tuples: the other side may not know their type.
    rows = gpu_check_ranks.equality(
        setup, group, lambda *_: SharedDeviceHeap(group, gpu_check_ranks.LAYOUT), ("skewed",)
    )
    return [tuple(row) for row in rows]


def test_the_two_ranks_of_part_e_agree_with_local(interpreted):
    """Its heaps need a GPU; what it does on them does not."""
    for rows in interpreted(2).run(two_ranks):
        assert [row[:2] for row in rows] == [("skewed", "passed")]


def changed(value: float) -> torch.Tensor:
    tensor = torch.linspace(-1, 1, 101)
    tensor[50] = value
    return tensor


@pytest.mark.parametrize("value", [0.1, float("nan"), float("inf")])
def test_one_wrong_value_is_found(value):
    close, equal = gpu_check_report.close, gpu_check_report.equal
    expected = changed(0.0)
    pairs: dict[str, Any] = {"x": (changed(value), expected)}
    assert gpu_check_report.relative_error(*pairs["x"]) >= 0.1
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
def test_targets_are_claimed_of_a_gpu_alone(measured, at_most, outcome):
    def row(device: str) -> Any:
        setup = gpu_check_report.Setup(torch.device(device), 0)
        return gpu_check_report.claim(
            setup, "c", "ratio", measured, 1.5, 1.2, at_most=at_most, note="n"
        )

    found = row("cuda")
    assert found.outcome == outcome
    assert found.target == ("<= 1.2" if at_most else ">= 1.2")
    assert row("cpu")._replace(unit="") == gpu_check_row.Row(
        "c", "not measured", note="not measured on a CPU"
    )
