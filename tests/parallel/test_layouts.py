"""The layout does not change the result: ranks, EP degree, mode, micro-batch size, recompute,
compile.

The batches have very unequal numbers of labels (some sequences have none), and
all balancing losses, the router bias and clipping are on.
"""

import warnings
from typing import Any

import pytest
import torch

from olmo_shard.distributed.runtime import Runtime
from tests.support.close import same_figures, same_weights
from tests.support.ties import assert_no_near_tie, watched_margins
from tests.support.tiny import SEQUENCES, assemble, build, figures, model_config, owned, train

STEPS = 20
SEED = 7
"""Of the initial weights. Tests whose run would have a near tie in routing take another one."""
SGD = {"name": "sgd", "lr": 0.05, "max_grad_norm": 1.0, "weight_decay": 0.1}
ADAMW = {"name": "adamw", "max_grad_norm": 1.0, "weight_decay": 0.1}


def run_case(
    rank: Runtime,
    model: dict[str, Any],
    parallel: dict[str, Any],
    optim: dict[str, Any],
    micro: int,
    lr: float,
    seed: int,
) -> tuple[list[tuple[float, float]], Any, list[list[float]]]:
    """Losses and norms, owned weights, router biases after 20 steps."""
    step = build(rank, model_config(**model), parallel, optim, seed)
    outputs = train(step, rank, STEPS, micro, lr=lr)
    biases = [router.expert_bias.tolist() for router in step.routers]
    return [figures(output) for output in outputs], owned(step), biases


def reference_case(rank: Runtime, *args: Any) -> tuple[Any, float]:
    """The run, and its smallest gap between scores."""
    with watched_margins() as margins:
        found = run_case(rank, *args)
    return found, margins.smallest


_one_rank: dict[str, Any] = {}


def one_rank(ranks: Any, model: dict[str, Any], optim: dict[str, Any], lr: float, seed: int) -> Any:
    """The reference: one rank, one micro-batch. Run once for each model and optimizer."""
    key = repr((model, optim, lr, seed))
    if key not in _one_rank:
        arguments = (model, {"mode": "ddp"}, optim, SEQUENCES, lr, seed)
        ((run, margin),) = ranks(1).run(reference_case, *arguments)
        assert_no_near_tie(margin)
        _one_rank[key] = [run]
    return _one_rank[key]


def compare(
    ranks: Any, size: int, model, parallel, optim, micro: int, lr: float = 0.05, seed: int = SEED
) -> None:
    whole = one_rank(ranks, model, optim, lr, seed)
    parts = ranks(size).run(run_case, model, parallel, optim, micro, lr, seed)
    expected, found = whole[0][0], parts[0][0]
    assert all(part[0] == found for part in parts), "ranks report different figures"
    same_figures(found, expected)
    assert all(part[2] == parts[0][2] for part in parts), "router biases differ between ranks"
    assert parts[0][2] == whole[0][2], "router biases differ from those of one rank"
    expected_weights, weights = assemble([whole[0][1]]), assemble([part[1] for part in parts])
    same_weights(weights, expected_weights)


LAYOUTS = [
    (1, {"mode": "ddp"}, 1),
    (1, {"mode": "ddp", "dispatch": "collective"}, 4),
    (2, {"mode": "ddp", "expert_parallel": 1}, 4),
    (1, {"mode": "ddp", "dispatch": "rowwise"}, 4),
    (2, {"mode": "ddp", "expert_parallel": 2}, 2),
    (2, {"mode": "ddp", "expert_parallel": 2, "dispatch": "collective"}, 2),
    (4, {"mode": "ddp", "expert_parallel": 4, "dispatch": "collective"}, 2),
    (2, {"mode": "ddp", "expert_parallel": 2, "ddp": {"bucket_cap_mb": 0.01}}, 8),
    (4, {"mode": "ddp", "expert_parallel": 1}, 1),
    (4, {"mode": "ddp", "expert_parallel": 2, "activation_checkpointing": "full"}, 2),
    (4, {"mode": "ddp", "expert_parallel": 4}, 4),
    (1, {"mode": "fsdp"}, 4),
    (2, {"mode": "fsdp", "expert_parallel": 1}, 2),
    (2, {"mode": "fsdp", "expert_parallel": 2, "activation_checkpointing": "full"}, 4),
    (4, {"mode": "fsdp", "expert_parallel": 1, "fsdp": {"reshard": "window"}}, 1),
    (4, {"mode": "fsdp", "expert_parallel": 2, "fsdp": {"reshard": "window"}}, 2),
    (4, {"mode": "fsdp", "expert_parallel": 4}, 1),
]


