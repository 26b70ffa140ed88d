"""Checkpoint folders appear whole or not at all."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from olmo_shard.data.loader import LoaderState
from olmo_shard.errors import CheckpointError
from olmo_shard.train import checkpoint_folder as folders
from olmo_shard.train.state import TrainState

SAVED_STATE = folders.SavedState(
    train=TrainState(step=7),
    loader=LoaderState(
        drawn=[5],
        seed=1,
        sequence_length=12,
        document_masking=False,
        sources={},
        weights=[1.0],
        since_drawn=[0],
    ),
    model={},
    optimizer_steps=7,
    shapes={"a": [2, 3]},
)


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    for step in (5, 20, 100):
        folders.commit(
            folders.begin(folders.folder_of(tmp_path, step)),
            folders.folder_of(tmp_path, step),
            SAVED_STATE,
        )
    folders.begin(folders.folder_of(tmp_path, 120))
    (folders.folder_of(tmp_path, 110)).mkdir()
    names = [path.name for path in folders.complete_checkpoints(tmp_path)]
    assert names == ["step-00000005", "step-00000020", "step-00000100"]
    folders.keep_last(tmp_path, 2)
    assert [p.name for p in folders.complete_checkpoints(tmp_path)] == names[1:]


def test_a_kill_at_any_system_call_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only checkpoint is saved again, and dies at each of its file operations in turn."""
    final = folders.folder_of(tmp_path, 7)
    folders.commit(folders.begin(final), final, SAVED_STATE)

    class Killed(BaseException):
        pass

    operations = [(Path, "rename"), (os, "fsync"), (shutil, "rmtree"), (Path, "mkdir")]
    originals = {(owner, name): getattr(owner, name) for owner, name in operations}
    deaths = 0
    for moment in range(20):
        calls = 0

        def dying(original: Any, moment: int = moment) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > moment:
                    raise Killed
                return original(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for (owner, name), original in originals.items():
                patch.setattr(owner, name, dying(original))
            try:
                folders.commit(folders.begin(final), final, SAVED_STATE)
            except Killed:
                deaths += 1
        (newest,) = folders.complete_checkpoints(tmp_path)
        assert folders.read_state(newest) == SAVED_STATE
    assert 5 < deaths < 20


def test_a_state_of_another_format_or_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no such checkpoint, or not a complete one"):
        folders.read_state(tmp_path)
    whole = SAVED_STATE.model_dump()
    (tmp_path / folders.STATE).write_text(json.dumps(whole | {"format": 1}))
    with pytest.raises(CheckpointError, match=r"has format 1, and this version reads format 2: go"):
        folders.read_state(tmp_path)
    for damaged in ("{", "[]", "\\xff", "null", json.dumps(whole | {"shapes": 9})):
        (tmp_path / folders.STATE).write_text(damaged)
        with pytest.raises(CheckpointError, match=r"state\.json is damaged or of another version"):
            folders.read_state(tmp_path)
    (tmp_path / folders.STATE).write_text(json.dumps(whole | {"train": {"step": "4"}}))
    with pytest.raises(CheckpointError, match=r"train\.step Input should be a valid integer"):
        folders.read_state(tmp_path)


def test_a_removal_that_was_interrupted_is_a_leftover(tmp_path: Path) -> None:
    """The marker is gone, and files of the tensors are still there."""
    remnant = folders.folder_of(tmp_path, 4)
    remnant.mkdir(parents=True)
    (remnant / "__0_0.distcp").write_bytes(b"tensors")
    assert folders.leftovers(tmp_path) == [remnant]
    folders.remove_leftovers(tmp_path)
    assert not remnant.exists()
