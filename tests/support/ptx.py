"""Read the PTX of a kernel that was compiled ahead of time; no GPU is needed."""

import re
import subprocess
from typing import NamedTuple

from triton import knobs


class PtxasReport(NamedTuple):
    """Registers per thread, and bytes of spills."""

    registers: int
    spill_bytes: int


def ptxas_report(ptx: str, arch: int) -> PtxasReport:
    """Assemble PTX for sm_``arch``, and return the resources per thread."""
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


def loops_with(ptx: str, instruction: str) -> list[str]:
    """The loops with an instruction: the lines from a label to a branch back to that label."""
    lines = ptx.splitlines()
    line_of_label: dict[str, int] = {}
    loops: list[str] = []
    for number, line in enumerate(lines):
        if label := re.match(r"(\$\w+):", line):
            line_of_label[label[1]] = number
        branch = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        if branch and branch[1] in line_of_label:
            loops.append("\n".join(lines[line_of_label[branch[1]] : number + 1]))
    return [loop for loop in loops if instruction in loop]


def waits_for_copies(ptx: str) -> list[int]:
    """Per wait, in order: the number of groups of asynchronous copies that may stay in flight.

    Zero waits for all copies.
    """
    counts = re.findall(r"cp\.async\.(?:wait_group\s+(\d+)|wait_all)", ptx)
    return [int(count or 0) for count in counts]
