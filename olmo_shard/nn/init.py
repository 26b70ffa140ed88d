"""Initial weights that do not depend on the layout.

Every parameter has a generator of its own, seeded by (run seed, parameter name), and routed experts
one by (run seed, parameter name, global expert id). So a rank draws no experts but its own, and a
model comes out the same for every world size, EP degree and mode. Drawn on the CPU, so it is also
the same on every device.
"""

import hashlib
import math

import torch
from torch import Tensor

from olmo_shard.config import ModelConfig

_RESIDUAL_OUTPUTS = ("wo.weight", "w_down.weight", "w_down")


def initial_tensor(
    config: ModelConfig, name: str, shape: torch.Size, seed: int, experts: range | None = None
) -> Tensor:
    """FP32 initial value of a parameter on the CPU.

    Norm weights are one; all else is normal with ``init_std``, divided by sqrt(2 n_layers) where
    the output is added to the residual stream (GPT-2).

    :param name: the parameter's name in the model.
    :param shape: its shape; the first dimension counts ``experts`` where they are given.
    :param experts: global ids of the routed experts in a stacked tensor.
    """
    if "norm" in name:
        return torch.ones(shape)
    residual = name.endswith(_RESIDUAL_OUTPUTS)
    std = config.init_std / math.sqrt(2 * config.n_layers) if residual else config.init_std
    if experts is None:
        return _normal(shape, std, f"{seed}/{name}")
    return torch.stack([_normal(shape[1:], std, f"{seed}/{name}/{expert}") for expert in experts])


def _normal(shape: torch.Size, std: float, key: str) -> Tensor:
    digest = hashlib.sha256(key.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape).normal_(0, std, generator=generator)
