"""One part of the GPU check, in a process of its own; ``gpu_check.py`` starts it.

An illegal access makes a CUDA context useless for whatever comes next, and a kernel that hangs
never gives its device back: so nothing else may live in the same process.
"""

import argparse
import gc
import importlib
import json
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_check_report import Check, Row, Setup

from olmo_shard.kernels.language import INSTALLED, triton

MODULES = {
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
    device = torch.device("cuda:0" if arguments.device == "cuda" else "cpu")
    setup = Setup(device, arguments.seed)
    torch.set_float32_matmul_precision("highest")  # references in FP32 are FP32
    if setup.tiny:
        torch.set_num_threads(1)  # sizes are too small to share
    with arguments.out.open("a", encoding="utf-8") as file:

        def note(**fields: Any) -> None:
            # Each at once: whatever ends this process, what it has found stays.
            print(json.dumps(fields), file=file, flush=True)

        note(machine=describe(device))
        for check in _checks(arguments.part, setup):
            note(begun=check.name)
            begun = time.perf_counter()
            rows = outcome(check, setup)
            note(check=check.name, seconds=time.perf_counter() - begun)
            for row in rows:
                note(row=row._asdict())


def _checks(part: str, setup: Setup) -> Iterator[Check]:
    for module in MODULES[part]:
        yield from importlib.import_module(module).checks(setup)


def outcome(check: Check, setup: Setup) -> list[Row]:
    """The rows of a check; the only place where one that raises is caught."""
    try:
        rows = list(check.run())
        _finish(setup)
    except Exception as error:  # noqa: BLE001  (whatever it is, the other checks go on)
        traceback.print_exc()
        message = str(error).strip().splitlines() or [""]
        rows = [Row(check.name, "failed", note=f"{type(error).__name__}: {message[0]}"[:200])]
        _finish(setup)  # raises again where the device is lost: then this part is over
    return rows


def _finish(setup: Setup) -> None:
    """Wait for what was queued, so that its errors are those of this check; free memory."""
    gc.collect()  # models and their buckets refer to each other
    if setup.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def describe(device: torch.device) -> dict[str, Any]:
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    versions["triton"] = triton.__version__ if INSTALLED else None
    if device.type == "cpu":
        return {"card": "none: a CPU, kernels in Triton's interpreter", **versions}
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
