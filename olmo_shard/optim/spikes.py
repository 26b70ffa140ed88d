"""Skips steps whose loss or gradient norm is far above those of the steps before (optional).

All values stay on the device and are equal on every rank, because they come from one all-reduce. So
every rank makes the same decision, without a host sync.
"""

import torch
from torch import Tensor

from olmo_shard.config import SpikeConfig


class SpikeFilter:
    """Compares a step with a rolling window of the steps that were applied before it.

    A value is a spike if it is above mean + sigmas x (standard deviation) of the last ``window``
    values. No step is skipped before the window is full. A skipped step does not enter the window.
    """

    def __init__(self, config: SpikeConfig, device: torch.device) -> None:
        self.config = config
        self.values = torch.zeros(2, config.window, dtype=torch.float64, device=device)
        """Losses and gradient norms, the newest last. The last ``count`` columns are filled."""
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        """Number of columns that hold values of steps."""
        watched = {"loss": [True, False], "grad_norm": [False, True], "both": [True, True]}
        self._watched = torch.tensor(watched[config.watch], device=device)

    def limits(self) -> Tensor:
        """FP64 [2]: the loss and the gradient norm above which the next step will be skipped."""
        mean, deviation = self.values.mean(dim=1), self.values.std(dim=1, correction=0)
        # An infinite limit lets every finite value pass: what is not watched, or a window not full.
        in_force = self._watched & (self.count == self.config.window)
        return torch.where(in_force, mean + self.config.sigmas * deviation, torch.inf)

    def should_apply(self, loss_and_norm: Tensor) -> Tensor:
        """Boolean scalar: whether to apply the step. If so, its values enter the window.

        :param loss_and_norm: FP64 [2]: mean cross-entropy of the global batch, gradient norm.
        """
        applied = loss_and_norm.isfinite().all() & (loss_and_norm <= self.limits()).all()
        # Every step computes the shifted window, and keeps it only if applied: no host sync.
        shifted = torch.cat([self.values[:, 1:], loss_and_norm[:, None]], dim=1)
        # A step that is skipped leaves no trace: a spike would raise the limits that follow it.
        self.values = torch.where(applied, shifted, self.values)
        self.count = (self.count + applied).clamp(max=self.config.window)
        return applied

    def state(self) -> list[list[float]]:
        """Losses and norms in the window, for a checkpoint. Synchronises with the device."""
        return self.values[:, self.config.window - int(self.count) :].tolist()

    def load_state(self, state: list[list[float]]) -> None:
        """Continue from a saved window. If it is longer than this one, its newest values count."""
        kept = torch.tensor(state, dtype=torch.float64).view(2, -1)[:, -self.config.window :]
        size = kept.shape[1]
        self.count.fill_(size)
        if size:
            self.values[:, -size:] = kept
