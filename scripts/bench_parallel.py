"""Tokens/s and bytes of the data-parallel modes, over windows, ranks and networks.

    python scripts/bench_parallel.py --rate 1gbit --out docs/bench

All modes live in the same processes and take turns, so that what else the machine does hits them
alike: figures are medians over the turns, ratios medians of the ratios within a turn. Steps are
timed in a steady state: one runs before the clock starts, and the gather that the last one leaves
to the next forward stands for the one that the first one found.

Without --rate the ranks talk over loopback. With it each rank has a network namespace behind a link
of that rate (as root, with iproute2), and bytes are also read from the link's own counter.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import bench_report
import shaped_network
from bench_model import build, random_window
from output_folder import output_folder
from stopwatch import now
from torch.distributed import TCPStore

from olmo_shard.config import Config, load_config
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.environment import RankInfo
from olmo_shard.distributed.mesh import Mesh, build_mesh
from olmo_shard.distributed.runtime import runtime
from olmo_shard.train.step import TrainStep

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
    arguments = _arguments()
    if arguments.worker:
        _worker(json.loads(arguments.worker))
        return
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        rows += _measure(arguments, ranks)
    command = f"python scripts/bench_parallel.py {' '.join(sys.argv[1:])}".rstrip()
    bench_report.write(rows, arguments.rate or "loopback", command, arguments.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default="configs/cpu-bench.yaml")
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="overrides")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--windows", nargs="*", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--rate", help="of each rank's link, such as 1gbit; none: loopback")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="timed steps a turn")
    parser.add_argument(
        "--out", type=output_folder, help="folder for the table, the plot and all figures"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    problem = shaped_network.missing_tools() if arguments.rate else None
    if problem:
        parser.error(f"--rate {arguments.rate}: {problem}; or leave --rate out for loopback")
    return arguments


def _measure(arguments: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """All turns on a number of ranks, as started by this process."""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        job = {
            name: getattr(arguments, name)
            for name in ("config", "set", "modes", "windows", "turns", "steps")
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
    script = [sys.executable, __file__, "--worker"]
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
    """One rank."""
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
        for turn in range(job["turns"]):
            for window in job["windows"]:
                for mode, step in steps.items():
                    row = _timed(config, mesh, step, window, job)
                    rows.append({"mode": mode, "window": window, "turn": turn, **row})
            if here.rank == 0:
                print(f"{here.world_size} ranks: turn {turn + 1} of {job['turns']}", flush=True)
        if here.rank == 0:
            Path(job["result"]).write_text(json.dumps(rows), encoding="utf-8")


def _timed(
    config: Config, mesh: Mesh, step: TrainStep, window: int, job: dict[str, Any]
) -> dict[str, Any]:
    """Figures of this rank per step, and of all ranks where they add up."""
    parallel_model, count = step.optimizer.parallel_model, job["steps"]
    windows = [random_window(config, mesh, window) for _ in range(count + 1)]
    before = shaped_network.sent_bytes() if job["shaped"] else 0
    step(windows[0], LR)
    begun = now()
    outputs = [step(each, LR) for each in windows[1:]]
    seconds = (now() - begun) / count
    parallel_model.wait_for_weights()
    gather_objects(None, mesh.control)  # nobody starts the next mode before all have ended this one
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
    """(N-1)/N x 8 bytes a dense parameter in FP32, experts by their own group."""
    total = 0.0
    for name, parameter in step.model.named_parameters():
        group = mesh.ep_dp if ".experts." in name else mesh.bulk
        total += 8 * parameter.numel() * (group.size() - 1) / group.size()
    return total


if __name__ == "__main__":
    main()
