"""Records of an earlier start are moved to a numbered folder, never deleted."""

from pathlib import Path
from typing import Any

import pytest

from olmo_shard.errors import ConfigurationError
from olmo_shard.train.earlier_records import set_aside

CONTENT = {
    "config.yaml": "a: 1\n",
    "metrics.jsonl": '{"step": 1}\n',
    "loss.png": "picture",
    **dict.fromkeys(
        ("events.jsonl", "experts.jsonl", "experts.png", "metrics.replaced.jsonl"), "more"
    ),
}


def write(folder: Path, content: dict[str, str]) -> None:
    for name, text in content.items():
        (folder / name).write_text(text)


def texts(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}


def test_each_earlier_start_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    for number in (1, 2):
        write(tmp_path, CONTENT | {"eval.jsonl": f'{{"step": {number}}}\n', "notes.txt": "mine"})
        folder = set_aside(tmp_path)
        assert folder is not None
        assert folder == tmp_path / f"earlier-{number}"
        assert texts(folder) == CONTENT | {"eval.jsonl": f'{{"step": {number}}}\n'}
        assert texts(tmp_path) == {"notes.txt": "mine"}


def test_a_folder_without_records_stays_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, {"config.yaml": "a: 1\n", "metrics.jsonl": ""})
    assert set_aside(tmp_path) is None
    assert texts(tmp_path) == {"config.yaml": "a: 1\n", "metrics.jsonl": ""}


def test_a_move_cut_short_is_done_again(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path, CONTENT)
    rename, moved = Path.rename, []

    def full_after_one(self: Path, target: Path) -> Path:
        if moved:
            raise OSError(28, "No space left on device", str(self))
        moved.append(self.name)
        return rename(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", full_after_one)
        with pytest.raises(ConfigurationError, match="cannot be moved away: No space left"):
            set_aside(tmp_path)
    assert set_aside(tmp_path) == tmp_path / "earlier-2"
    kept = texts(tmp_path / "earlier-1") | texts(tmp_path / "earlier-2")
    assert kept == CONTENT


def test_a_start_that_ended_before_its_first_step_has_records(tmp_path: Path) -> None:
    write(tmp_path, {"config.yaml": "a: 1\n", "events.jsonl": '{"event": "start"}\n'})
    assert set_aside(tmp_path) == tmp_path / "earlier-1"
    assert texts(tmp_path) == {}
