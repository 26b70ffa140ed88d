"""Collectives a window, whatever its number of micro-batches. Runs on gloo."""

from collections import Counter
from typing import Any

import pytest
import torch

from olmo_shard.distributed.comm_stats import comm_stats
from olmo_shard.distributed.runtime import Runtime
from tests.support.dispatch import TRANSPORTS
from tests.support.tiny import build, model_config, moe_layer, train

MOE_LAYERS = 2


def calls_case(
    rank: Runtime, parallel: dict[str, Any], micro: int, model: dict[str, Any] | None = None
) -> dict[str, int]:
    """Calls by kind of one step, counted where olmo_shard makes them."""
    step = build(rank, model_config(**(model or {})), parallel, {"name": "adamw"})
    train(step, rank, 1, micro)
    before = Counter(comm_stats.calls)
    train(step, rank, 1, micro, start=1)
    return dict(comm_stats.calls - before)


def backend_calls_case(rank: Runtime, parallel: dict[str, Any], micro: int) -> dict[str, int]:
    """Operations of one step by name, as torch's profiler sees them below torch.distributed."""
    step = build(rank, model_config(), parallel, {"name": "adamw"})
    train(step, rank, 1, micro)
    with torch.profiler.profile(acc_events=True) as profile:
        train(step, rank, 1, micro, start=1)
    events = profile.key_averages()
    return {e.key.removeprefix("c10d::"): e.count for e in events if e.key.startswith("c10d::")}


@pytest.mark.parametrize("micro", [8, 1])
def test_ddp_communicates_once_a_window(ranks, micro):
    """Two ranks, 8 sequences each: windows of 1 and of 8 micro-batches."""
    parallel = {"ddp": {"bucket_cap_mb": 0.02}}
    calls = ranks(2).run(calls_case, parallel, micro)[0]
    buckets = calls["reduce"]
    assert buckets > 2
    assert calls == {"tokens": 1, "reduce": buckets, "control": 1, "gather": buckets}


