"""Peak rates by the names of devices."""

from olmo_shard.nn.peak import peak_flops


def test_peaks_are_those_of_the_very_device() -> None:
    known = {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H200": 989e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA B200": 2250e12,
    }
    assert {name: peak_flops(name) for name in known} == known
    for other in ("NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GB200", "L4"):
        assert peak_flops(other) is None, other
