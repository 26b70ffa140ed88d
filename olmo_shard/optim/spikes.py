"""Steps whose loss or gradient norm is far above that of the steps before are skipped, if asked.

All figures live on the device and are equal on every rank, since they come from one all-reduce: so
every rank decides alike, and none waits for the host.
"""

import torch
from torch import Tensor

from olmo_shard.config import SpikeConfig


class SpikeFilter:
    """Judges a step by a rolling window of the steps applied before it.

    A value is a spike if it is above mean + sigmas x (standard deviation) of the last ``window``
    values. Nothing is judged before the window is full, and a skipped step does not enter it.
    """

    def __init__(self, config: SpikeConfig, device: torch.device) -> None:
        self.config = config
        self.values = torch.zeros(2, config.window, dtype=torch.float64, device=device)
        """Losses and gradient norms, the newest last."""
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        """How many of them, from the end, are from steps."""
        watched = {"loss": [True, False], "grad_norm": [False, True], "both": [True, True]}
        self._watched = torch.tensor(watched[config.watch], device=device)

    def limits(self) -> Tensor:
        """FP64 [2]: the loss and the gradient norm above which the next step will be skipped."""
        mean, deviation = self.values.mean(dim=1), self.values.std(dim=1, correction=0)
        judged = self._watched & (self.count == self.config.window)
        return torch.where(judged, mean + self.config.sigmas * deviation, torch.inf)

    def judge(self, figures: Tensor) -> Tensor:
        """Boolean scalar: whether to apply the step; if so its figures enter the window.

        :param figures: FP64 [2]: mean cross-entropy of the global batch, gradient norm.
        """
        applied = figures.isfinite().all() & (figures <= self.limits()).all()
        shifted = torch.cat([self.values[:, 1:], figures[:, None]], dim=1)
        self.values = torch.where(applied, shifted, self.values)
        self.count = (self.count + applied).clamp(max=self.config.window)
        return applied

    def state(self) -> list[list[float]]:
        """Losses and norms in the window, for a checkpoint; it waits for the device."""
        return self.values[:, self.config.window - int(self.count) :].tolist()

    def load_state(self, state: list[list[float]]) -> None:
        """Go on from a saved window; of a longer one the newest values."""
        kept = torch.tensor(state, dtype=torch.float64).view(2, -1)[:, -self.config.window :]
        size = kept.shape[1]
        self.count.fill_(size)
        if size:
            self.values[:, -size:] = kept
