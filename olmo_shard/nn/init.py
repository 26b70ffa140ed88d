"""Initial weights that do not depend on the layout of a run.

Every parameter has its own generator, seeded by (run seed, parameter name), and every routed expert
one seeded by (run seed, parameter name, global expert id). A rank therefore draws only the experts
that it holds, and the weights are equal for every world size, EP degree and mode. They are drawn on
the CPU, so they are equal on every device, too.

A module class names its special weights in two attributes, by names relative to the module:
``starts_at_one`` (norms) and ``residual_outputs`` (the last weight of a branch that is added to the
residual stream).
"""

import hashlib
import math

import torch
from torch import Tensor, nn

from olmo_shard.config import ModelConfig


def initial_tensor(
    model: nn.Module,
    config: ModelConfig,
    name: str,
    shape: torch.Size,
    seed: int,
    experts: range | None = None,
) -> Tensor:
    """FP32 initial value of a parameter, on the CPU.

    Weights that start at one are one. All others are normal with standard deviation ``init_std``,
    which residual outputs divide by sqrt(2 n_layers) (GPT-2).

    :param model: the model whose modules say which weights are special.
    :param name: the parameter's name in the model.
    :param shape: the parameter's shape; with ``experts``, dimension 0 counts these.
    :param seed: seed of the run.
    :param experts: global ids of the routed experts in a stacked tensor.
    """
    if _declares(model, "starts_at_one", name):
        return torch.ones(shape)
    residual = _declares(model, "residual_outputs", name)
    std = config.init_std / math.sqrt(2 * config.n_layers) if residual else config.init_std
    # One generator per expert: a rank draws its experts without drawing those before them.
    if experts is None:
        return _normal(shape, std, f"{seed}/{name}")
    return torch.stack([_normal(shape[1:], std, f"{seed}/{name}/{expert}") for expert in experts])


def _declares(model: nn.Module, attribute: str, name: str) -> bool:
    """Whether a module around the parameter lists it in a class attribute."""
    # Walk from the model down to the parameter's owner; each may know the rest of the name.
    parts = name.split(".")
    for depth in range(len(parts)):
        module = model.get_submodule(".".join(parts[:depth]))
        if ".".join(parts[depth:]) in getattr(module, attribute, ()):
            return True
    return False


def _normal(shape: torch.Size, std: float, key: str) -> Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    # The shift keeps the seed below 2^63, the largest that a generator takes.
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0, std, generator=generator)
