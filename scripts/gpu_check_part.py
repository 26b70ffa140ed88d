"""One part of the GPU check, in a process of its own; ``gpu_check.py`` starts it.

An illegal access makes a CUDA context useless for the next check, and a kernel that hangs never
gives its device back: so nothing else may live in the same process.

At import this file needs the standard library alone. The imports of torch and of the part's modules
are steps like the checks: where one fails, its reason becomes a row.
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

from gpu_check_row import Check, Row

if TYPE_CHECKING:
    import torch
    from gpu_check_report import Setup

MODULES = {
    "machine": ("gpu_check_machine",),
    "a": ("gpu_check_kernels", "gpu_check_grouped"),
    "b": ("gpu_check_virtual",),
    "c": ("gpu_check_times",),
    "d": ("gpu_check_training",),
    "e": ("gpu_check_ranks",),
}
"""Each has a function ``checks(setup)``."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("part", choices=list(MODULES))
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended")
    arguments = parser.parse_args()
    with arguments.out.open("a", encoding="utf-8") as file:
        Part(file).run(arguments.part, arguments.device, arguments.seed)


class Part:
    """The steps of a part, and the file that takes what they find.

    Every line is written at once: a process that is killed leaves what it has found.
    """

    def __init__(self, file: TextIO) -> None:
        self.file = file
        self.setup: Setup | None = None
        self.checks: list[Check] = []
        """The checks of the module that was loaded last."""

    def run(self, part: str, device: str, seed: int) -> None:
        self.perform(Check(f"start of part {part}", partial(self.start, device, seed)))
        if self.setup is None:
            return
        for module in MODULES[part]:
            self.checks = []
            self.perform(Check(f"start of {module}", partial(self.load, module)))
            for check in self.checks:
                self.perform(check)

    def start(self, device: str, seed: int) -> list[Row]:
        """Import torch, and describe the machine."""
        import torch
        from gpu_check_report import Setup

        setup = Setup(torch.device("cuda:0" if device == "cuda" else "cpu"), seed)
        torch.set_float32_matmul_precision("highest")  # references in FP32 are FP32
        if setup.tiny:
            torch.set_num_threads(1)  # sizes are too small to share
        self.note(machine=describe(setup.device))
        self.setup = setup
        return []

    def load(self, module: str) -> list[Row]:
        """Import a module of checks."""
        self.checks = list(importlib.import_module(module).checks(self.setup))
        return []

    def perform(self, check: Check) -> None:
        self.note(begun=check.name)
        begun = time.perf_counter()
        rows = outcome(check, self.setup)
        self.note(check=check.name, seconds=time.perf_counter() - begun)
        for row in rows:
            self.note(row=row._asdict())

    def note(self, **fields: Any) -> None:
        print(json.dumps(fields), file=self.file, flush=True)


def outcome(check: Check, setup: "Setup | None") -> list[Row]:
    """The rows of a check; the only place where an error of a check is caught.

    :param setup: ``None`` before torch is imported.
    """
    try:
        rows = list(check.run())
        _finish(setup)
    except Exception as error:  # noqa: BLE001  (whatever it is, the other checks go on)
        traceback.print_exc()
        message = str(error).strip().splitlines() or [""]
        note = f"{type(error).__name__}: {message[0]}"[:200]
        rows = [Row(check.name, "failed", note=f"{note}; {check.mend}" if check.mend else note)]
        _finish(setup)  # raises again where the device is lost: then this part is over
    return rows


def _finish(setup: "Setup | None") -> None:
    """Wait for what was queued, so that its errors are those of this check; free memory."""
    gc.collect()  # models and their buckets refer to each other
    if setup is not None and setup.device.type == "cuda":
        import torch

        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def describe(device: "torch.device") -> dict[str, Any]:
    import torch

    from olmo_shard.kernels.language import INSTALLED, triton

    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    versions["triton"] = triton.__version__ if INSTALLED else None
    if device.type == "cpu":
        return {"card": "none: a CPU, kernels in Triton's interpreter", **versions}
    if not torch.cuda.is_available():
        return {"card": "none: torch finds no CUDA device", **versions}
    card = torch.cuda.get_device_properties(device)
    return {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "multiprocessors": card.multi_processor_count,
        "memory_bytes": card.total_memory,
        **versions,
    }


if __name__ == "__main__":
    main()
