"""Statistics of layers: one flat mapping from the layer that computes them to the log.

[Note: layer statistics] A layer returns a mapping from names to tensors. The mapping travels
through the model's output, the window's sums and the reduction over ranks without a change of its
names, so a new statistic costs two places: the layer that adds an entry, and the line in
``train/metrics.py`` that logs it. Each statistic is a sum over tokens, so that micro-batches and
ranks can be added. Layers may have different statistics, and a layer without any returns ``{}``.
"""

import torch
from torch import Tensor

LayerStats = dict[str, Tensor]
"""Additive statistics by name. The name ends with the letters of the tensor's dimensions."""


def stack_layers(layers: list[LayerStats]) -> LayerStats:
    """Stack each statistic over the layers that have it: from [...] per layer to [L, ...].

    :param layers: statistics of each layer, in layer order.
    """
    names = dict.fromkeys(name for stats in layers for name in stats)
    return {name: torch.stack([stats[name] for stats in layers if name in stats]) for name in names}
