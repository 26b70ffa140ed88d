"""Whole training steps of a config with each transport of token rows, on CPUs of one host.

    python scripts/bench_dispatch_step.py --ranks 2 --out docs/bench

All ranks form one expert-parallel group. Both transports live in the same processes and take turns;
a step takes as long as its slowest rank; figures are medians over the turns, ratios medians of the
ratios within a turn.
"""

import argparse
import statistics
import time

import bench_tables
from bench_model import build, random_window
from bench_tables import Row
from local_ranks import run_ranks, start_together
from output_folder import output_folder

from olmo_shard.config import load_config
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.mesh import Mesh

LR = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default="configs/cpu-bench.yaml")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--out", type=output_folder, help="folder for the table and all figures")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for ranks in arguments.ranks:
        rows += run_ranks(ranks, steps, arguments.config, arguments.turns)
    bench_tables.write(table(rows), rows, arguments.out and arguments.out / "dispatch-step")


def steps(mesh: Mesh, path: str, turns: int) -> list[Row]:
    """Seconds of a step with each transport in every turn; collective."""
    config = load_config(path, [f"parallel.expert_parallel={mesh.world_size}"])
    by_name = {name: build(config, mesh, {"dispatch": name}) for name in ("rowwise", "collective")}
    window = config.num_microbatches(mesh.world_size)
    rows: list[Row] = []
    for turn in range(-1, turns):  # one to warm up
        for name, step in by_name.items():
            batches = random_window(config, mesh, window)
            begun = start_together(mesh)
            output = step(batches, LR)
            step.optimizer.parallel_model.wait_for_weights()
            seconds = max(gather_objects(time.perf_counter() - begun, mesh.control))
            row = {"ranks": mesh.world_size, "name": name, "turn": turn, "seconds": seconds}
            row["tokens"] = int(output.tokens)
            rows.append(row | {"waited": float(output.waited_LN.sum(dim=0).mean())})
    return [row for row in rows if row["turn"] >= 0]


def table(rows: list[Row]) -> list[str]:
    names = ("ranks", "transport", "step s", "tokens/s", "time / rowwise's", "waiting for rows s")
    lines = bench_tables.header(*names)
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        mine = [row for row in rows if row["ranks"] == ranks]
        for name in dict.fromkeys(row["name"] for row in mine):
            own = bench_tables.of(mine, name)
            seconds = bench_tables.median_seconds(mine, name)
            waits = statistics.median(row["waited"] for row in own)
            slower = bench_tables.ratio(mine, name, "rowwise")
            cells = [f"{seconds:.3f}", f"{own[0]['tokens'] / seconds:,.0f}"]
            cells += [f"{slower:.2f}", f"{waits:.3f}"]
            lines.append(f"| {ranks} | {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
