"""Section ``run``: the run's folder, and the resources that it uses."""

from typing import Literal

from pydantic import Field

from olmo_shard.config.section import Section


class RunConfig(Section):
    """The run's folder, seed and device, and limits per rank."""

    dir: str = Field(default="runs/default", min_length=1)
    """Folder of the run: the resolved config, records, checkpoints and W&B files."""
    seed: int = Field(default=1234, ge=0)
    """Seed of the initial weights, of the data order and of the random numbers of each step."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of all tensors. ``auto`` is ``cuda`` if torch finds a CUDA device, else ``cpu``."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads per rank. Null divides the machine's cores evenly among its ranks."""
    timeout_seconds: int = Field(default=600, ge=10, le=7 * 86_400)
    """Longest time in seconds that a rank waits for its peers in a collective operation."""
