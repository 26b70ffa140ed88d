"""Time of whole training steps with each dispatch transport, on CPUs of one host.

    python -m scripts.bench.dispatch_step --ranks 2 --out docs/bench

All ranks form one expert-parallel group. Both transports run in the same processes, one after the
other in every round. The time of a step is that of its slowest rank. The table shows medians over
the rounds; a ratio is the median of the ratios per round.
"""

import argparse
import statistics
import time

from olmo_shard.config import load_config
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.mesh import Mesh
from scripts.bench import tables
from scripts.bench.local_ranks import run_ranks, start_together
from scripts.bench.model import build, random_window
from scripts.bench.tables import Row
from scripts.output_folder import output_folder

PROGRAM = "scripts.bench.dispatch_step"
LR = 1e-4


def main() -> None:
    """Measure every number of ranks, and print the table."""
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=summary)
    parser.add_argument("--config", default="configs/cpu-bench.yaml")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--out", type=output_folder, help="folder for the table and the raw figures"
    )
    arguments = parser.parse_args()
    rows: list[Row] = []
    for ranks in arguments.ranks:
        rows += run_ranks(ranks, steps, arguments.config, arguments.rounds)
    stem = arguments.out and arguments.out / "dispatch-step"
    tables.write(table(rows), rows, stem, PROGRAM)


def steps(mesh: Mesh, path: str, rounds: int) -> list[Row]:
    """Measure one step per transport and round; collective.

    :param path: the config.
    :returns: one row per transport and round, with seconds of the step, label tokens of the global
        batch, and mean seconds in which a rank waits for rows.
    """
    config = load_config(path, [f"parallel.expert_parallel={mesh.world_size}"])
    by_name = {name: build(config, mesh, {"dispatch": name}) for name in ("rowwise", "collective")}
    window = config.num_microbatches(mesh.world_size)
    rows: list[Row] = []
    for round_ in range(-1, rounds):  # round -1 warms up
        for name, step in by_name.items():
            batches = random_window(config, mesh, window)
            begun = start_together(mesh)
            output = step(batches, LR)
            step.optimizer.parallel_model.wait_for_weights()
            seconds = max(gather_objects(time.perf_counter() - begun, mesh.control))
            row = {"ranks": mesh.world_size, "name": name, "round": round_, "seconds": seconds}
            row["tokens"] = int(output.tokens)
            rows.append(row | {"waited": float(output.waited_LN.sum(dim=0).mean())})
    return [row for row in rows if row["round"] >= 0]


def table(rows: list[Row]) -> list[str]:
    """The lines of the table: one per number of ranks and transport."""
    names = ("ranks", "transport", "step s", "tokens/s", "time / rowwise's", "waiting for rows s")
    lines = tables.header(*names)
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        of_ranks = [row for row in rows if row["ranks"] == ranks]
        for name in dict.fromkeys(row["name"] for row in of_ranks):
            measured = tables.of_variant(of_ranks, name)
            seconds = tables.median_seconds(of_ranks, name)
            waits = statistics.median(row["waited"] for row in measured)
            slower = tables.ratio(of_ranks, name, "rowwise")
            figures = [f"{seconds:.3f}", f"{measured[0]['tokens'] / seconds:,.0f}"]
            figures += [f"{slower:.2f}", f"{waits:.3f}"]
            lines.append(tables.line(str(ranks), name, *figures))
    return lines


if __name__ == "__main__":
    main()
