"""What ptxas says of a kernel that was compiled ahead of time, without a GPU."""

import re
import subprocess
from typing import NamedTuple

from triton import knobs


class PtxasReport(NamedTuple):
    registers: int
    spill_bytes: int


def ptxas_report(ptx: str, arch: int) -> PtxasReport:
    """Assemble PTX for sm_``arch`` and read the resources that a thread takes."""
    target = re.search(r"\.target (sm_\w+)", ptx)
    assert target is not None
    assert target[1].startswith(f"sm_{arch}")
    path = knobs.nvidia.ptxas_blackwell.path if arch >= 100 else knobs.nvidia.ptxas.path
    done = subprocess.run(
        [path, "-v", f"--gpu-name={target[1]}", "-o", "/dev/null", "-"],
        input=ptx,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes spill", done.stderr)
    assert registers is not None, done.stderr
    return PtxasReport(int(registers[1]), sum(int(spill) for spill in spills))
