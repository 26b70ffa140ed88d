"""Peak FLOP/s of devices, for MFU.

This file imports nothing from the package, so a machine with only torch and Triton can use the
table.
"""

import re

_PEAK_FLOPS = {
    r"\bH100 .*HBM3\b": 989e12,
    r"\bH200$": 989e12,
    r"\bA100\b": 312e12,
    r"\bB200$": 2250e12,
}
"""Dense bf16 FLOP/s as the vendor states them, by a pattern of the device's name. The table leaves
out slower variants of a chip (PCIe, NVL)."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device.

    :param device_name: the device's name as CUDA reports it.
    :returns: ``None`` for an unknown name, since a wrong MFU is worse than none.
    """
    peaks = (peak for name, peak in _PEAK_FLOPS.items() if re.search(name, device_name))
    return next(peaks, None)
