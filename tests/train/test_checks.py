"""The list of rules before a run: its order, its parties, and what one rule leaves to the next."""

from pathlib import Path
from typing import get_args

import pytest

from olmo_shard.errors import ConfigurationError, OlmoShardError
from olmo_shard.train import checks
from olmo_shard.train.checks import CHECKS, Check, Party, PlannedRun, run_checks
from tests.support.commands import Main
from tests.support.configs import config_at, write_config, write_tokens

BROKEN = {
    # From the first rule to the last: an override that breaks it, and a part of its error.
    "groups": ("parallel.expert_parallel=4", "does not divide the 2 rank"),
    "batch": ("train.global_batch_tokens=96", "is not a multiple of ranks x"),
    "kernels": ("parallel.kernels=triton", "parallel.kernels = triton needs a GPU"),
    "folder": ("run.dir=/dev/null/run", "run.dir = /dev/null/run cannot be written"),
    "files": ("data.sources.0.path=none.bin", "no such file or folder: none.bin"),
    "checkpoint": ("checkpoint.init_from=/none", "checkpoint /none: no such checkpoint"),
    "schedule": ("schedule.warmup_steps=7", "do not fit into 6 steps"),
    "ids": ("model.vocab_size=40", "is outside the vocabulary of 40 ids"),
}


def test_each_rule_is_a_sentence_with_parties() -> None:
    for check in CHECKS:
        assert check.rule[0].isupper()
        assert check.rule.endswith(".")
        assert check.parties
        assert set(check.parties) <= set(get_args(Party))
    assert len({check.rule for check in CHECKS}) == len(CHECKS) == 13


@pytest.mark.parametrize("party", ["check", "launcher"])
def test_the_first_broken_rule_of_the_list_is_reported(tmp_path: Path, party: Party) -> None:
    """Each rule by itself, and together with all rules after it."""
    names = list(BROKEN)
    for index, name in enumerate(names):
        for broken in ([name], names[index:]):
            overrides = [BROKEN[each][0] for each in broken]
            with pytest.raises(OlmoShardError) as error:
                run_checks(PlannedRun(config_at(tmp_path, *overrides), 2), party)
            assert BROKEN[name][1] in str(error.value), broken


def test_a_party_verifies_its_own_rules_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[int] = []

    def rule(number: int, *parties: Party) -> Check:
        return Check(f"Rule {number}.", lambda _: verified.append(number), parties)

    rules = (rule(1, "launcher", "rank"), rule(2, "every rank"), rule(3, "rank"), rule(4, "check"))
    monkeypatch.setattr(checks, "CHECKS", rules)
    run_checks(PlannedRun(config_at(tmp_path), 1), "rank")
    assert verified == [1, 3]


def test_the_rules_of_the_layout_need_no_machine_and_no_data(tmp_path: Path) -> None:
    config = config_at(tmp_path, "data.sources.0.path=none.bin", "parallel.kernels=triton")
    run_checks(PlannedRun(config, 2), "rank")
    with pytest.raises(ConfigurationError, match="= 3 x 32 = 96"):
        run_checks(PlannedRun(config, 3), "rank")


@pytest.mark.parametrize(
    ("limit", "found"), [(None, True), (8004, True), (8003, False), (0, False)]
)
def test_ids_are_scanned_up_to_a_size(tmp_path: Path, limit: int | None, found: bool) -> None:
    """The only file has 4,002 ids of two bytes."""
    config = config_at(tmp_path, "model.vocab_size=40", "data.validation={}", "eval.every=0")
    run = PlannedRun(config, 1, scan_limit=limit)
    if found:
        with pytest.raises(OlmoShardError, match="outside the vocabulary of 40 ids"):
            run_checks(run, "host")
    else:
        run_checks(run, "host")


def test_a_check_of_a_finished_run_still_reads_all_ids(tmp_path: Path, main: Main) -> None:
    config = write_config(tmp_path)
    held_out = write_tokens(tmp_path / "held_out.bin")
    overrides = [f"data.validation.held_out.path={held_out}", "eval.every=0", "train.steps=3"]
    assert main("train", config, *overrides)[0] == 0
    code, printed = main("check", config, *overrides)
    assert (code, "# nothing to train" in printed) == (0, True)
    assert main("check", config, *overrides, "schedule.warmup_steps=9")[0] == 0
    write_tokens(held_out, vocab=65)
    code, printed = main("check", config, *overrides)
    assert (code, "id 64 at offset" in printed) == (2, True)