@pytest.mark.parametrize(("size", "parallel", "micro"), LAYOUTS)
def test_sgd_weights_equal_those_of_one_rank(
    ranks: Any, size: int, parallel: dict[str, Any], micro: int
) -> None:
    compare(ranks, size, {}, parallel, SGD, micro)


@pytest.mark.parametrize(("size", "parallel", "micro"), [LAYOUTS[4], LAYOUTS[10], LAYOUTS[15]])
def test_adamw_losses_equal_those_of_one_rank(
    ranks: Any, size: int, parallel: dict[str, Any], micro: int
) -> None:
    found = ranks(size).run(run_case, {}, parallel, ADAMW, micro, 3e-3, SEED)
    same_figures(found[0][0], one_rank(ranks, {}, ADAMW, 3e-3, SEED)[0][0])


ROUTERS = [
    ({"scoring": "sigmoid", "normalize": True, "scale": 2.5}, 6),
    ({"score_order": "after_topk", "lb_loss_scope": "sequence"}, 7),
    ({"normalize": True, "bias_gamma": 0.0}, 9),
]


@pytest.mark.parametrize(("router", "seed"), ROUTERS)
def test_router_options_keep_the_invariance(ranks: Any, router: dict[str, Any], seed: int) -> None:
    compare(ranks, 4, {"router": router}, {"expert_parallel": 2}, SGD, 2, seed=seed)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("shared", [0, 2])
def test_recompute_with_and_without_shared_experts(
    ranks: Any, norm_position: str, shared: int
) -> None:
    model = {"norm_position": norm_position, "moe": {"num_shared_experts": shared}}
    parallel = {"expert_parallel": 2, "activation_checkpointing": "full"}
    compare(ranks, 2, model, parallel, SGD, 4, lr=0.02, seed=9)


@pytest.mark.parametrize(
    "moe",
    [
        {"num_experts": 4, "top_k": 4},  # every token visits every expert
        {"num_experts": 4, "top_k": 1},
        {"num_experts": 2, "top_k": 1},  # one expert a rank
    ],
)
def test_edges_of_routing(ranks: Any, moe: dict[str, Any]) -> None:
    compare(ranks, 2, {"moe": moe}, {"expert_parallel": 2}, SGD, 4)


@pytest.mark.parametrize("reshard", ["forward", "window"])
def test_fewer_experts_than_shards_cut_the_other_dimension(ranks: Any, reshard: str) -> None:
    few = {"moe": {"num_experts": 2, "top_k": 1}}
    compare(ranks, 4, few, {"mode": "fsdp", "fsdp": {"reshard": reshard}}, SGD, 2)


def capacity_case(
    rank: Runtime, parallel: dict[str, Any]
) -> tuple[list[tuple[float, float]], list[float]]:
    """Figures, and routes that were dropped, of each step."""
    step = build(rank, model_config(), parallel, SGD)
    outputs = train(step, rank, 6, 4)
    return [figures(output) for output in outputs], [
        float(output.sums.layers["dropped"].sum()) for output in outputs
    ]


@pytest.mark.parametrize("factor", [0.3, 1.0])
def test_capacity_does_not_depend_on_the_ep_degree(ranks: Any, factor: float) -> None:
    """Same ranks and micro-batches: the same drops, losses and norms, recomputed or not."""
    layouts = [
        {},
        {"expert_parallel": 2},
        {"expert_parallel": 4, "activation_checkpointing": "full"},
        {"expert_parallel": 2, "dispatch": "collective"},
        {"expert_parallel": 2, "mode": "fsdp"},
    ]
    expected, drops = ranks(4).run(capacity_case, {"capacity_factor": factor})[0]
    assert min(drops) > 0
    without, none = ranks(4).run(capacity_case, {})[0]
    assert set(none) == {0}
    assert without[0] != expected[0]
    for layout in layouts[1:]:
        found, dropped = ranks(4).run(capacity_case, {"capacity_factor": factor, **layout})[0]
        assert dropped == drops
        same_figures(found, expected)


