"""Ranks with other data, and resumes with other data, are refused before training."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from olmo_shard.config import load_config
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import DataError
from olmo_shard.train.checkpoint_folder import complete_checkpoints
from olmo_shard.train.start import check_same_data
from tests.support.commands import finish, records, start
from tests.support.configs import write_config, write_tokens
from tests.support.ranks import mesh_of


def compare_case(rank: Runtime, path: str, overrides: list[list[str]]) -> str:
    """What a rank says whose config has these overrides."""
    config = load_config(path, overrides[rank.rank])
    try:
        check_same_data(config, mesh_of(rank).control)
    except DataError as error:
        return str(error)
    return "agreed"


def override(name: str, *paths: Path) -> str:
    listed = ", ".join(str(path) for path in paths)
    return f"{name}={{path: [{listed}], dtype: uint16, eos_id: 0}}"


def test_a_rank_with_other_data_is_named_with_the_file(ranks: Any, tmp_path: Path) -> None:
    path = str(write_config(tmp_path))
    a, b, c = (write_tokens(tmp_path / f"{name}.bin", seed=name) for name in range(3))
    copy = tmp_path / "copy.bin"
    copy.write_bytes(a.read_bytes())
    short = write_tokens(tmp_path / "short.bin", 3900)
    held_out = "data.validation.held_out"

    def training(*paths: Path) -> list[str]:
        return [override("data.sources.0", *paths)]

    same = training(a, b)
    cases: list[tuple[list[list[str]], str]] = [
        ([same, training(copy, b), same], "agreed"),
        (
            [same, same, training(b, a)],
            f"data.sources.0: order: {b} is file 0 of data.sources.0 on rank 2, file 1 of "
            "data.sources.0 on rank 0",
        ),
        ([same, training(a, c), same], f"content of {c}: sample"),
        (
            [same, same, training(a, short)],
            f"data.sources.0: size of {short}: 3900 ids on rank 2, 4002 ids in {b} on rank 0",
        ),
        ([same, training(a), same], f"1 file(s) on rank 1, 2 on rank 0; {b} is only on rank 0"),
        (
            [[override(held_out, a)], [override(held_out, a)], [override(held_out, c)]],
            f"{held_out}: content of {c}: sample",
        ),
        ([same, training(tmp_path / "none.bin"), same], "rank 1: these data cannot be used"),
    ]
    for overrides, expected in cases:
        said = ranks(3).run(compare_case, path, overrides)
        assert said[0] == said[1] == said[2]
        assert expected in said[0]


def test_a_job_whose_hosts_hold_other_files_ends_at_its_start(tmp_path: Path) -> None:
    """Two ranks with one config and a relative path, each in a folder of its own."""
    config = write_config(tmp_path)
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29741"}
    processes = []
    for rank in range(2):
        folder = tmp_path / f"host{rank}"
        folder.mkdir()
        write_tokens(folder / "tokens.bin", seed=rank)
        path = "data.sources.0.path=tokens.bin"
        environment = address | {"RANK": str(rank), "PYTHONPATH": str(Path(__file__).parents[2])}
        processes.append(start("train", config, path, env=environment, cwd=folder))
    for process in processes:
        code, output = finish(process)
        assert code == 2, output
        assert "the ranks have different data: data.sources.0: content of tokens.bin: s" in output
    assert not (tmp_path / "run").exists()


def test_a_resume_with_other_data_is_refused_before_training(tmp_path: Path, main: Any) -> None:
    config = write_config(tmp_path)
    assert main("train", config, "train.steps=3", "eval.every=0")[0] == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    ids = np.fromfile(tmp_path / "tokens.bin", dtype=np.uint16)
    np.roll(ids, 1).tofile(tmp_path / "tokens.bin")
    os.utime(tmp_path / "tokens.bin", (1, 1))
    for command in ("check", "train"):
        code, printed = main(command, config)
        assert code == 2, printed
        assert f"data.sources.0: content of {tmp_path}/tokens.bin: sample" in printed
        assert "checkpoint.init_from" in printed
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    newest = complete_checkpoints(tmp_path / "run")[-1]
    new = [f"run.dir={tmp_path / 'new'}", f"checkpoint.init_from={newest}"]
    assert main("check", config, *new)[0] == 0


def test_a_budget_goes_on_after_a_changed_batch(tmp_path: Path, main: Any) -> None:
    """3 steps of 256 tokens are done; of 1,536 tokens 768 are left: 6 steps of 128."""
    config = write_config(tmp_path)
    budget = ["train.steps=null", "eval.every=0", "optim.lr=1e-3"]
    assert main("train", config, *budget, "train.tokens=768")[0] == 0
    batch = "train.global_batch_tokens=128"
    code, printed = main("train", config, *budget, "train.tokens=1536", batch)
    assert code == 0, printed
    assert "resume    step 3 of 9" in printed
    assert (
        "0.0001 at step 9; 9 steps: 3 done, and 6 of 128 tokens within the 768 tokens left of "
        "train.tokens = 1536"
    ) in printed
    found = records(tmp_path / "run")
    assert [record["step"] for record in found] == list(range(1, 10))
    assert found[-1]["lr"] == pytest.approx(1e-4)
    assert found[-1]["tokens_total"] == 1536
    code, printed = main("train", config, *budget, "train.tokens=1600", batch)
    assert code == 2
    assert "nothing to train" in printed
    assert "0 of 128 tokens within the 64 tokens left of train.tokens = 1600" in printed


def test_skipped_steps_have_drawn_their_tokens(tmp_path: Path, main: Any) -> None:
    """Every step after the second is a spike; the budget still ends after six steps."""
    config = write_config(tmp_path)
    spikes = "train.skip_spikes={watch: loss, window: 2, sigmas: 1e-9}"
    overrides = ["train.steps=null", spikes, "train.tokens=1536", "optim.lr=1e-12"]
    code, printed = main("train", config, *overrides, "checkpoint.every=1")
    assert code == 0, printed
    found = records(tmp_path / "run")
    assert found[-1]["skipped_steps"] > 0
    assert [record["step"] for record in found] == list(range(1, 7))
    assert "# nothing to train" in main("check", config, *overrides)[1]


def test_check_and_train_say_what_is_never_trained_on(tmp_path: Path, main: Any) -> None:
    config = write_config(tmp_path)
    overrides = ["train.steps=null", "train.epochs=0.1", "schedule.warmup_steps=0", "eval.every=0"]
    line = (
        "unused    1 of 4,002 ids (0.02%) fill no sequence, at the ends of files; 9 sequence(s), "
        "144 of the budget's 400 tokens (36.00%), fill no global batch, at the end of the run"
    )
    for command, prefix in (("check", "# "), ("train", "")):
        code, printed = main(command, config, *overrides)
        assert code == 0, printed
        assert prefix + line in printed.splitlines()
