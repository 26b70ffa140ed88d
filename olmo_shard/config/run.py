"""Section ``run``: where the run lives and what it runs on."""

from typing import Literal

from pydantic import Field

from olmo_shard.config.base import Section


class RunConfig(Section):
    dir: str = Field(default="runs/default", min_length=1)
    """Folder of the run: resolved config, metrics, checkpoints, W&B files."""
    seed: int = Field(default=1234, ge=0)
    """Seed of the weights, of the data order and of the random numbers of each step."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where tensors live; ``auto`` takes CUDA if torch finds a device."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of each rank; null shares the machine's cores among its ranks."""
    timeout_seconds: int = Field(default=600, ge=10, le=7 * 86_400)
    """How long a rank waits for its peers in a collective, in seconds."""
