"""From the config's names of model parts to their classes.

``MODEL_FAMILIES`` and ``ATTENTIONS`` in ``config/model.py`` hold one line per family and per
attention: its name and the import path of its class. A class is imported when a model is built.
"""

import importlib
from typing import Any

import torch

from olmo_shard.config.model import MODEL_FAMILIES, ModelConfig
from olmo_shard.nn.protocol import LanguageModel


def build_model(config: ModelConfig) -> LanguageModel:
    """A model on torch's default device; ``nn.init`` gives it weights."""
    return class_at(MODEL_FAMILIES[config.family])(config)


def meta_model(config: ModelConfig) -> LanguageModel:
    """A model without storage, on the meta device: the form that ``parallelize`` takes."""
    with torch.device("meta"):
        return build_model(config)


def class_at(path: str) -> Any:
    """The class at an import path of the form ``package.module:Class``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
