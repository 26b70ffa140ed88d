"""Checkpoints: any layout reads any other, strict keys. Runs on gloo."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from olmo_shard.data.loader import LoaderState
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.errors import CheckpointError, TrainingError
from olmo_shard.train import checkpoint_folder as folders
from olmo_shard.train.checkpoint import Checkpointer
from olmo_shard.train.state import TrainState
from tests.support.close import same_figures
from tests.support.ties import assert_no_near_tie, watched_margins
from tests.support.tiny import assemble, build, figures, model_config, owned, train

ADAMW = {"name": "adamw"}


LR = 3e-3


LOADER = LoaderState(
    drawn=[5],
    seed=1,
    sequence_length=12,
    document_masking=False,
    sources={},
    weights=[1.0],
    since_drawn=[0],
)


def straight_case(
    rank: Runtime, parallel: dict[str, Any], steps: int, micro: int, model: Any = None
) -> Any:
    step = build(rank, model_config(**(model or {})), parallel, ADAMW)
    return [figures(o) for o in train(step, rank, steps, micro, lr=LR)], owned(step)


def reference_case(rank: Runtime) -> tuple[Any, float]:
    """Eight steps on one rank, and their smallest gap between scores."""
    with watched_margins() as margins:
        found = straight_case(rank, {"mode": "ddp"}, 8, 4)
    return found, margins.smallest


def save_case(
    rank: Runtime, parallel: dict[str, Any], steps: int, micro: int, where: str, model: Any = None
) -> str:
    step = build(rank, model_config(**(model or {})), parallel, ADAMW)
    train(step, rank, steps, micro, lr=LR)
    train_state = TrainState(step=steps, tokens=17)
    return str(Checkpointer(step.optimizer).save(Path(where), train_state, LOADER))


def resume_case(
    rank: Runtime,
    parallel: dict[str, Any],
    start: int,
    steps: int,
    micro: int,
    path: str,
    model: Any = None,
) -> Any:
    step = build(
        rank, model_config(**(model or {})), parallel, ADAMW, seed=1234
    )  # other initial weights
    state = Checkpointer(step.optimizer).load(Path(path))
    assert (state.train.step, state.train.tokens, state.loader) == (start, 17, LOADER)
    outputs = train(step, rank, steps, micro, lr=LR, start=start)
    return [figures(o) for o in outputs], owned(step)


def again_case(rank: Runtime, where: str) -> tuple[Any, Any]:
    """Two steps, a checkpoint, two more; then, with gathers under way, back and the two again."""
    step = build(rank, model_config(), {"expert_parallel": 2}, ADAMW)
    checkpointer = Checkpointer(step.optimizer)
    train(step, rank, 2, 4, lr=LR)
    path = checkpointer.save(Path(where), TrainState(step=2, tokens=17), LOADER)
    first = [figures(output) for output in train(step, rank, 2, 4, lr=LR, start=2)]
    checkpointer.load(path)
    return first, [figures(output) for output in train(step, rank, 2, 4, lr=LR, start=2)]


def test_a_checkpoint_may_be_loaded_right_after_a_step(ranks, tmp_path):
    for first, again in ranks(4).run(again_case, str(tmp_path)):
        assert again == first


SAVED = [
    (1, {"mode": "ddp"}, 4),
    (2, {"mode": "ddp", "expert_parallel": 2}, 4),
    (4, {"mode": "fsdp", "expert_parallel": 2}, 2),
]


RESUMED = [
    (4, {"mode": "ddp", "expert_parallel": 2}, 2),
    (3, {"mode": "ddp", "expert_parallel": 1}, None),
    (2, {"mode": "fsdp", "expert_parallel": 2}, 4),
    (4, {"mode": "fsdp", "expert_parallel": 1, "fsdp": {"reshard": "window"}}, 1),
    (1, {"mode": "ddp", "activation_checkpointing": "full"}, 16),
]


@pytest.mark.parametrize(("size", "parallel", "micro"), SAVED)
def test_any_layout_resumes_from_any_other(ranks, tmp_path, size, parallel, micro):
    path = ranks(size).run(save_case, parallel, 4, micro, str(tmp_path))[0]
    ((reference, margin),) = ranks(1).run(reference_case)
    assert_no_near_tie(margin)
    for other_size, other, other_micro in RESUMED:
        steps = 0 if other_micro is None else 4  # 16 sequences do not split over 3 ranks
        parts = ranks(other_size).run(resume_case, other, 4, steps, other_micro or 1, path)
        if steps:
            same_figures(parts[0][0], reference[0][4:])
        else:
            saved = ranks(size).run(straight_case, parallel, 4, micro)
            expected = assemble([part[1] for part in saved])
            found_weights = assemble([part[1] for part in parts])
            assert all(torch.equal(found_weights[name], expected[name]) for name in expected)


def test_experts_cut_in_the_other_dimension_are_saved_and_read(ranks, tmp_path):
    """FSDP over 4 ranks with 2 experts: several ranges of one tensor a rank."""
    few = {"moe": {"num_experts": 2, "top_k": 1}}
    fsdp = {"mode": "fsdp"}
    path = ranks(4).run(save_case, fsdp, 2, 2, str(tmp_path), few)[0]
    saved = assemble([part[1] for part in ranks(4).run(straight_case, fsdp, 2, 2, few)])
    for size, parallel in ((2, {"expert_parallel": 2}), (4, fsdp)):
        parts = ranks(size).run(resume_case, parallel, 2, 0, 2, path, few)
        found = assemble([part[1] for part in parts])
        assert all(torch.equal(found[name], saved[name]) for name in saved)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_in_the_same_layout_is_bitwise(ranks, tmp_path, dtype):
    parallel = {"expert_parallel": 2, "compute_dtype": dtype}
    path = ranks(2).run(save_case, parallel, 3, 4, str(tmp_path))[0]
    straight = ranks(2).run(straight_case, parallel, 6, 4)
    resumed = ranks(2).run(resume_case, parallel, 3, 3, 4, path)
    for (figures_a, weights_a), (figures_b, weights_b) in zip(straight, resumed, strict=True):
        assert figures_a[3:] == figures_b
        assert weights_a == weights_b


def contents_case(rank: Runtime, path: str) -> tuple[dict[str, int], list[str]]:
    import torch.distributed.checkpoint as dcp

    metadata: dict[str, Any] = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    step = build(rank, model_config(), {"compile": True, "activation_checkpointing": "full"}, ADAMW)
    return {key: value.size.numel() for key, value in metadata.items()}, [
        name for name, _ in step.model.named_parameters()
    ]


def test_names_have_no_prefixes_and_every_expert_is_there(ranks, tmp_path):
    """The elements of a saved expert tensor are E x size, not one rank's share."""
    parallel = {"expert_parallel": 2, "activation_checkpointing": "full"}
    path = ranks(2).run(save_case, parallel, 1, 4, str(tmp_path))[0]
    sizes, names = ranks(1).run(contents_case, path)[0]
    expected = {f"{kind}.{name}" for kind in ("model", "exp_avg", "exp_avg_sq") for name in names}
    buffers = {key for key in sizes if key.startswith("buffer.")}
    assert set(sizes) - buffers == expected
    assert {key.rsplit(".", 1)[1] for key in buffers} == {"expert_bias", "lagged_counts"}
    assert sizes["exp_avg.blocks.1.feed_forward.experts.w_gate_up"] == 8 * 40 * 36


