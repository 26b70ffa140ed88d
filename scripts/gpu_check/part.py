"""Run one part of the GPU check; ``__main__.py`` starts a process per part.

After an illegal memory access a process can no longer use its CUDA context, and a kernel that hangs
never returns. A process per part limits both to that part.

At import this file needs the standard library alone. The imports of torch and of the part's modules
are checks, too: an import that fails becomes a failed row with the reason.
"""

import argparse
import gc
import importlib
import json
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from scripts.gpu_check.row import Check, Row

if TYPE_CHECKING:
    import torch

    from scripts.gpu_check.compare import Setup

PACKAGE = "scripts.gpu_check"
MODULES = {
    "machine": ("machine",),
    "a": ("kernels", "grouped"),
    "b": ("virtual_ranks",),
    "c": ("speed",),
    "d": ("training",),
    "e": ("two_ranks",),
}
"""Modules of each part; each has a function ``checks(setup)``."""


def main() -> None:
    """Run the part that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=list(MODULES))
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument(
        "--out", type=Path, required=True, help="file to which JSON lines are appended"
    )
    arguments = parser.parse_args()
    with arguments.out.open("a", encoding="utf-8") as file:
        Part(file).run(arguments.part, arguments.device, arguments.seed)


class Part:
    """The checks of a part, and the file for their rows.

    Every line is flushed, so the lines before a crash are kept.
    """

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.setup: Setup | None = None
        self.checks: list[Check] = []
        """Checks of the module that was loaded last."""

    def run(self, part: str, device: str, seed: int) -> None:
        """Run all checks of a part.

        :param device: ``cuda`` or ``cpu``.
        """
        self.perform(Check(f"start of part {part}", partial(self.start, device, seed)))
        if self.setup is None:
            return
        for module in MODULES[part]:
            self.checks = []
            self.perform(Check(f"start of {module}", partial(self.load, module)))
            for check in self.checks:
                self.perform(check)

    def start(self, device: str, seed: int) -> list[Row]:
        """Import torch, and write a description of the machine. Returns no row."""
        import torch

        from scripts.gpu_check.compare import Setup

        setup = Setup(torch.device("cuda:0" if device == "cuda" else "cpu"), seed)
        torch.set_float32_matmul_precision("highest")  # no TF32 in the references
        if setup.tiny:
            torch.set_num_threads(1)  # more threads only cost time at tiny sizes
        self.note(machine=describe(setup.device))
        self.setup = setup
        return []

    def load(self, module: str) -> list[Row]:
        """Import a module, and keep its checks. Returns no row."""
        self.checks = list(importlib.import_module(f"{PACKAGE}.{module}").checks(self.setup))
        return []

    def perform(self, check: Check) -> None:
        """Run a check, and write its name, its seconds and its rows."""
        self.note(begun=check.name)
        begun = time.perf_counter()
        rows = outcome(check, self.setup)
        self.note(check=check.name, seconds=time.perf_counter() - begun)
        for row in rows:
            self.note(row=row._asdict())

    def note(self, **fields: Any) -> None:
        """Write one JSON line."""
        print(json.dumps(fields), file=self.file, flush=True)


def outcome(check: Check, setup: "Setup | None") -> list[Row]:
    """Run a check and return its rows; an exception becomes a failed row.

    :param setup: ``None`` before torch is imported.
    """
    try:
        rows = list(check.run())
        _finish(setup)
    except Exception as error:  # noqa: BLE001  (the other checks must run after any error)
        traceback.print_exc()
        message = str(error).strip().splitlines() or [""]
        note = f"{type(error).__name__}: {message[0]}"[:200]
        rows = [Row(check.name, "failed", note=f"{note}; {check.mend}" if check.mend else note)]
        _finish(setup)  # raises again if the device is lost, which ends this part
    return rows


def _finish(setup: "Setup | None") -> None:
    """Synchronize, so that errors of queued kernels belong to this check; free memory."""
    gc.collect()  # models and their buckets are in reference cycles
    if setup is not None and setup.device.type == "cuda":
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def describe(device: "torch.device") -> dict[str, Any]:
    """Name and properties of the GPU, and versions of torch, CUDA and Triton."""
    import torch

    from olmo_shard.kernels.language import INSTALLED, triton

    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    versions["triton"] = triton.__version__ if INSTALLED else None
    if device.type == "cpu":
        return {"gpu": "none: a CPU, kernels in Triton's interpreter", **versions}
    if not torch.cuda.is_available():
        return {"gpu": "none: torch finds no CUDA device", **versions}
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        **versions,
    }


if __name__ == "__main__":
    main()
