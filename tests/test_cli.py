"""The commands as a person types them: mistakes, launchers, version and help."""

from pathlib import Path

import pytest
import torch

from olmo_shard.train import checks as checks_module
from tests.support.commands import Main
from tests.support.configs import write_config, write_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.stepz=1"], r"train.stepz: unknown key"),
        (["parallel.expert_parallel=2"], r"expert_parallel = 2 does not divide the 1 rank"),
        (["train.global_batch_tokens=100"], r"100 is not a multiple of ranks x"),
        (["model.vocab_size=40"], r"is outside the vocabulary of 40 ids"),
        (["data.sources.0.path=none.bin"], r"no such file or folder: none.bin"),
        (["checkpoint.resume=/nowhere"], r"checkpoint /nowhere: no such checkpoint"),
        (["checkpoint.init_from=/nowhere"], r"checkpoint /nowhere: no such checkpoint"),
        (["train.steps=null", "train.epochs=0.01"], r"less than one step"),
        (["schedule.warmup_steps=7"], "schedule.warmup_steps = 7 do not fit into 6 steps"),
    ],
)
@pytest.mark.parametrize("command", ["train", "check"])
def test_mistakes_end_in_one_message_and_exit_code_2(
    tmp_path: Path, main: Main, command: str, arguments: list[str], message: str
) -> None:
    if command == "check" and "expert_parallel" in arguments[0]:
        arguments = [*arguments, "--nproc", "1"]
    code, printed = main(command, write_config(tmp_path), *arguments)
    assert code == 2
    assert printed.startswith("olmo-shard: ")
    assert message in printed
    assert "Traceback" not in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.threads=100000", "run.threads = 100000 is more than the"),
        ("run.device=cuda", "run.device = cuda, but torch finds no CUDA device"),
    ],
)
def test_training_wants_what_this_machine_has_and_a_check_does_not(
    tmp_path: Path, main: Main, override: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    config = write_config(tmp_path)
    code, printed = main("train", config, override)
    assert (code, message in printed) == (2, True)
    assert main("check", config, override)[0] == 0


def test_launchers_do_not_mix(tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    config = write_config(tmp_path)
    monkeypatch.setenv("RANK", "0")
    code, printed = main("train", config)
    assert (code, "WORLD_SIZE is missing, although RANK is set" in printed) == (2, True)
    monkeypatch.setenv("WORLD_SIZE", "1")
    code, printed = main("train", config, "--nproc", "2")
    assert (code, "drop --nproc, or unset RANK and WORLD_SIZE" in printed) == (2, True)


def test_an_id_found_while_reading_names_its_place(
    tmp_path: Path, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of data too large to scan before training, ids are checked as they are read."""
    config = write_config(tmp_path)
    write_tokens(tmp_path / "tokens.bin", vocab=65)
    monkeypatch.setattr(checks_module, "SCAN_LIMIT_BYTES", 0)
    code, printed = main("train", config)
    assert code == 2
    assert "id 64 at offset" in printed
    assert "Traceback" not in printed


def test_version_and_help(main: Main) -> None:
    code, printed = main("--version")
    assert code == 0
    assert printed.strip().count(".") >= 1
    code, printed = main("--help")
    assert all(command in printed for command in ("prepare", "check", "train"))
