"""Differences of losses and gradient norms between bf16 and FP32, and between bf16 layouts.

    python -m scripts.compare_precision configs/tiny.yaml train.micro_batch_tokens=1024

Each row of the table is a training run of a few steps on CPU ranks. The loss and the gradient norm
of each step are compared with those of two reference runs. docs/training.md quotes the table.

The command above makes the micro-batches small, so that a window has several. In a window of one
micro-batch, bf16 gradients are communicated without a further rounding.
"""

import argparse
import tempfile
from pathlib import Path

from olmo_shard.config import load_config
from olmo_shard.distributed.launch import launch_local
from olmo_shard.train.records import METRICS_FILE, read_records
from scripts.bench.tables import header, line, origin

BF16 = ["parallel.compute_dtype=bfloat16"]
ONE_RANK = ["parallel.expert_parallel=1"]
TWO_RANKS = ["parallel.expert_parallel=2"]
WIRE = ["parallel.ddp.wire_dtype=bfloat16"]
GRADIENTS = ["parallel.ddp.grad_dtype=bfloat16"]
FSDP = ["parallel.mode=fsdp"]
ROWS: list[tuple[str, int, list[str]]] = [
    ("FP32, 1 rank", 1, ONE_RANK),
    ("FP32, 2 ranks, ddp, EP 2", 2, TWO_RANKS),
    ("bf16, 1 rank", 1, [*BF16, *ONE_RANK]),
    ("bf16, 2 ranks, ddp, EP 2", 2, [*BF16, *TWO_RANKS]),
    ("bf16, 2 ranks, fsdp, EP 2", 2, [*BF16, *TWO_RANKS, *FSDP]),
    ("bf16, 2 ranks, ddp, EP 2, wire_dtype bf16", 2, [*BF16, *TWO_RANKS, *WIRE]),
    ("bf16, 2 ranks, ddp, EP 2, grad_dtype bf16", 2, [*BF16, *TWO_RANKS, *GRADIENTS]),
]
"""Name, ranks and overrides of each run."""
PROGRAM = "scripts.compare_precision"
FP32_REFERENCE, BF16_REFERENCE = ROWS[0][0], ROWS[2][0]
Figures = list[tuple[float, float]]
"""Loss and gradient norm of each step."""


def main() -> None:
    """Train all rows, and print the table."""
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=summary)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", help="section.field=value, applied to every row")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    # Keep the schedule of the whole run: a short one reaches the full learning rate at once, and
    # then small differences grow so fast that they say nothing about rounding.
    config = load_config(options.config, options.overrides)
    total = config.schedule.total_steps or config.train.steps
    shared = [f"train.steps={options.steps}", f"schedule.total_steps={total}", "eval.every=0"]
    shared += ["checkpoint.every=null", "tracking.wandb=off", "run.device=cpu", *options.overrides]
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: trained(options.config, ranks, [*shared, *changes], Path(folder) / str(number))
            for number, (name, ranks, changes) in enumerate(ROWS)
        }
    print(f"\n{origin(PROGRAM)}")
    print(f"\nLargest relative difference in {options.steps} steps of {options.config}:\n")
    lines = header("run", "loss, from FP32", "norm", "loss, from bf16 on 1 rank", "norm")
    for name, run in runs.items():
        figures = [*distances(run, runs[FP32_REFERENCE]), *distances(run, runs[BF16_REFERENCE])]
        lines.append(line(name, *figures))
    print("\n".join(lines))


def trained(config: str, ranks: int, overrides: list[str], run_dir: Path) -> Figures:
    """Losses and gradient norms of a training run.

    :raises SystemExit: if the run fails. The run has printed its error.
    """
    if launch_local(["train", config, *overrides, f"run.dir={run_dir}"], ranks):
        raise SystemExit(1)
    return [
        (record["loss"], record["grad_norm"]) for record in read_records(run_dir / METRICS_FILE)
    ]


def distances(run: Figures, reference: Figures) -> list[str]:
    """The largest relative difference of the losses, and of the gradient norms."""
    pairs = list(zip(run, reference, strict=True))
    return [f"{max(abs(a[i] - b[i]) / abs(b[i]) for a, b in pairs):.1e}" for i in (0, 1)]


if __name__ == "__main__":
    main()
