"""Which implementation of the kernels runs: decided here, once for a model."""

from typing import Literal

from olmo_shard.errors import ConfigurationError
from olmo_shard.kernels.language import INSTALLED, interpreting

Backend = Literal["triton", "reference"]
"""Triton kernels, or the plain-torch references beside them."""


def choose_backend(kernels: Literal["auto", "triton", "reference"], device_type: str) -> Backend:
    """What ``parallel.kernels`` comes to on a device: ``auto`` is Triton on CUDA, else reference.

    :raises ConfigurationError: where Triton is asked for, or needed, and cannot run.
    """
    if kernels == "reference" or (kernels == "auto" and device_type == "cpu"):
        return "reference"
    if not INSTALLED:
        raise ConfigurationError(
            f"parallel.kernels = {kernels} on {device_type} needs Triton, which is not installed; "
            "install triton, or set parallel.kernels to reference"
        )
    if device_type == "cpu" and not interpreting():
        raise ConfigurationError(
            "parallel.kernels = triton needs a GPU, this is a run on cpu; use auto or reference"
        )
    return "triton"
