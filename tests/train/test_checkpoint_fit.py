"""Which models of a checkpoint fit the model of a run."""

from pathlib import Path

import pytest

from olmo_shard.errors import CheckpointError
from olmo_shard.train.checkpoint_fit import check_same_model
from tests.support.tiny import model_config

PATH = Path("step-00000001")


def test_a_field_that_is_newer_than_the_checkpoint_has_its_default() -> None:
    config = model_config()
    saved = config.model_dump()
    for name in ("family", "attention"):
        del saved[name]
    check_same_model(PATH, saved, config)


def test_a_field_that_changes_the_meaning_of_weights_is_named() -> None:
    saved = model_config().model_dump() | {"attention": "other"}
    expected = "model.attention = 'grouped_query' instead of 'other'"
    with pytest.raises(CheckpointError, match=expected):
        check_same_model(PATH, saved, model_config())
