"""Where NVSHMEM's host library and bitcode are looked for, on made-up installations."""

from importlib import metadata
from pathlib import Path

import pytest

from olmo_shard.dispatch.heap import nvshmem_library
from olmo_shard.dispatch.heap.nvshmem_library import (
    NvshmemLibrary,
    check_host_library,
    find_bitcode,
    installed_library,
)
from olmo_shard.errors import HeapError

FAMILIES = [75, 80, 89, 90, 100]
WAY_OUT = "; on one host, parallel.symmetric_heap: torch needs no NVSHMEM$"


def bitcode_in(folder: Path, *archs: int, single: bool = False) -> Path:
    names = [f"libnvshmem_device_sm_{arch}.bc" for arch in archs]
    for name in [*names, "libnvshmem_device.bc"] if single else names:
        (folder / name).touch()
    return folder


def install(site: Path, package: str, version: str) -> None:
    info = site / f"{package.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """An empty folder for packages, in place of this Python's."""

    def distribution(name: str) -> metadata.Distribution:
        for found in metadata.distributions(name=name, path=[str(tmp_path)]):
            return found
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(nvshmem_library, "distribution", distribution)
    return tmp_path


def host_library_in(site: Path) -> Path:
    folder = site / "nvidia" / "nvshmem" / "lib"
    folder.mkdir(parents=True)
    (folder / "libnvshmem_host.so.3").touch()
    return folder


def test_the_single_bitcode_serves_every_gpu(tmp_path):
    bitcode_in(tmp_path, single=True)
    for capability in [(7, 0), (8, 6), (9, 0), (12, 1)]:
        assert find_bitcode(tmp_path, capability) == tmp_path / "libnvshmem_device.bc"


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((7, 5), 75), ((8, 0), 80), ((8, 6), 80), ((8, 9), 89), ((9, 0), 90), ((10, 3), 100)],
)
@pytest.mark.parametrize("single", [False, True])
def test_the_nearest_lower_arch_of_the_family_is_taken(tmp_path, capability, arch, single):
    bitcode_in(tmp_path, *FAMILIES, single=single)
    assert find_bitcode(tmp_path, capability).name == f"libnvshmem_device_sm_{arch}.bc"


def test_the_single_bitcode_comes_after_the_familys(tmp_path):
    bitcode_in(tmp_path, 80, 90, single=True)
    assert find_bitcode(tmp_path, (12, 0)).name == "libnvshmem_device.bc"


@pytest.mark.parametrize("capability", [(7, 0), (8, 7), (12, 0)])
def test_a_higher_arch_or_another_family_is_refused(tmp_path, capability):
    bitcode_in(tmp_path, 75, 89, 90, 100)
    arch = f"{capability[0]}{capability[1]}"
    here = r"libnvshmem_device_sm_100\.bc, libnvshmem_device_sm_75\.bc, .*sm_89\.bc, .*sm_90\.bc"
    message = rf"{tmp_path} holds no NVSHMEM bitcode for sm_{arch} \(.*\), only {here}{WAY_OUT}"
    with pytest.raises(HeapError, match=message):
        find_bitcode(tmp_path, capability)


def test_a_folder_without_bitcode_is_named_with_what_was_looked_for(tmp_path):
    looked_for = r"libnvshmem_device_sm_81\.bc, libnvshmem_device_sm_80\.bc, libnvshmem_device\.bc"
    message = rf"^{tmp_path} holds no NVSHMEM bitcode \({looked_for}\){WAY_OUT}"
    with pytest.raises(HeapError, match=message):
        find_bitcode(tmp_path, (8, 1))


@pytest.mark.parametrize(("cuda", "major"), [("13.0", "13"), ("12.8", "12")])
def test_the_wheel_for_torchs_cuda_is_found(site, cuda, major):
    folder = host_library_in(site)
    install(site, f"nvidia-nvshmem-cu{major}", "3.4.5")
    install(site, f"nvshmem4py-cu{major}", "0.4.1")
    assert installed_library(cuda) == (folder, f"nvidia-nvshmem-cu{major}", "3.4.5")


def test_a_torch_without_cuda_is_refused(site):
    host_library_in(site)
    with pytest.raises(HeapError, match=f"^NVSHMEM needs a torch built with CUDA.*{WAY_OUT}"):
        installed_library(None)


MISSING = {
    "nothing": ([], r"^nvidia-nvshmem-cu13 is not installed, and torch is built with CUDA 13\.0"),
    "another CUDA's": (
        ["nvidia-nvshmem-cu12", "nvshmem4py-cu12"],
        r"^nvidia-nvshmem-cu13 is not installed, only nvidia-nvshmem-cu12, and torch",
    ),
    "both": (
        ["nvidia-nvshmem-cu12", "nvidia-nvshmem-cu13", "nvshmem4py-cu13"],
        "^nvidia-nvshmem-cu13 and nvidia-nvshmem-cu12 are both installed, .*uninstall both, then",
    ),
    "no bindings": (["nvidia-nvshmem-cu13"], "^nvshmem4py-cu13 is not installed"),
    "another CUDA's bindings": (
        ["nvidia-nvshmem-cu13", "nvshmem4py-cu12"],
        "^nvshmem4py-cu13 is not installed",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_what_is_not_installed_is_named_with_the_command(site, case):
    packages, message = MISSING[case]
    host_library_in(site)
    for package in packages:
        install(site, package, "3.4.5")
    command = r"pip install 'olmo-shard\[nvshmem\]'"
    with pytest.raises(HeapError, match=f"{message}.* {command}{WAY_OUT}"):
        installed_library("13.0")


def test_the_command_for_cuda_12_names_the_packages(site):
    command = "pip install nvidia-nvshmem-cu12 nvshmem4py-cu12"
    with pytest.raises(HeapError, match=f": {command}{WAY_OUT}"):
        installed_library("12.8")


def test_a_wheel_without_its_host_library_is_refused(site):
    (host_library_in(site) / "libnvshmem_host.so.3").unlink()
    install(site, "nvidia-nvshmem-cu13", "3.4.5")
    install(site, "nvshmem4py-cu13", "0.4.1")
    message = r"lib holds no libnvshmem_host\.so\.\*, though nvidia-nvshmem-cu13 3\.4\.5 is"
    with pytest.raises(HeapError, match=f"{message}.*{WAY_OUT}"):
        installed_library("13.0")


@pytest.mark.parametrize(
    ("wheel", "loaded"), [("3.4.5", "3.4.5"), ("3.4.5.post1", "3.4.5"), ("3.04.5", "3.4.5")]
)
def test_a_host_library_of_the_wheels_version_is_right(wheel, loaded):
    check_host_library(NvshmemLibrary(Path("/lib"), "nvidia-nvshmem-cu13", wheel), loaded)


@pytest.mark.parametrize("loaded", ["3.4.4", "3.5.5", "2.4.5", "3.4"])
def test_another_host_library_is_refused_by_both_versions(loaded):
    library = NvshmemLibrary(Path("/lib"), "nvidia-nvshmem-cu13", "3.4.5")
    message = (
        rf"^the host library of NVSHMEM in this process is {loaded}, the bitcode is of "
        rf"nvidia-nvshmem-cu13 3\.4\.5: .*{WAY_OUT}"
    )
    with pytest.raises(HeapError, match=message):
        check_host_library(library, loaded)
