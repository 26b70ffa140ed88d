"""Tokens/s and bytes of the data-parallel modes, by window, number of ranks and network.

    python -m scripts.bench.parallel --rate 1gbit --out docs/bench

All modes run in the same processes, one after the other in every round, so that other load on the
machine slows all of them. The table shows medians over the rounds; a ratio is the median of the
ratios per round.

Steps are timed in a steady state. One step runs before the clock starts. The clock stops before the
last step's gather has ended; in exchange, the first timed step waits for the gather of the step
before it.

Without --rate the ranks communicate over loopback. With --rate each rank runs in a network
namespace with a link of that rate, which needs root and iproute2. The bytes are then also read from
the link's counter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from olmo_shard.config import Config, load_config
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.environment import RankInfo
from olmo_shard.distributed.mesh import Mesh, build_mesh
from olmo_shard.distributed.runtime import runtime
from olmo_shard.train.step import TrainStep
from scripts.bench import parallel_report, shaped_network
from scripts.bench.model import build, random_window
from scripts.bench.stopwatch import now
from scripts.bench.tables import origin
from scripts.output_folder import output_folder

PROGRAM = "scripts.bench.parallel"
PORT = 29500
LR = 1e-4

MODES: dict[str, dict[str, Any]] = {
    "ddp": {"mode": "ddp"},
    "ddp, overlap off": {"ddp": {"overlap_grad_reduce": False, "overlap_param_gather": False}},
    "ddp, bf16 wire": {"ddp": {"wire_dtype": "bfloat16"}},
    "fsdp, reshard forward": {"mode": "fsdp", "fsdp": {"reshard": "forward"}},
    "fsdp, reshard window": {"mode": "fsdp", "fsdp": {"reshard": "window"}},
}


def main() -> None:
    """Measure every number of ranks, and print the tables; or run one rank of a measurement."""
    arguments = _arguments()
    if arguments.worker:
        _worker(json.loads(arguments.worker))
        return
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        rows += _measure(arguments, ranks)
    parallel_report.write(rows, arguments.rate or "loopback", origin(PROGRAM), arguments.out)


def _arguments() -> argparse.Namespace:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=summary)
    parser.add_argument("--config", default="configs/cpu-bench.yaml")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="overrides")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--windows", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument(
        "--rate", help="rate of each rank's link, such as 1gbit (default: loopback)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per round")
    parser.add_argument(
        "--out", type=output_folder, help="folder for the tables, the plot and the raw figures"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    problem = shaped_network.missing_tools() if arguments.rate else None
    if problem:
        parser.error(f"--rate {arguments.rate}: {problem}; or leave --rate out for loopback")
    return arguments


def _measure(arguments: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """Start ranks, let them measure all rounds, and return the rows of rank 0."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        job = {
            name: getattr(arguments, name)
            for name in ("config", "set", "modes", "windows", "rounds", "steps")
        }
        job |= {"world_size": ranks, "result": result.name, "shaped": bool(arguments.rate)}
        if arguments.rate:
            with shaped_network.shaped_hosts(ranks, arguments.rate) as hosts:
                job |= {"address": hosts[0].address, "port": PORT}
                _run_ranks(job, [host.command([]) for host in hosts], shaped_network.INTERFACE)
        else:
            store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
            job |= {"address": "127.0.0.1", "port": store.port}
            _run_ranks(job, [[]] * ranks, "lo")
        return json.loads(Path(result.name).read_text(encoding="utf-8"))


def _run_ranks(job: dict[str, Any], prefixes: list[list[str]], interface: str) -> None:
    environ = os.environ | {"GLOO_SOCKET_IFNAME": interface}
    script = [sys.executable, "-m", PROGRAM, "--worker"]
    ranks = [
        subprocess.Popen([*prefix, *script, json.dumps(job | {"rank": rank})], env=environ)
        for rank, prefix in enumerate(prefixes)
    ]
    try:
        if any(code != 0 for code in [rank.wait() for rank in ranks]):
            raise SystemExit("a rank failed; its message is above")
    finally:
        for rank in ranks:
            rank.kill()


def _worker(job: dict[str, Any]) -> None:
    """Run one rank of a measurement; rank 0 writes the rows to the job's file."""
    config = load_config(job["config"], job["set"])
    info = RankInfo(
        rank=job["rank"],
        world_size=job["world_size"],
        local_rank=job["rank"],
        local_world_size=job["world_size"],
        master_addr=job["address"],
        master_port=job["port"],
    )
    with runtime(info, config.run, served=not job["shaped"]) as here:
        mesh = build_mesh(here, config.parallel.expert_parallel)
        steps = {mode: build(config, mesh, MODES[mode]) for mode in job["modes"]}
        rows: list[dict[str, Any]] = []
        for round_ in range(job["rounds"]):
            for window in job["windows"]:
                for mode, step in steps.items():
                    row = _timed(config, mesh, step, window, job)
                    rows.append({"mode": mode, "window": window, "round": round_, **row})
            if here.rank == 0:
                print(f"{here.world_size} ranks: round {round_ + 1} of {job['rounds']}", flush=True)
        if here.rank == 0:
            Path(job["result"]).write_text(json.dumps(rows), encoding="utf-8")


def _timed(
    config: Config, mesh: Mesh, step: TrainStep, window: int, job: dict[str, Any]
) -> dict[str, Any]:
    """One row: figures per step of this rank; tokens/s of all ranks."""
    parallel_model, count = step.optimizer.parallel_model, job["steps"]
    windows = [random_window(config, mesh, window) for _ in range(count + 1)]
    # The first window is not timed: it brings the steps into a steady state.
    before = shaped_network.sent_bytes() if job["shaped"] else 0
    step(windows[0], LR)
    begun = now()
    outputs = [step(window_, LR) for window_ in windows[1:]]
    seconds = (now() - begun) / count
    parallel_model.wait_for_weights()
    gather_objects(None, mesh.control)  # all ranks end this mode before any starts the next
    sent = (shaped_network.sent_bytes() - before) / (count + 1) if job["shaped"] else None
    waits: dict[str, float] = {}
    for output in outputs:
        for kind, exposed in output.comm_stats.exposed_seconds().items():
            waits[kind] = waits.get(kind, 0.0) + exposed / count
    return {
        "ranks": mesh.world_size,
        "seconds": seconds,
        "tokens_per_second": int(outputs[0].tokens) / seconds,
        "exposed_seconds": sum(waits.values()),
        "exposed_by_kind": waits,
        "bytes": dict(outputs[0].comm_stats.bytes),
        "link_bytes": sent,
        "optimal_bytes": _optimal_bytes(step, mesh),
    }


def _optimal_bytes(step: TrainStep, mesh: Mesh) -> float:
    """Fewest bytes that a rank sends per step: (N-1)/N x 8 per FP32 parameter.

    N is the number of ranks with a copy: all for dense parameters, ``ep_dp`` for experts.
    """
    total = 0.0
    for name, parameter in step.model.named_parameters():
        group = mesh.ep_dp if ".experts." in name else mesh.bulk
        total += 8 * parameter.numel() * (group.size() - 1) / group.size()
    return total


if __name__ == "__main__":
    main()
