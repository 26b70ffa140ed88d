"""Where a run ends, also after a changed batch, and what it leaves out."""

from pathlib import Path

import pytest

from olmo_shard.config import Config, DataSource
from olmo_shard.data.budget import total_steps
from olmo_shard.data.coverage import describe_data, describe_end
from olmo_shard.data.loader import DataLoader
from olmo_shard.errors import ConfigurationError
from tests.support.configs import config_at, write_tokens


@pytest.mark.parametrize(
    ("end", "steps"),
    [
        ("train.steps=7", 7),
        ("train.tokens=1000", 3),
        ("train.epochs=1.0", 15),
        ("train.epochs=2.0", 31),
    ],
)
def test_the_end_is_the_last_whole_step(tmp_path: Path, end: str, steps: int) -> None:
    """250 sequences of 16 tokens, 16 sequences a step: an epoch is 15.6 steps."""
    overrides = [end] if "steps" in end else ["train.steps=null", end]
    config = config_at(tmp_path, *overrides)
    assert total_steps(config, DataLoader(config).num_sequences) == steps


def test_an_end_before_the_first_step_is_refused(tmp_path: Path) -> None:
    config = config_at(tmp_path, "train.steps=null", "train.epochs=0.01")
    with pytest.raises(
        ConfigurationError, match=r"train.epochs = 0.01 is 32 tokens, less than one"
    ):
        total_steps(config, 250)


def ending(folder: Path, end: str, batch: int) -> Config:
    batches = f"train.global_batch_tokens={batch}"
    return config_at(folder, "train.steps=null", end, batches, "train.micro_batch_tokens=16")


@pytest.mark.parametrize(
    ("end", "batch", "steps"),
    [
        ("train.tokens=20480", 1024, 20),
        ("train.tokens=20480", 2048, 10 + 5),
        ("train.tokens=20480", 512, 10 + 20),
        ("train.tokens=20480", 4096, 10 + 2),  # 2,048 tokens are left over
        ("train.tokens=20480", 16_384, 10),
        ("train.tokens=5000", 512, 10),  # the budget was lowered below what is done
        ("train.tokens=30720", 2048, 10 + 10),
        ("train.epochs=5.12", 2048, 10 + 5),  # 250 sequences an epoch
        ("train.epochs=5.12", 512, 10 + 20),
        ("train.epochs=3", 1024, 10 + 1),
    ],
)
def test_what_is_left_of_a_budget_is_spent_at_the_new_batch(
    tmp_path: Path, end: str, batch: int, steps: int
) -> None:
    """10 steps of 64 sequences x 16 tokens are done: 10,240 tokens."""
    assert total_steps(ending(tmp_path, end, batch), 250, step=10, drawn=640) == steps


def test_a_loader_counts_what_it_drew_before_and_after_a_changed_batch(tmp_path: Path) -> None:
    first = DataLoader(ending(tmp_path, "train.tokens=20480", 1024))
    for _ in range(10):
        first.next_window()
    second = DataLoader(ending(tmp_path, "train.tokens=20480", 512))
    second.load_state(first.state)
    for step in (10, 11, 12):
        assert second.total_steps(step) == 30
        second.next_window()
    third = DataLoader(ending(tmp_path, "train.tokens=20480", 2048))
    third.load_state(second.state)
    assert third.state.sequences == 10 * 64 + 3 * 32
    assert third.total_steps(13) == 13 + (20480 - 10 * 1024 - 3 * 512) // 2048 == 17


def test_epochs_count_as_typed(tmp_path: Path) -> None:
    """2.3 x 100 is 229.99... in binary floating point, and 230 sequences are meant."""
    config = ending(tmp_path, "train.epochs=2.3", 16)
    assert total_steps(config, 100) == 230


@pytest.mark.parametrize(
    ("end", "unused"),
    [
        ("train.steps=6", "; epochs by step 6: data.sources.0 0.38"),
        ("train.epochs=1", "10 sequence(s), 160 of the budget's 4,000 tokens (4.00%), fill no"),
        ("train.tokens=1000", "14 sequence(s), 232 of the budget's 1,000 tokens (23.20%), fill no"),
        ("train.tokens=1024", "0 sequence(s), 0 of the budget's 1,024 tokens (0.00%), fill no"),
    ],
)
def test_what_is_never_trained_on_is_said(tmp_path: Path, end: str, unused: str) -> None:
    """4,002 ids are 250 sequences of 16 tokens, the label of the last, and one id more."""
    config = config_at(tmp_path, *([] if "steps" in end else ["train.steps=null"]), end)
    lines = "\n".join(describe_data(DataLoader(config), 0))
    assert "unused    1 of 4,002 ids (0.02%) fill no sequence, at the ends of files" in lines
    assert unused in lines


def test_ids_are_left_over_at_the_end_of_each_file_and_sources_differ_in_epochs(
    tmp_path: Path,
) -> None:
    """3 files of 31 ids hold one sequence each, and 14 ids that fill no other."""
    base = config_at(tmp_path, "train.steps=3")
    paths = [str(write_tokens(tmp_path / f"{i}.bin", 31, seed=i)) for i in range(3)]
    small = DataSource(path=paths, dtype="uint16", weight=1.0)
    large = DataSource(path=str(tmp_path / "tokens.bin"), dtype="uint16", weight=3.0)
    data = base.data.model_copy(update={"sources": [small, large]})
    first, second = describe_data(DataLoader(base.model_copy(update={"data": data})), 0)
    assert "epochs by step 3: data.sources.0 4.00, data.sources.1 0.14" in first
    assert "unused    43 of 4,095 ids (1.05%) fill no sequence" in second


def test_the_end_is_explained(tmp_path: Path) -> None:
    loader = DataLoader(ending(tmp_path, "train.tokens=20480", 2048))
    loader.state.sequences = 640
    assert describe_end(loader, 10) == (
        "15 steps: 10 done, and 5 of 2,048 tokens within the 10,240 tokens left of "
        "train.tokens = 20480"
    )
    assert describe_end(DataLoader(config_at(tmp_path)), 2) == "6 steps"
