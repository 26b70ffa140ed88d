"""Where the scripts write their results: made, or refused, before any work."""

import argparse
import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
sys.path.append(str(SCRIPTS))  # scripts import each other by their bare names
output = import_module("output_folder")

WORK = {
    "bench_dispatch": "run_ranks",
    "bench_dispatch_step": "run_ranks",
    "bench_parallel": "_measure",
    "gpu_check": "preflight",
}
"""The function that begins the work of each script with an output option."""


def options_of(script: Path) -> list[tuple[str, str]]:
    """Each command-line option that is a path: its name, and the function that reads it."""
    calls = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Call)]
    added = [call for call in calls if ast.unparse(call.func).endswith("add_argument")]
    types = [(call, word.value) for call in added for word in call.keywords if word.arg == "type"]
    paths = [(call, ast.unparse(value)) for call, value in types]
    return [(ast.literal_eval(call.args[0]), type_) for call, type_ in paths if "int" not in type_]


def test_every_script_checks_its_output_at_the_start() -> None:
    found = {script.stem: options_of(script) for script in SCRIPTS.glob("*.py")}
    found = {script: options for script, options in found.items() if options}
    folder = [("--out", "output_folder")]
    assert found.pop("gpu_check_part") == [("--out", "Path")]  # a file of the script that starts it
    assert found.pop("gpu_check") == [("--json", "output_file")]
    assert found == dict.fromkeys(WORK.keys() - {"gpu_check"}, folder)


@pytest.mark.parametrize("name", WORK)
def test_an_output_that_cannot_be_is_refused_before_the_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def begun(*_: object) -> None:
        raise AssertionError("the work began")

    script = import_module(name)
    monkeypatch.setattr(script, WORK[name], begun)
    (tmp_path / "file").touch()
    option = "--json" if name == "gpu_check" else "--out"
    below = tmp_path / "file" / "below"
    monkeypatch.setattr(sys, "argv", [f"{name}.py", option, str(below)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"argument {option}: {tmp_path}/file" in said
    assert "is a file: name a folder" in said or "(Not a directory)" in said


@pytest.mark.parametrize("name", ["bench_dispatch", "bench_dispatch_step"])
def test_a_new_folder_takes_the_results(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = import_module(name)
    monkeypatch.setattr(script, "run_ranks", lambda *_: [])
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--out", str(tmp_path / "new" / "deeper")])
    script.main()
    assert len(list((tmp_path / "new" / "deeper").iterdir())) == 2


def test_folders_and_files_that_take_results(tmp_path: Path, monkeypatch: Any) -> None:
    assert output.output_folder(str(tmp_path / "a" / "b")) == tmp_path / "a" / "b"
    assert output.output_folder(str(tmp_path)) == tmp_path
    file = tmp_path / "c" / "x.json"
    assert output.output_file(str(file)) == file
    assert list(file.parent.iterdir()) == []
    file.write_text("older")
    assert output.output_file(str(file)) == file
    assert file.read_text() == "older"
    with pytest.raises(argparse.ArgumentTypeError, match="is a folder: name a file in it"):
        output.output_file(str(tmp_path))
    monkeypatch.setattr(output.os, "access", lambda *_: False)
    with pytest.raises(argparse.ArgumentTypeError, match="is write-protected"):
        output.output_file(str(file))


def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(output.tempfile, "TemporaryFile", refuses)
    with pytest.raises(argparse.ArgumentTypeError, match=r"cannot take files \(Read-only"):
        output.output_folder(str(tmp_path))
