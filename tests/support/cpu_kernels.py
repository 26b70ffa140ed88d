"""The CPU kernels of torch and its libraries.

They depend on the processor and on three environment variables. Each set of kernels adds in a
different order.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

VARIABLES = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "ONEDNN_MAX_CPU_ISA")

_PROBE = """
import torch
a = torch.ones(64, 64)
a @ a  # by MKL
image, window = torch.ones(4, 16, 64, 64), torch.ones(16, 16, 5, 5)
torch.nn.functional.conv2d(image, window)  # by oneDNN
"""


def describe() -> str:
    """One line with the vector instructions of torch's kernels, and the variables that are set."""
    given = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"CPU kernels: {capability}, torch {torch.__version__}, {' '.join(given) or 'as found'}"


def compile_cache() -> Path:
    """Folder for the code that torch.compile generates with this set of kernels.

    torch looks generated code up by the traced operations alone. In a shared folder, code with
    the vector instructions of one set would be built with the flags of another, and would not
    compile.
    """
    user, capability = os.getuid(), torch.backends.cpu.get_cpu_capability()
    return Path(tempfile.gettempdir()) / f"olmo_shard-tests-{user}" / f"compiled-{capability}"


def probed() -> dict[str, str]:
    """Library (torch, MKL, oneDNN) to the kernels that a new process reports."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE],
        env=os.environ | {"MKL_VERBOSE": "1", "ONEDNN_VERBOSE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    mkl = re.search(r"CNR:(\S+)", done.stdout)
    onednn = re.search(r"cpu,isa:(.+)", done.stdout)
    return {
        "torch": torch.backends.cpu.get_cpu_capability(),
        "MKL": mkl[1] if mkl else "absent",
        "oneDNN": onednn[1] if onednn else "absent",
    }
