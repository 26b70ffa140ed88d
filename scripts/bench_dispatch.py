"""Round trips of token rows (dispatch, then combine) by each transport, on CPUs of one host.

    python scripts/bench_dispatch.py --ranks 2 4 --out docs/bench
    python scripts/bench_dispatch.py --ranks 2 --step configs/cpu-bench.yaml

All contenders live in the same processes and take turns, so that what else the machine does hits
them alike. A round trip takes as long as its slowest rank; figures are medians over the turns,
ratios medians of the ratios within a turn. It begins with the router's picks and ends with the sum
of each token's rows; experts return what they get.

``per expert`` is the plain opponent: a token's row goes to each of its K experts by all-to-all, one
row comes back from each, and the source adds the K rows with their weights. ``copies`` is the
limit: four plain copies of the rows that must travel, by all ranks at once and in the same memory
(to the peers' mailboxes, out of the own one, back, and out again). Rows for the rank itself, the
plan, the metadata and the sum come on top in a round trip. ``copies, private`` copies as many rows
four times inside each process, where no core reads what another one has written.
"""

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_model import build, random_window
from torch import Tensor

from olmo_shard.config import ParallelConfig, RunConfig, load_config
from olmo_shard.dispatch.collective import CollectiveDispatcher
from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.heap.shared_memory import SharedMemoryHeap
from olmo_shard.dispatch.mailbox import Mailbox
from olmo_shard.dispatch.plan import make_plan
from olmo_shard.dispatch.rowwise import RowwiseDispatcher
from olmo_shard.distributed.collectives import broadcast_object, gather_objects
from olmo_shard.distributed.environment import RankInfo
from olmo_shard.distributed.mesh import Mesh, build_mesh
from olmo_shard.distributed.runtime import runtime
from olmo_shard.distributed.traffic import traffic
from olmo_shard.parallel.connection import mailbox_layout

Row = dict[str, Any]
ROUTINGS = ("uniform", "skewed", "one rank")


def main() -> None:
    arguments = _arguments()
    rows: list[Row] = []
    for ranks in arguments.ranks:
        rows += _run_ranks(ranks, arguments)
    command = f"python scripts/bench_dispatch.py {' '.join(sys.argv[1:])}".rstrip()
    text = f"`{command}`\n\n{_step_table(rows) if arguments.step else _table(rows)}\n"
    print(f"\n{text}")
    if arguments.out:
        stem = arguments.out / ("dispatch-step" if arguments.step else "dispatch")
        stem.with_suffix(".md").write_text(text, encoding="utf-8")
        stem.with_suffix(".json").write_text(json.dumps(rows), encoding="utf-8")
        print(f"written: {stem}.md, .json")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096], help="of a rank")
    parser.add_argument("--width", nargs="+", type=int, default=[1024])
    parser.add_argument("--top-k", nargs="+", type=int, default=[8])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--routing", nargs="+", default=["uniform"], choices=ROUTINGS)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--step", help="time whole training steps of this config instead")
    parser.add_argument("--out", type=Path, help="folder for the table and all figures")
    return parser.parse_args()


def _run_ranks(ranks: int, arguments: argparse.Namespace) -> list[Row]:
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, ranks, store.port, arguments, results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        while not any(process.exitcode for process in processes):
            try:
                return results.get(timeout=1)
            except queue.Empty:
                continue
        raise SystemExit("a rank failed; its message is above")
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _rank(rank: int, ranks: int, port: int, arguments: argparse.Namespace, results: Any) -> None:
    info = RankInfo(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        master_addr="127.0.0.1",
        master_port=port,
    )
    with runtime(info, RunConfig(device="cpu"), served=True) as here:
        mesh = build_mesh(here, ranks)
        rows: list[Row] = []
        if arguments.step:
            rows = _steps(arguments, mesh)
        else:
            shapes = product(arguments.tokens, arguments.width, arguments.top_k, arguments.routing)
            for shape in shapes:
                rows += _round_trips(mesh, arguments, *shape)
        if rank == 0:
            results.put(rows)


