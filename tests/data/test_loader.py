"""Batches, mixtures, epochs, document masks, validation sets."""

import numpy as np
import pytest
import torch

from olmo_shard.config import Config, DataSource
from olmo_shard.data.loader import DataLoader, make_microbatch
from olmo_shard.data.validation import open_validation
from olmo_shard.errors import CheckpointError
from olmo_shard.nn.losses import IGNORE_INDEX
from tests.support.configs import config_at, write_tokens


def stream(config: Config, windows: int, world_size: int) -> list[list[int]]:
    """First ids of the sequences of each global batch, gathered over the ranks."""
    loaders = [DataLoader(config, rank, world_size) for rank in range(world_size)]
    batches = []
    for _ in range(windows):
        parts = [micro for loader in loaders for micro in loader.next_window()]
        batches.append(torch.cat([part.tokens_BS for part in parts]).flatten().tolist())
    return batches


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_global_batches_do_not_depend_on_the_ranks(tmp_path, world_size):
    config = config_at(tmp_path)
    assert stream(config, 20, world_size) == stream(config, 20, 1)


def test_global_batches_do_not_depend_on_the_micro_batch(tmp_path):
    assert stream(config_at(tmp_path), 5, 2) == stream(
        config_at(tmp_path, "train.micro_batch_tokens=128"), 5, 2
    )


def test_an_epoch_holds_each_sequence_once_and_the_next_is_shuffled_anew(tmp_path):
    config = config_at(tmp_path, "train.global_batch_tokens=32", "train.micro_batch_tokens=16")
    loader = DataLoader(config)
    source = loader.sources[0]
    assert source.num_sequences == 250
    orders = [[source.shuffled(e * 250 + i, 5) for i in range(250)] for e in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(250))
    assert orders[0] != orders[1]
    assert [source.shuffled(i, 6) for i in range(250)] != orders[0]


def test_labels_are_the_next_ids(tmp_path):
    ids = np.fromfile(write_tokens(tmp_path / "t.bin"), dtype=np.uint16)
    source = DataLoader(config_at(tmp_path)).sources[0]
    batch = make_microbatch([source.read(7)], [None])
    assert batch.tokens_BS[0].tolist() == ids[112:128].tolist()
    assert batch.labels_BS[0].tolist() == ids[113:129].tolist()
    assert batch.documents_BS is None


def test_a_resumed_loader_goes_on_where_it_stopped(tmp_path):
    config = config_at(tmp_path)
    loader = DataLoader(config)
    for _ in range(17):
        loader.next_window()
    resumed = DataLoader(config)
    resumed.load_state(loader.state)
    for _ in range(3):
        for mine, other in zip(loader.next_window(), resumed.next_window(), strict=True):
            assert torch.equal(mine.tokens_BS, other.tokens_BS)
    for change, message in [
        ({"seed": 4}, r"run\.seed = 3, but the checkpoint was trained with 4"),
        ({"sequence_length": 8}, r"data\.sequence_length = 16, but"),
        ({"document_masking": True}, r"data\.document_masking = False, but"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            resumed.load_state(loader.state.model_copy(update=change))


def test_sources_are_mixed_by_weight(tmp_path):
    base = config_at(tmp_path)
    other = write_tokens(tmp_path / "other.bin", 900, seed=1)
    sources = [
        DataSource(path=str(tmp_path / "tokens.bin"), dtype="uint16", weight=3.0),
        DataSource(path=str(other), dtype="uint16", weight=1.0),
    ]
    data = base.data.model_copy(update={"sources": sources})
    loader = DataLoader(base.model_copy(update={"data": data}))
    for step in range(1, 30):
        loader.next_window()
        taken = loader.state.sequences
        assert taken == 16 * step
        assert loader.state.drawn[0] == pytest.approx(0.75 * taken, abs=1)


def test_changed_weights_count_from_the_resume_on(tmp_path):
    base = config_at(tmp_path)
    write_tokens(tmp_path / "other.bin", 900, seed=1)

    def mixed(*weights: float) -> DataLoader:
        names = ("tokens.bin", "other.bin")
        sources = [
            DataSource(path=str(tmp_path / name), dtype="uint16", weight=weight)
            for name, weight in zip(names, weights, strict=True)
        ]
        data = base.data.model_copy(update={"sources": sources})
        return DataLoader(base.model_copy(update={"data": data}))

    first = mixed(1.0, 1.0)
    for _ in range(10):
        first.next_window()
    resumed = mixed(1.0, 3.0)
    resumed.load_state(first.state)
    for _ in range(10):
        resumed.next_window()
    assert first.state.drawn == [80, 80]
    assert resumed.state.drawn == [80 + 40, 80 + 120]


def test_document_masking_ignores_labels_that_cross():
    batch = make_microbatch([np.array([5, 6, 0, 7, 8, 0, 9])], [0])
    assert batch.tokens_BS.tolist() == [[5, 6, 0, 7, 8, 0]]
    assert batch.labels_BS.tolist() == [[6, 0, IGNORE_INDEX, 8, 0, IGNORE_INDEX]]
    assert batch.documents_BS is not None
    assert batch.documents_BS.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert batch.num_labelled() == 4


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_counts_each_sequence_once_with_equal_forwards(tmp_path, world_size):
    (validation,) = open_validation(config_at(tmp_path))
    assert validation.num_sequences == 20
    parts = [list(validation.batches(rank, world_size)) for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1
    shapes = {batch.tokens_BS.shape for part in parts for batch in part}
    assert shapes == {(2, 16)}
    labelled = [
        tuple(row.tolist())
        for part in parts
        for batch in part
        for row, labels in zip(batch.tokens_BS, batch.labels_BS, strict=True)
        if (labels != IGNORE_INDEX).all()
    ]
    assert len(labelled) == len(set(labelled)) == 20


def test_a_micro_batch_moves_to_a_device():
    batch = make_microbatch([np.arange(5)], [3]).to(torch.device("meta"))
    assert batch.tokens_BS.is_meta
    assert batch.documents_BS is not None
    assert batch.documents_BS.is_meta