@pytest.mark.parametrize(("recompute", "extra"), [("none", 0), ("full", 1)])
@pytest.mark.parametrize("micro", [8, 1])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_four_row_exchanges_a_layer_and_micro_batch(ranks, transport, micro, recompute, extra):
    """``collective`` adds one exchange of counts; a recompute dispatches again (pre-norm)."""
    parallel = {
        "expert_parallel": 2,
        "activation_checkpointing": recompute,
        "dispatch": transport,
    }
    calls = ranks(2).run(calls_case, parallel, micro)[0]
    layers = MOE_LAYERS * (8 // micro)
    assert calls["rows"] == (4 + extra) * layers
    assert calls["metadata"] == (2 + extra) * layers
    assert calls.get("counts", 0) == ((1 + extra) * layers if transport == "collective" else 0)
    assert (calls["tokens"], calls["control"]) == (1, 1)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("shared", [0, 1])
def test_a_recompute_adds_one_exchange_before_a_norm_and_two_behind_one(
    ranks, norm_position, shared
):
    parallel = {"expert_parallel": 2, "activation_checkpointing": "full", "dispatch": "rowwise"}
    model = {"norm_position": norm_position, "moe": {"num_shared_experts": shared}}
    calls = ranks(2).run(calls_case, parallel, 4, model)[0]
    assert calls["rows"] == (5 if norm_position == "pre" else 6) * MOE_LAYERS * 2


@pytest.mark.parametrize(
    "parallel",
    [
        {"expert_parallel": 2},
        {"expert_parallel": 2, "dispatch": "collective"},
        {"mode": "fsdp"},
        {"mode": "fsdp", "fsdp": {"reshard": "window"}, "expert_parallel": 2},
        {"mode": "fsdp", "activation_checkpointing": "full"},
    ],
)
def test_no_collective_is_made_behind_the_counter(ranks, parallel):
    own = Counter(ranks(2).run(calls_case, parallel, 4)[0])
    seen = ranks(2).run(backend_calls_case, parallel, 4)[0]
    # On two ranks a bucket is one send and one receive, on gloo.
    buckets = own["reduce"] + own["gather"]
    assert seen.pop("send") == seen.pop("recv_") == buckets > 0
    assert seen.pop("allreduce_") == own["tokens"] + own["control"]
    rows = 0 if parallel.get("dispatch") != "collective" else own["rows"] + own["counts"]
    assert sum(seen.values()) == rows, seen


def test_fsdp_window_reduces_as_often_with_eight_micro_batches_as_with_one(ranks):
    parallel = {"mode": "fsdp", "fsdp": {"reshard": "window"}}
    one = ranks(2).run(calls_case, parallel, 8)[0]
    eight = ranks(2).run(calls_case, parallel, 1)[0]
    assert one["reduce"] == eight["reduce"] > 0


def test_fsdp_forward_reduces_every_micro_batch(ranks):
    parallel = {"mode": "fsdp", "fsdp": {"reshard": "forward"}}
    one = ranks(2).run(calls_case, parallel, 8)[0]
    assert ranks(2).run(calls_case, parallel, 1)[0]["reduce"] == 8 * one["reduce"]


def payload_case(rank: Runtime, parallel: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of rows, of what travels with them, and pairs by the routing seen."""
    step = build(rank, model_config(), parallel, {"name": "adamw"})
    pairs: list[int] = []
    dispatcher = moe_layer(step.model, 1).dispatcher
    original = dispatcher.start

    def start(x_TD: Any, topk_idx_TK: torch.Tensor, weights_TK: Any, layer: int) -> Any:
        owners = topk_idx_TK // dispatcher.num_local_experts
        for other in range(rank.world_size):
            if other != rank.rank:
                pairs.append(int((owners == other).any(dim=1).sum()))
        return original(x_TD, topk_idx_TK, weights_TK, layer)

    dispatcher.start = start  # type: ignore[method-assign]
    before = Counter(comm_stats.bytes)
    train(step, rank, 1, 4)
    sent = Counter(comm_stats.bytes) - before
    return sent["rows"], sent["metadata"], sum(pairs)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_payload_is_the_distinct_pairs_of_token_and_remote_rank(ranks, transport):
    """D = 36 FP32 values a row, four times; K = 2 weights and experts with the dispatch, K weight
    gradients with the way back."""
    results = ranks(2).run(payload_case, {"expert_parallel": 2, "dispatch": transport})
    rows, metadata, pairs = (sum(each) for each in zip(*results, strict=True))
    assert rows == pairs * 4 * 36 * 4
    assert metadata == pairs * (2 * (4 + 4) + 2 * 4)


def bytes_case(
    rank: Runtime, parallel: dict[str, Any], micro: int
) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """Bytes of a step by kind; elements of each parameter, and the ranks that share it."""
    step = build(rank, model_config(vocab_size=1024, d_model=72), parallel, {"name": "adamw"})
    mesh = step.optimizer.mesh
    sizes = {
        name: (p.numel(), (mesh.ep_dp if ".experts." in name else mesh.bulk).size())
        for name, p in step.model.named_parameters()
    }
    train(step, rank, 1, micro)
    return dict(train(step, rank, 1, micro, start=1)[0].comm_stats.bytes), sizes


@pytest.mark.parametrize("micro", [4, 1])
@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize(
    ("ddp", "reduced"), [({}, 4), ({"wire_dtype": "bfloat16"}, 2), ({"grad_dtype": "bfloat16"}, 2)]
)
def test_ddp_sends_gradient_and_weight_once_a_window(ranks, micro, ep, ddp, reduced):
    """(N - 1) / N of both, experts by their own group, whatever the window; padding within 2 %."""
    found, sizes = ranks(4).run(bytes_case, {"expert_parallel": ep, "ddp": ddp}, micro)[0]
    elements = sum(numel * (size - 1) / size for numel, size in sizes.values())
    assert found["reduce"] == pytest.approx(elements * reduced, rel=0.02)
    assert found["gather"] == pytest.approx(elements * 4, rel=0.02)


@pytest.mark.parametrize("micro", [4, 1])
def test_fsdp_window_sends_as_much_as_ddp(ranks, micro):
    parallel = {"mode": "fsdp", "fsdp": {"reshard": "window"}}
    found, _ = ranks(4).run(bytes_case, parallel, micro)[0]
    ddp, _ = ranks(4).run(bytes_case, {}, micro)[0]
    for kind in ("reduce", "gather"):
        assert found[kind] == pytest.approx(ddp[kind], rel=0.02)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("micro", [4, 1])
def test_fsdp_forward_fetches_twice_and_reduces_once_a_micro_batch(ranks, micro, recompute):
    """Its prefetch fetches nothing in vain. The root's weights stay from forward to backward."""
    parallel = {"mode": "fsdp", "activation_checkpointing": recompute}
    found, sizes = ranks(2).run(bytes_case, parallel, micro)[0]
    in_blocks = sum(numel for name, (numel, _) in sizes.items() if name.startswith("blocks."))
    at_root = sum(numel for name, (numel, _) in sizes.items() if not name.startswith("blocks."))
    window = 8 // micro
    assert found["reduce"] == pytest.approx(window * 4 * (in_blocks + at_root) / 2, rel=0.02)
    assert found["gather"] == pytest.approx(window * 4 * (2 * in_blocks + at_root) / 2, rel=0.02)