def weights_only_case(rank: Runtime, path: str) -> tuple[Any, float, bool, float]:
    step = build(
        rank, model_config(), {"expert_parallel": 2, "compute_dtype": "bfloat16"}, ADAMW, 9
    )
    Checkpointer(step.optimizer).load_weights(Path(path))
    moments = float(sum(m.abs().sum() for m in step.optimizer.exp_avgs))
    bias = any(router.expert_bias.any() for router in step.routers)
    return owned(step), moments, bias, float(step.optimizer.step_count)


def test_init_from_takes_the_main_weights_alone(ranks, tmp_path):
    parallel = {"expert_parallel": 2, "compute_dtype": "bfloat16"}
    path = ranks(2).run(save_case, parallel, 2, 4, str(tmp_path))[0]
    trained = ranks(2).run(straight_case, parallel, 2, 4)
    for (_, expected), (found, moments, bias, count) in zip(
        trained, ranks(2).run(weights_only_case, path), strict=True
    ):
        assert found == expected, "FP32 main weights, not the rounded ones"
        assert (moments, bias, count) == (0.0, True, 0.0)


def error_case(rank: Runtime, path: str, model: dict[str, Any], optim: dict[str, Any]) -> str:
    step = build(rank, model_config(**model), {"expert_parallel": 2}, optim)
    try:
        Checkpointer(step.optimizer).load(Path(path))
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize(
    ("model", "optim", "message"),
    [
        ({"qk_norm": "none"}, ADAMW, "model.qk_norm = 'none' instead of 'head'"),
        ({"n_layers": 4}, ADAMW, "model.n_layers = 4 instead of 3"),
        ({"rope_theta": 5e5}, ADAMW, "model.rope_theta = 500000.0 instead of 10000.0"),
        ({"router": {"normalize": True}}, ADAMW, "model.moe.router.normalize = True instead of"),
        (
            {"vocab_size": 100},
            ADAMW,
            "is of another model: lm_head.weight [96, 36] instead of [100, 36]",
        ),
        ({}, {"name": "sgd"}, "unexpected exp_avg.blocks.0.attention.k_norm.weight"),
    ],
)
def test_what_does_not_fit_is_named_on_every_rank(ranks, tmp_path, model, optim, message):
    path = ranks(2).run(save_case, {"expert_parallel": 2}, 1, 4, str(tmp_path))[0]
    messages = ranks(2).run(error_case, path, model, optim)
    assert messages[0] == messages[1]
    assert message in messages[0]


