"""The choice between Triton kernels and their plain-torch references, made once per run."""

from typing import Literal

from olmo_shard.errors import ConfigurationError
from olmo_shard.kernels.language import INSTALLED, interpreting

Backend = Literal["triton", "reference"]
"""``triton`` runs the Triton kernels, ``reference`` the plain-torch functions beside them."""


def choose_backend(kernels: Literal["auto", "triton", "reference"], device_type: str) -> Backend:
    """Return the back end that ``parallel.kernels`` selects on a device.

    ``auto`` selects Triton on CUDA and the reference on CPUs.

    :param kernels: the value of ``parallel.kernels``.
    :param device_type: ``cpu`` or ``cuda``.
    :raises ConfigurationError: if the selected back end is Triton and Triton cannot run here.
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