def parity_case(rank: Runtime, parallel: dict[str, Any]) -> tuple[list[Any], float]:
    with watched_margins() as margins:
        step = build(rank, model_config(), parallel, ADAMW, seed=5)
        found = [figures(output) for output in train(step, rank, 50, 2, lr=1e-3)]
    return found, margins.smallest


@pytest.mark.slow
def test_fifty_steps_follow_those_of_one_expert_group(ranks: Any) -> None:
    whole = ranks(4).run(parity_case, {})
    assert_no_near_tie(min(margin for _, margin in whole))
    for layout in ({"expert_parallel": 4}, {"expert_parallel": 2, "mode": "fsdp"}):
        found = ranks(4).run(parity_case, {"dispatch": "rowwise", **layout})
        same_figures(found[0][0], whole[0][0])


def bf16_case(rank: Runtime, mode: str) -> tuple[list[tuple[float, float]], set[str]]:
    """Figures of three steps of one micro-batch, and types of the reduced gradients."""
    parallel = {"mode": mode, "expert_parallel": 2, "compute_dtype": "bfloat16"}
    step = build(rank, model_config(), parallel, SGD)
    found = [figures(output) for output in train(step, rank, 3, SEQUENCES // 4, lr=0.05)]
    return found, {str(part.gradient().dtype) for part in step.optimizer.slices}


def test_bf16_is_the_same_in_both_modes(ranks: Any) -> None:
    """Same rounded weights, same operations: the first loss is equal to the bit.

    Gradients are reduced in FP32 in both, so the first norm is as equal as FP32 sums are.
    """
    (ddp, ddp_types), (fsdp, fsdp_types) = (ranks(4).run(bf16_case, m)[0] for m in ("ddp", "fsdp"))
    assert ddp_types == fsdp_types == {"torch.float32"}
    assert ddp[0][0] == fsdp[0][0]
    same_figures(fsdp[0], ddp[0])
    same_figures(fsdp, ddp, torch.bfloat16)


def test_bf16_follows_fp32(ranks: Any) -> None:
    """Trunk and head see the same divisor: the norm is within bf16's rounding of FP32's."""
    (found, _), expected = (
        ranks(4).run(bf16_case, "ddp")[0],
        one_rank(ranks, {}, SGD, 0.05, SEED)[0][0],
    )
    same_figures(found, expected[:3], torch.bfloat16)


def test_tied_embeddings(ranks: Any) -> None:
    compare(ranks, 2, {"tie_embeddings": True}, {"expert_parallel": 2}, SGD, 4, seed=6)
    compare(ranks, 2, {"tie_embeddings": True}, {"mode": "fsdp"}, SGD, 4, seed=6)


def test_dense_model(ranks: Any) -> None:
    compare(ranks, 2, {"moe": None, "n_dense_layers": 0}, {}, SGD, 4)
    compare(ranks, 2, {"moe": None, "n_dense_layers": 0}, {"mode": "fsdp"}, SGD, 4)


def compile_case(rank: Runtime, parallel: dict[str, Any]) -> tuple[list[tuple[float, float]], int]:
    """Figures of 20 steps, each with another routing, and how often blocks were compiled."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = build(rank, model_config(), parallel, SGD)
    with warnings.catch_warnings():
        # While it traces, torch.compile looks at the .grad of tensors that are no leaves.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0")
        found = [figures(output) for output in train(step, rank, STEPS, 4)]
    return found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_compile_gives_the_same_losses_and_compiles_once(ranks: Any, mode: str, dtype: str) -> None:
    layout = {"mode": mode, "expert_parallel": 2, "activation_checkpointing": "full"}
    expected = one_rank(ranks, {}, SGD, 0.05, SEED)[0][0]
    compiled = layout | {"compile": True, "compute_dtype": dtype}
    found, graphs = ranks(2).run(compile_case, compiled)[0]
    same_figures(found, expected, getattr(torch, dtype))
    # Attention, the dense feed-forward, the shared expert: the same for every layer and step.
    assert graphs == 3


def test_same_layout_twice_is_bitwise_equal(ranks: Any) -> None:
    def once() -> Any:
        return ranks(4).run(run_case, {}, {"expert_parallel": 2}, ADAMW, 2, 3e-3, SEED)

    assert once() == once()
