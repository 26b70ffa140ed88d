"""Peak rates of devices, for MFU.

This file imports nothing of the package: a machine with torch and Triton alone can use the table.
"""

import re

_PEAK_FLOPS = {
    r"\bH100 .*HBM3\b": 989e12,
    r"\bH200$": 989e12,
    r"\bA100\b": 312e12,
    r"\bB200$": 2250e12,
}
"""Dense bf16 FLOP/s by a pattern of the device's name, as the vendor states them. Slower variants
of a chip (PCIe, NVL) are not in the table."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device; ``None`` for an unknown name, since a wrong MFU is worse.

    :param device_name: the name that CUDA gives the device.
    """
    found = (peak for name, peak in _PEAK_FLOPS.items() if re.search(name, device_name))
    return next(found, None)
