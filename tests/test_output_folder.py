"""The folders of the scripts' results are created, or rejected, before any work."""

import argparse
import ast
import sys
from importlib import import_module
from pathlib import Path

import pytest

from scripts import output_folder as output

SCRIPTS = Path(__file__).parents[1] / "scripts"
WORK = {
    "bench.dispatch": "run_ranks",
    "bench.dispatch_step": "run_ranks",
    "bench.parallel": "_measure",
    "gpu_check.__main__": "preflight",
}
"""The function that begins the work of each module with an output option."""


def options_of(script: Path) -> list[tuple[str, str]]:
    """The command-line options that take paths: names, and the functions that parse the values."""
    calls = [node for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Call)]
    added = [call for call in calls if ast.unparse(call.func).endswith("add_argument")]
    types = [(call, word.value) for call in added for word in call.keywords if word.arg == "type"]
    paths = [(call, ast.unparse(value)) for call, value in types]
    return [(ast.literal_eval(call.args[0]), type_) for call, type_ in paths if "int" not in type_]


def test_every_script_checks_its_output_at_the_start() -> None:
    options = {}
    for script in SCRIPTS.rglob("*.py"):
        name = ".".join(script.relative_to(SCRIPTS).with_suffix("").parts)
        options[name] = options_of(script)
    options = {name: paths for name, paths in options.items() if paths}
    assert options.pop("gpu_check.part") == [("--out", "Path")]  # created by the parent process
    assert options.pop("gpu_check.__main__") == [("--json", "output_file")]
    folder = [("--out", "output_folder")]
    assert options == dict.fromkeys(WORK.keys() - {"gpu_check.__main__"}, folder)


@pytest.mark.parametrize("name", WORK)
def test_an_output_that_cannot_be_is_refused_before_the_work(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def begun(*_: object) -> None:
        raise AssertionError("the work began")

    script = import_module(f"scripts.{name}")
    monkeypatch.setattr(script, WORK[name], begun)
    (tmp_path / "file").touch()
    option = "--json" if name == "gpu_check.__main__" else "--out"
    below = tmp_path / "file" / "below"
    monkeypatch.setattr(sys, "argv", [name, option, str(below)])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert f"argument {option}: {tmp_path}/file" in message
    assert "is a file: name a folder" in message or "(Not a directory)" in message


@pytest.mark.parametrize("name", ["bench.dispatch", "bench.dispatch_step"])
def test_a_new_folder_takes_the_results(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = import_module(f"scripts.{name}")
    monkeypatch.setattr(script, "run_ranks", lambda *_: [])
    monkeypatch.setattr(sys, "argv", [name, "--out", str(tmp_path / "new" / "deeper")])
    script.main()
    assert len(list((tmp_path / "new" / "deeper").iterdir())) == 2


def test_folders_and_files_that_take_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_read_only_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(output.tempfile, "TemporaryFile", refuses)
    with pytest.raises(argparse.ArgumentTypeError, match=r"cannot take files \(Read-only"):
        output.output_folder(str(tmp_path))