def _round_trips(
    mesh: Mesh, arguments: argparse.Namespace, tokens: int, width: int, top_k: int, routing: str
) -> list[Row]:
    """Seconds of every contender in every turn, the slowest rank's; on all ranks."""
    experts = arguments.experts
    generator = torch.Generator().manual_seed(mesh.rank)
    x_TD = torch.randn(tokens, width, generator=generator)
    topk_idx_TK = _route(routing, tokens, top_k, experts, mesh.expert_parallel, generator)
    topk_weights_TK = torch.rand(tokens, top_k, generator=generator)

    parallel = ParallelConfig(expert_parallel=mesh.expert_parallel)
    layout = mailbox_layout(experts, top_k, width, parallel, tokens)
    heap = SharedMemoryHeap(mesh.ep, layout.arena_bytes, layout.num_flags, mesh.timeout)
    mailbox = Mailbox(heap, layout)
    rowwise = RowwiseDispatcher(experts, mailbox, tokens)
    collective = CollectiveDispatcher(experts, mesh.ep)
    plan = make_plan(topk_idx_TK, mesh.expert_parallel, experts // mesh.expert_parallel)
    own = plan.send_counts[mesh.rank]
    pairs_by_rank = gather_objects(plan.send_counts, mesh.control)
    contenders: dict[str, Callable[[], int]] = {
        "rowwise": lambda: _dispatch_and_combine(rowwise, x_TD, topk_idx_TK, topk_weights_TK),
        "collective": lambda: _dispatch_and_combine(collective, x_TD, topk_idx_TK, topk_weights_TK),
        "per expert": lambda: _per_expert(mesh, experts, x_TD, topk_idx_TK, topk_weights_TK),
        "copies": _copies(mailbox, x_TD, pairs_by_rank),
        "copies, private": _private_copies(x_TD, sum(plan.send_counts) - own),
    }
    shape: Row = {"ranks": mesh.world_size, "tokens": tokens, "width": width, "top_k": top_k}
    shape["routing"] = routing
    pairs = sum(sum(sent) - sent[rank] for rank, sent in enumerate(pairs_by_rank))
    rows = [
        {**shape, "pairs": 2 * pairs, **row} for row in _turns(mesh, contenders, arguments.turns)
    ]
    del contenders
    rowwise.close()
    return rows


def _turns(mesh: Mesh, contenders: dict[str, Callable[[], int]], turns: int) -> list[Row]:
    rows: list[Row] = []
    for turn in range(-2, turns):  # two to warm up
        for name, contender in contenders.items():
            begun = _start_together(mesh)
            sent = contender()
            mine = (time.perf_counter() - begun, sent)
            found = gather_objects(mine, mesh.control)
            seconds, num_bytes = max(s for s, _ in found), sum(b for _, b in found)
            rows.append({"name": name, "turn": turn, "seconds": seconds, "bytes": num_bytes})
    return [row for row in rows if row["turn"] >= 0]


def _start_together(mesh: Mesh) -> float:
    """Wait for an instant that rank 0 names; ranks leave a barrier up to milliseconds apart."""
    instant = broadcast_object(time.perf_counter() + 0.01, mesh.control)
    while time.perf_counter() < instant:
        os.sched_yield()
    return instant


def _route(
    routing: str, tokens: int, top_k: int, experts: int, ranks: int, generator: torch.Generator
) -> Tensor:
    scores = torch.rand(tokens, experts, generator=generator)
    if routing == "skewed":  # popularity falls by half from the first expert to the fourth
        gumbel = -torch.log(-torch.log(scores))
        scores = gumbel - 0.5 * torch.arange(1, experts + 1).log()
    elif routing == "one rank":
        scores[:, : max(top_k, experts // ranks)] += 1
    return scores.argsort(dim=1, descending=True)[:, :top_k].contiguous()


@torch.no_grad()
def _dispatch_and_combine(
    dispatcher: TokenDispatcher, x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor
) -> int:
    """Returns the bytes that this rank sent."""
    with traffic.stretch() as sent:
        rows = dispatcher.finish(dispatcher.start(x_TD, topk_idx_TK, topk_weights_TK))
        dispatcher.combine(rows.x_RD, rows.handle)
    return sent.bytes.total()


def _per_expert(
    mesh: Mesh, experts: int, x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor
) -> int:
    """K rows a token, whatever the ranks of its experts. Returns the bytes that this rank sent."""
    top_k, ranks = topk_idx_TK.shape[1], mesh.expert_parallel
    expert_P = topk_idx_TK.flatten()
    order_P = torch.argsort(expert_P, stable=True)
    rows_PD = x_TD[order_P // top_k]
    counts_E = torch.bincount(expert_P, minlength=experts)
    recv_counts_E = torch.empty_like(counts_E)
    dist.all_to_all_single(recv_counts_E, counts_E, group=mesh.ep)
    send, recv = (c.view(ranks, -1).sum(dim=1).tolist() for c in (counts_E, recv_counts_E))
    received_RD = x_TD.new_empty(sum(recv), x_TD.shape[1])
    dist.all_to_all_single(received_RD, rows_PD, recv, send, group=mesh.ep)
    returned_PD = torch.empty_like(rows_PD)
    dist.all_to_all_single(returned_PD, received_RD, send, recv, group=mesh.ep)
    by_route_PD = torch.empty_like(returned_PD)
    by_route_PD[order_P] = returned_PD
    torch.einsum("tkd,tk->td", by_route_PD.view(*topk_idx_TK.shape, -1), topk_weights_TK)
    rank = mesh.ep.rank()
    remote = sum(send) - send[rank] + sum(recv) - recv[rank]
    return remote * x_TD.shape[1] * x_TD.itemsize


def _copies(mailbox: Mailbox, x_TD: Tensor, pairs_by_rank: list[list[int]]) -> Callable[[], int]:
    """Copies the rows of a round trip, without order and without waiting."""
    heap, layout = mailbox.heap, mailbox.layout
    rank, arenas = heap.rank, heap.arenas
    peers = [peer for peer in range(heap.size) if peer != rank]
    sent = {peer: pairs_by_rank[rank][peer] for peer in peers}
    got = {peer: pairs_by_rank[peer][rank] for peer in peers}
    there = [
        {peer: layout.region(arenas[peer], peer, slot, rank).rows for peer in peers}
        for slot in range(2)
    ]
    here = [
        {peer: layout.region(arenas[rank], rank, slot, peer).rows for peer in peers}
        for slot in range(2)
    ]
    received = {peer: torch.zeros(got[peer], x_TD.shape[1]) for peer in peers}
    returned = {peer: torch.zeros(sent[peer], x_TD.shape[1]) for peer in peers}

    def copy() -> int:
        for peer in peers:
            there[0][peer][: sent[peer]].copy_(x_TD[: sent[peer]])
        for peer in peers:
            received[peer].copy_(here[0][peer][: got[peer]])
        for peer in peers:
            there[1][peer][: got[peer]].copy_(received[peer])
        for peer in peers:
            returned[peer].copy_(here[1][peer][: sent[peer]])
        return sum(t.nbytes for t in (*received.values(), *returned.values()))

    return copy


def _private_copies(x_TD: Tensor, num_rows: int) -> Callable[[], int]:
    """As many rows from the own memory into four buffers of the own memory."""
    repeats = -(-num_rows // max(1, len(x_TD)))
    rows = x_TD.repeat(repeats, 1)[:num_rows]
    buffers = [torch.zeros_like(rows) for _ in range(4)]

    def copy() -> int:
        for buffer in buffers:
            buffer.copy_(rows)
        return 0

    return copy


def _steps(arguments: argparse.Namespace, mesh: Mesh) -> list[Row]:
    """Seconds of whole training steps with each transport."""
    config = load_config(arguments.step, [f"parallel.expert_parallel={mesh.world_size}"])
    steps = {name: build(config, mesh, {"dispatch": name}) for name in ("rowwise", "collective")}
    window = config.num_microbatches(mesh.world_size)
    rows: list[Row] = []
    for turn in range(-1, arguments.turns):
        for name, step in steps.items():
            batches = random_window(config, mesh, window)
            step.optimizer.data_parallel.wait()
            begun = _start_together(mesh)
            output = step(batches, 1e-4)
            step.optimizer.data_parallel.wait()
            seconds = max(gather_objects(time.perf_counter() - begun, mesh.control))
            exposed = output.traffic.exposed_seconds()
            row = {"ranks": mesh.world_size, "name": name, "turn": turn, "seconds": seconds}
            row |= {"tokens": int(output.tokens), "rows": exposed["rows"]}
            rows.append(row | {"counts": exposed.get("counts", 0.0)})
    return [row for row in rows if row["turn"] >= 0]


def _table(rows: list[Row]) -> str:
    lines = _header(
        "ranks", "T", "D", "K", "routing", "transport", "ms", "time / rowwise's",
        "million rows/s", "GB/s to peers", "share of the copy limit",
    )  # fmt: skip
    shape = ("ranks", "tokens", "width", "top_k", "routing")
    for key in dict.fromkeys(tuple(row[name] for name in shape) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in shape) == key]
        for name in dict.fromkeys(row["name"] for row in mine):
            own = _of(mine, name)
            seconds = statistics.median(row["seconds"] for row in own)
            share = "" if name.startswith("copies") else f"{_ratio(mine, 'copies', name):.0%}"
            rate = f"{own[0]['pairs'] / seconds / 1e6:.2f}"
            sent = f"{own[0]['bytes'] / seconds / 1e9:.2f}" if own[0]["bytes"] else ""
            slower = f"{_ratio(mine, name, 'rowwise'):.2f}"
            cells = [*map(str, key), name, f"{seconds * 1e3:.1f}", slower, rate, sent, share]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _step_table(rows: list[Row]) -> str:
    lines = _header(
        "ranks", "transport", "step s", "tokens/s", "time / rowwise's", "waiting for rows s"
    )
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        mine = [row for row in rows if row["ranks"] == ranks]
        for name in dict.fromkeys(row["name"] for row in mine):
            own = _of(mine, name)
            seconds = statistics.median(row["seconds"] for row in own)
            waits = statistics.median(row["rows"] + row["counts"] for row in own)
            cells = [str(ranks), name, f"{seconds:.3f}", f"{own[0]['tokens'] / seconds:,.0f}"]
            cells += [f"{_ratio(mine, name, 'rowwise'):.2f}", f"{waits:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _header(*names: str) -> list[str]:
    return [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]


def _of(rows: list[Row], name: str) -> list[Row]:
    return [row for row in rows if row["name"] == name]


def _ratio(rows: list[Row], name: str, other: str) -> float:
    """Median over the turns of one contender's time by another's."""
    pairs = zip(_of(rows, name), _of(rows, other), strict=True)
    return statistics.median(mine["seconds"] / theirs["seconds"] for mine, theirs in pairs)


if __name__ == "__main__":
    main()
