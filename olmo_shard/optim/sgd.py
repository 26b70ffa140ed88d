"""Plain SGD with decoupled weight decay::

w = w (1 - lr decay) - lr g / divisor
"""

import torch

from olmo_shard.optim.update_rule import OptimizerSlice, StepScalars, UpdateRule


class SGD(UpdateRule):
    """SGD without momentum. It has no state, and shows scale errors that Adam hides."""

    state_names = ()

    def update(self, part: OptimizerSlice, scalars: StepScalars) -> None:
        """One step of SGD on a slice."""
        gradient = part.owned.gradient()
        clipped = gradient if scalars.divisor is None else gradient / scalars.divisor
        # A skipped gradient may be infinite or NaN, and zero times such a value is NaN.
        change = torch.where(scalars.skip == 0, clipped, 0)
        for settings, (weight_views, change_views) in part.split(part.owned.main, change):
            # A tensor, because whether to skip is known on the device alone.
            rate = torch.where(scalars.skip == 0, scalars.lr * settings.lr_multiplier, 0.0)
            for weights, step in zip(weight_views, change_views, strict=True):
                weights.mul_(1 - rate * settings.weight_decay).sub_(step.mul_(rate))
        part.owned.update_model()