def full_disk_case(rank: Runtime, where: str) -> str:
    """Rank 1 may write no more than 4 KiB to a file."""
    import resource
    import signal

    step = build(rank, model_config(), {"expert_parallel": 2}, ADAMW)
    checkpointer = Checkpointer(step.optimizer)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        checkpointer.save(Path(where), TrainState(step=1), LOADER)
        first = "saved"
    except TrainingError as error:
        first = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    checkpointer.save(Path(where), TrainState(step=1), LOADER)
    return first


def test_a_full_disk_on_one_rank_is_an_error_on_all_and_a_retry_works(ranks, tmp_path):
    messages = ranks(2).run(full_disk_case, str(tmp_path))
    assert all("cannot save" in m and "rank 1: OSError" in m for m in messages), messages
    assert [path.name for path in folders.complete_checkpoints(tmp_path)] == ["step-00000001"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (".metadata", b"", r"its \.metadata cannot be read"),
        (".metadata", b"garbage", r"its \.metadata cannot be read"),
        (".metadata", None, r"its \.metadata cannot be read"),
        ("__1_0.distcp", b"short", r"its file __1_0\.distcp has 5 bytes instead of"),
        ("__1_0.distcp", None, r"its file __1_0\.distcp is missing"),
    ],
)
def test_a_damaged_checkpoint_is_named_on_every_rank(ranks, tmp_path, name, content, message):
    path = ranks(2).run(save_case, {"expert_parallel": 2}, 1, 4, str(tmp_path))[0]
    if content is None:
        (Path(path) / name).unlink()
    else:
        (Path(path) / name).write_bytes(content)
    messages = ranks(2).run(error_case, path, {}, ADAMW)
    assert messages[0] == messages[1]
    assert re.search(message, messages[0])
