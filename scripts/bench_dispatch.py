"""Round trips of token rows (dispatch, then combine) by each transport, on CPUs of one host.

    python scripts/bench_dispatch.py --ranks 2 4 --out docs/bench

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
import time
from collections.abc import Callable
from itertools import product

import bench_tables
import torch
import torch.distributed as dist
from bench_tables import Row
from local_ranks import run_ranks, start_together
from output_folder import output_folder
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

ROUTINGS = ("uniform", "skewed", "one rank")


def main() -> None:
    arguments = _arguments()
    rows: list[Row] = []
    for ranks in arguments.ranks:
        rows += run_ranks(ranks, _all_shapes, arguments)
    bench_tables.write(_table(rows), rows, arguments.out and arguments.out / "dispatch")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=[4096], help="of a rank")
    parser.add_argument("--width", nargs="+", type=int, default=[1024])
    parser.add_argument("--top-k", nargs="+", type=int, default=[8])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--routing", nargs="+", default=["uniform"], choices=ROUTINGS)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=output_folder, help="folder for the table and all figures")
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
    """Seconds of every contender in every turn, the slowest rank's; on all ranks."""
    experts = arguments.experts
    generator = torch.Generator().manual_seed(mesh.rank)
    x_TD = torch.randn(tokens, width, generator=generator)
    topk_idx_TK = _route(routing, tokens, top_k, experts, mesh.expert_parallel, generator)
    topk_weights_TK = torch.rand(tokens, top_k, generator=generator)

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
            begun = start_together(mesh)
            sent = contender()
            mine = (time.perf_counter() - begun, sent)
            found = gather_objects(mine, mesh.control)
            seconds, num_bytes = max(s for s, _ in found), sum(b for _, b in found)
            rows.append({"name": name, "turn": turn, "seconds": seconds, "bytes": num_bytes})
    return [row for row in rows if row["turn"] >= 0]


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
    with comm_stats.measure() as sent:
        pending = dispatcher.dispatch(x_TD, topk_idx_TK, topk_weights_TK)
        rows = pending.receive()
        start_combine(rows.x_RD, dispatcher.transport, rows.handle).wait()
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


def _copies(mailbox: CpuMailbox, x_TD: Tensor, pairs_by_rank: list[list[int]]) -> Callable[[], int]:
    """Copies the rows of a round trip, without order and without waiting."""
    heap, layout = mailbox.heap, mailbox.layout
    rank, arenas = heap.rank, heap.arenas
    peers = [peer for peer in range(heap.size) if peer != rank]
    sent = {peer: pairs_by_rank[rank][peer] for peer in peers}
    got = {peer: pairs_by_rank[peer][rank] for peer in peers}
    there = [
        {peer: layout.region(arenas[peer], peer, buffer, rank).rows for peer in peers}
        for buffer in range(2)
    ]
    here = [
        {peer: layout.region(arenas[rank], rank, buffer, peer).rows for peer in peers}
        for buffer in range(2)
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


def _table(rows: list[Row]) -> list[str]:
    lines = bench_tables.header(
        "ranks", "T", "D", "K", "routing", "transport", "ms", "time / rowwise's",
        "million rows/s", "GB/s to peers", "share of the copy limit",
    )  # fmt: skip
    shape = ("ranks", "tokens", "width", "top_k", "routing")
    for key in dict.fromkeys(tuple(row[name] for name in shape) for row in rows):
        mine = [row for row in rows if tuple(row[name] for name in shape) == key]
        for name in dict.fromkeys(row["name"] for row in mine):
            cells = [*map(str, key), name, *_figures(mine, name)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _figures(rows: list[Row], name: str) -> list[str]:
    first, seconds = bench_tables.of(rows, name)[0], bench_tables.median_seconds(rows, name)
    limit = name.startswith("copies")
    return [
        f"{seconds * 1e3:.1f}",
        f"{bench_tables.ratio(rows, name, 'rowwise'):.2f}",
        f"{first['pairs'] / seconds / 1e6:.2f}",
        f"{first['bytes'] / seconds / 1e9:.2f}" if first["bytes"] else "",
        "" if limit else f"{bench_tables.ratio(rows, 'copies', name):.0%}",
    ]


if __name__ == "__main__":
    main()
