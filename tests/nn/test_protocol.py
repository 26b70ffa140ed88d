"""Registered families and attentions, layer statistics, and counts of parameters and FLOPs."""

from typing import Any

import pytest
import torch
from torch import nn

from olmo_shard.config import ModelConfig
from olmo_shard.config.model import ATTENTIONS, MODEL_FAMILIES
from olmo_shard.nn.families import class_at, meta_model
from olmo_shard.nn.layer_stats import stack_layers
from olmo_shard.nn.protocol import LanguageModel
from olmo_shard.nn.readers import undeclared_classes
from tests.support.tiny import model_config


def test_every_registered_name_has_a_class() -> None:
    for path in MODEL_FAMILIES.values():
        assert issubclass(class_at(path), LanguageModel)
    for path in ATTENTIONS.values():
        assert issubclass(class_at(path), nn.Module)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'other' is none of transformer"):
        model_config(family="other")
    with pytest.raises(ValueError, match="'other' is none of grouped_query"):
        model_config(attention="other")


def test_this_packages_modules_declare_what_they_read() -> None:
    dense = model_config(moe=None, n_dense_layers=0)
    for config in (model_config(), dense, model_config(qk_norm="full")):
        assert undeclared_classes(meta_model(config)) == []


def test_layers_may_have_different_statistics() -> None:
    """Each statistic is stacked over the layers that have it, in layer order."""
    layers: list[dict[str, Any]] = [
        {"a": torch.tensor(1.0)},
        {},
        {"a": torch.tensor(2.0), "b_E": torch.tensor([3.0, 4.0])},
    ]
    stacked = stack_layers(layers)
    assert {name: figure.tolist() for name, figure in stacked.items()} == {
        "a": [1.0, 2.0],
        "b_E": [[3.0, 4.0]],
    }


def test_counts_of_a_worked_example() -> None:
    """One dense and one MoE layer: top 2 of 4 experts and one shared expert, width 3 each."""
    moe = {"num_experts": 4, "top_k": 2, "hidden": 3, "num_shared_experts": 1}
    config = ModelConfig.model_validate({
        "vocab_size": 10, "d_model": 4, "n_layers": 2, "n_heads": 2, "ffn_hidden": 8,
        "n_dense_layers": 1, "moe": moe,
    })  # fmt: skip
    model = meta_model(config)
    expert = 3 * 4 * 3
    fixed = 2 * 10 * 4 + 2 * 4 * 4 * 4 + 5 * 4 + 3 * 4 * 8 + 4 * 4 + expert
    assert model.parameter_counts() == (fixed + 4 * expert, fixed + 2 * expert)
    # All active parameters multiply but the embedding; attention adds 6 x layers x S x 4.
    assert model.flops_per_token(3) == 6 * (fixed + 2 * expert - 10 * 4) + 6 * 2 * 3 * 4
