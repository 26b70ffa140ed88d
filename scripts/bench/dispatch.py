"""Time of dispatch and combine with each transport, on CPUs of one host.

    python -m scripts.bench.dispatch --ranks 2 4 --out docs/bench

A round trip begins with the router's choice of experts and ends with the sum of each token's rows.
The experts return their inputs. The time of a round trip is that of its slowest rank.

All variants run in the same processes, one after the other in every round, so that other load on
the machine slows all of them. The table shows medians over the rounds; a ratio is the median of the
ratios per round.

================  ==================================================================================
variant           what it does
================  ==================================================================================
rowwise           dispatcher ``rowwise``: one row per token and rank, stored into the peer's mailbox
collective        dispatcher ``collective``: one row per token and rank, by all-to-all
per expert        the usual baseline: one row per token and expert, by all-to-all; the source rank
                  adds the K returned rows with their router weights
copies            upper limit: all ranks copy the rows that must travel four times: into the peers'
                  mailboxes, out of this rank's mailbox, back, and out again. A round trip also has
                  rows of the rank itself, the plan, metadata and the sum
copies, private   as many copies inside each process, where no core reads another core's writes
================  ==================================================================================

Shape letters: T tokens of a rank, D model width, K top-k, E experts, P pairs (token, expert),
R received rows.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from olmo_shard.dispatch.collective import CollectiveTransport
from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.heap.shared_memory import SharedMemoryHeap
from olmo_shard.dispatch.mailbox.mailbox_cpu import CpuMailbox
from olmo_shard.dispatch.mailbox.mailbox_layout import mailbox_layout
from olmo_shard.dispatch.pending_combine import start_combine
from olmo_shard.dispatch.row_plan import make_plan
from olmo_shard.dispatch.rowwise.rowwise_cpu import RowwiseCpuTransport
from olmo_shard.distributed.collectives import gather_objects
from olmo_shard.distributed.comm_stats import comm_stats
from olmo_shard.distributed.mesh import Mesh
from scripts.bench import tables
from scripts.bench.local_ranks import run_ranks, start_together
from scripts.bench.tables import Row
from scripts.output_folder import output_folder

PROGRAM = "scripts.bench.dispatch"
ROUTINGS = ("uniform", "skewed", "one rank")


def main() -> None:
    """Measure every number of ranks, and print the table."""
    arguments = _arguments()
    rows: list[Row] = []
    for ranks in arguments.ranks:
        rows += run_ranks(ranks, _all_shapes, arguments)
    tables.write(_table(rows), rows, arguments.out and arguments.out / "dispatch", PROGRAM)


def _arguments() -> argparse.Namespace:
    summary = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=summary)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096], help="per rank")
    parser.add_argument("--width", nargs="+", type=int, default=[1024])
    parser.add_argument("--top-k", nargs="+", type=int, default=[8])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--routing", nargs="+", default=["uniform"], choices=ROUTINGS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--out", type=output_folder, help="folder for the table and the raw figures"
    )
    return parser.parse_args()


def _all_shapes(mesh: Mesh, arguments: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    shapes = (arguments.tokens, arguments.width, arguments.top_k, arguments.routing)
    for shape in product(*shapes):
        rows += _round_trips(mesh, arguments, *shape)
    return rows


def _round_trips(
    mesh: Mesh, arguments: argparse.Namespace, tokens: int, width: int, top_k: int, routing: str
) -> list[Row]:
    """One row per variant and round, with the seconds of the slowest rank; collective."""
    # Inputs, from the seed of this rank.
    experts = arguments.experts
    generator = torch.Generator().manual_seed(mesh.rank)
    x_TD = torch.randn(tokens, width, generator=generator)
    topk_idx_TK = _route(routing, tokens, top_k, experts, mesh.expert_parallel, generator)
    topk_weights_TK = torch.rand(tokens, top_k, generator=generator)

    # The dispatchers, and how many rows each rank sends to each.
    layout = mailbox_layout(
        num_experts=experts,
        top_k=top_k,
        width=width,
        dtype=torch.float32,
        num_ranks=mesh.expert_parallel,
        max_tokens=tokens,
    )
    heap = SharedMemoryHeap(mesh.ep, layout.arena_bytes, layout.num_flags, mesh.timeout)
    mailbox = CpuMailbox(heap, layout)
    rowwise = TokenDispatcher(RowwiseCpuTransport(mailbox, tokens), experts)
    collective = TokenDispatcher(CollectiveTransport(mesh.ep), experts)
    plan = make_plan(topk_idx_TK, mesh.expert_parallel, experts // mesh.expert_parallel)
    own = plan.send_counts[mesh.rank]
    rows_by_rank = gather_objects(plan.send_counts, mesh.control)
    variants: dict[str, Callable[[], int]] = {
        "rowwise": lambda: _dispatch_and_combine(rowwise, x_TD, topk_idx_TK, topk_weights_TK),
        "collective": lambda: _dispatch_and_combine(collective, x_TD, topk_idx_TK, topk_weights_TK),
        "per expert": lambda: _per_expert(mesh, experts, x_TD, topk_idx_TK, topk_weights_TK),
        "copies": _copies(mailbox, x_TD, rows_by_rank),
        "copies, private": _private_copies(x_TD, sum(plan.send_counts) - own),
    }
    shape: Row = {"ranks": mesh.world_size, "tokens": tokens, "width": width, "top_k": top_k}
    shape["routing"] = routing
    sent_rows = sum(sum(sent) - sent[rank] for rank, sent in enumerate(rows_by_rank))
    rows = [
        {**shape, "rows": 2 * sent_rows, **row}
        for row in _measure(mesh, variants, arguments.rounds)
    ]
    del variants  # the copies hold views of the memory that is closed next
    rowwise.close()
    return rows


def _measure(mesh: Mesh, variants: dict[str, Callable[[], int]], rounds: int) -> list[Row]:
    rows: list[Row] = []
    for round_ in range(-2, rounds):  # rounds -2 and -1 warm up
        for name, variant in variants.items():
            begun = start_together(mesh)
            sent = variant()
            measured = (time.perf_counter() - begun, sent)
            of_ranks = gather_objects(measured, mesh.control)
            seconds, num_bytes = max(s for s, _ in of_ranks), sum(b for _, b in of_ranks)
            rows.append({"name": name, "round": round_, "seconds": seconds, "bytes": num_bytes})
    return [row for row in rows if row["round"] >= 0]


def _route(
    routing: str, tokens: int, top_k: int, experts: int, ranks: int, generator: torch.Generator
) -> Tensor:
    scores = torch.rand(tokens, experts, generator=generator)
    if routing == "skewed":  # the probability of expert e is proportional to 1 / sqrt(e + 1)
        gumbel = -torch.log(-torch.log(scores))
        scores = gumbel - 0.5 * torch.arange(1, experts + 1).log()
    elif routing == "one rank":
        scores[:, : max(top_k, experts // ranks)] += 1
    return scores.argsort(dim=1, descending=True)[:, :top_k].contiguous()


@torch.no_grad()
def _dispatch_and_combine(
    dispatcher: TokenDispatcher, x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor
) -> int:
    """One round trip. Returns the bytes that this rank sends."""
    with comm_stats.measure() as sent:
        pending = dispatcher.dispatch(x_TD, topk_idx_TK, topk_weights_TK)
        rows = pending.receive()
        start_combine(rows.x_RD, dispatcher.transport, rows.handle).wait()
    return sent.bytes.total()


def _per_expert(
    mesh: Mesh, experts: int, x_TD: Tensor, topk_idx_TK: Tensor, topk_weights_TK: Tensor
) -> int:
    """One round trip with K rows per token. Returns the bytes that this rank sends."""
    # Permute: one row per pair, sorted by expert.
    top_k, ranks = topk_idx_TK.shape[1], mesh.expert_parallel
    expert_P = topk_idx_TK.flatten()
    order_P = torch.argsort(expert_P, stable=True)
    rows_PD = x_TD[order_P // top_k]
    # Exchange counts, then rows, then the experts' outputs.
    counts_E = torch.bincount(expert_P, minlength=experts)
    recv_counts_E = torch.empty_like(counts_E)
    dist.all_to_all_single(recv_counts_E, counts_E, group=mesh.ep)
    send, recv = (c.view(ranks, -1).sum(dim=1).tolist() for c in (counts_E, recv_counts_E))
    received_RD = x_TD.new_empty(sum(recv), x_TD.shape[1])
    dist.all_to_all_single(received_RD, rows_PD, recv, send, group=mesh.ep)
    returned_PD = torch.empty_like(rows_PD)
    dist.all_to_all_single(returned_PD, received_RD, send, recv, group=mesh.ep)
    # Unpermute, and add the K rows of each token.
    by_route_PD = torch.empty_like(returned_PD)
    by_route_PD[order_P] = returned_PD
    torch.einsum("tkd,tk->td", by_route_PD.view(*topk_idx_TK.shape, -1), topk_weights_TK)
    rank = mesh.ep.rank()
    remote = sum(send) - send[rank] + sum(recv) - recv[rank]
    return remote * x_TD.shape[1] * x_TD.itemsize


def _copies(mailbox: CpuMailbox, x_TD: Tensor, rows_by_rank: list[list[int]]) -> Callable[[], int]:
    """The copies of a round trip alone: no metadata, no flags, no waits."""
    heap, layout = mailbox.heap, mailbox.layout
    rank, arenas = heap.rank, heap.arenas
    peers = [peer for peer in range(heap.size) if peer != rank]
    sent = {peer: rows_by_rank[rank][peer] for peer in peers}
    got = {peer: rows_by_rank[peer][rank] for peer in peers}
    # Two regions per peer, one per direction of the round trip: in its arena, and in this rank's.
    peer_rows = [
        {peer: layout.region(arenas[peer], peer, buffer, rank).rows for peer in peers}
        for buffer in range(2)
    ]
    own_rows = [
        {peer: layout.region(arenas[rank], rank, buffer, peer).rows for peer in peers}
        for buffer in range(2)
    ]
    received = {peer: torch.zeros(got[peer], x_TD.shape[1]) for peer in peers}
    returned = {peer: torch.zeros(sent[peer], x_TD.shape[1]) for peer in peers}

    def copy() -> int:
        for peer in peers:
            peer_rows[0][peer][: sent[peer]].copy_(x_TD[: sent[peer]])
        for peer in peers:
            received[peer].copy_(own_rows[0][peer][: got[peer]])
        for peer in peers:
            peer_rows[1][peer][: got[peer]].copy_(received[peer])
        for peer in peers:
            returned[peer].copy_(own_rows[1][peer][: sent[peer]])
        return sum(t.nbytes for t in (*received.values(), *returned.values()))

    return copy


def _private_copies(x_TD: Tensor, num_rows: int) -> Callable[[], int]:
    """Four copies of ``num_rows`` rows from and to memory that no other process uses."""
    repeats = -(-num_rows // max(1, len(x_TD)))
    rows = x_TD.repeat(repeats, 1)[:num_rows]
    buffers = [torch.zeros_like(rows) for _ in range(4)]

    def copy() -> int:
        for buffer in buffers:
            buffer.copy_(rows)
        return 0

    return copy


def _table(rows: list[Row]) -> list[str]:
    lines = tables.header(
        "ranks", "T", "D", "K", "routing", "transport", "ms", "time / rowwise's",
        "million rows/s", "GB/s to peers", "share of the copy limit",
    )  # fmt: skip
    shape = ("ranks", "tokens", "width", "top_k", "routing")
    for key in dict.fromkeys(tuple(row[name] for name in shape) for row in rows):
        of_shape = [row for row in rows if tuple(row[name] for name in shape) == key]
        for name in dict.fromkeys(row["name"] for row in of_shape):
            lines.append(tables.line(*map(str, key), name, *_figures(of_shape, name)))
    return lines


def _figures(rows: list[Row], name: str) -> list[str]:
    first, seconds = tables.of_variant(rows, name)[0], tables.median_seconds(rows, name)
    limit = name.startswith("copies")
    return [
        f"{seconds * 1e3:.1f}",
        f"{tables.ratio(rows, name, 'rowwise'):.2f}",
        f"{first['rows'] / seconds / 1e6:.2f}",
        f"{first['bytes'] / seconds / 1e9:.2f}" if first["bytes"] else "",
        "" if limit else f"{tables.ratio(rows, 'copies', name):.0%}",
    ]


if __name__ == "__main__":
    main()
