"""A model trained as on GPUs: Triton's kernels, mailboxes that kernels fill, main gradients that
kernels add to. Two gloo ranks, the interpreter, shared memory.
"""

from dataclasses import replace
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("triton", reason="Triton exists on Linux alone")

from olmo_shard.dispatch.dispatcher import TokenDispatcher
from olmo_shard.dispatch.mailbox.mailbox_gpu import GpuMailbox
from olmo_shard.dispatch.mailbox.mailbox_layout import most_rows
from olmo_shard.dispatch.rowwise.rowwise_cpu import RowwiseCpuTransport
from olmo_shard.dispatch.rowwise.rowwise_gpu import RowwiseGpuTransport, most_pairs
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.nn.moe import MoE
from olmo_shard.optim import adamw
from olmo_shard.parallel.dispatchers import DispatcherChoice
from olmo_shard.train.step import TrainStep
from tests.support.close import same_figures, same_weights
from tests.support.device_heap import SharedGpuHeap
from tests.support.ranks import mesh_of
from tests.support.tiny import LENGTH, assemble, build, figures, model_config, owned, window_of

MODEL = {"n_layers": 2, "moe": {"num_experts": 4}}
OPTIMS: dict[str, dict[str, Any]] = {"adamw": {"name": "adamw"}, "sgd": {"name": "sgd"}}


def by_kernels(step: TrainStep, rank: Runtime) -> None:
    """Put mailboxes that kernels fill in place of those for CPUs."""
    choice = step.optimizer.parallel_model.dispatcher_choice
    assert choice is not None
    plain = choice.dispatcher
    assert isinstance(plain.transport, RowwiseCpuTransport)
    # For the short micro-batches below: with a capacity factor tensors have their largest size.
    factor = plain.capacity_factor
    rows = most_rows(LENGTH, 2, plain.num_experts, 2, factor)
    layout = replace(plain.transport.mailbox.layout, max_rows=rows)
    plain.close()
    heap = SharedGpuHeap(mesh_of(rank, 2).ep, layout)
    mailbox = GpuMailbox(heap, layout, timedelta(seconds=60))
    max_pairs = most_pairs(layout, LENGTH, 2, plain.num_experts, factor)
    transport = RowwiseGpuTransport(mailbox, LENGTH, max_pairs)
    dispatcher = TokenDispatcher(transport, plain.num_experts, factor, "triton")
    for module in step.model.modules():
        if isinstance(module, MoE):
            module.dispatcher = dispatcher
    step.optimizer.parallel_model.dispatcher_choice = DispatcherChoice(dispatcher, "by kernels")


def training_case(
    rank: Runtime, kernels: str, parallel: dict[str, Any], optim: str
) -> tuple[list[tuple[float, float]], Any, list[int], list[int]]:
    """Losses and norms, weights, rows sent and bytes of the last step."""
    layout = {"expert_parallel": 2, "dispatch": "rowwise", "kernels": kernels, **parallel}
    step = build(rank, model_config(**MODEL), layout, OPTIMS[optim])
    if kernels == "triton" and layout["dispatch"] == "rowwise":
        by_kernels(step, rank)
    lr = 0.05 if optim == "sgd" else 1e-3
    windows = [window_of(i, rank.rank, 2, 1, ignored=False)[:2] for i in range(2)]
    with mock.patch.object(adamw, "adamw", wraps=adamw.adamw) as launched:
        outputs = [step(window, lr) for window in windows]
    assert bool(launched.call_count) == (kernels == "triton" and optim == "adamw")
    comm_stats = outputs[-1].comm_stats
    comm_stats.resolve_device_counts()
    found = [figures(output) for output in outputs], owned(step)
    step.optimizer.parallel_model.close()
    return (
        *found,
        outputs[-1].sums.layers["rows_sent"].tolist(),
        [comm_stats.bytes["rows"], comm_stats.bytes["metadata"]],
    )


@pytest.mark.parametrize(
    ("parallel", "optim"),
    [
        ({"activation_checkpointing": "full"}, "sgd"),
        ({"capacity_factor": 1.0}, "adamw"),
        ({"mode": "fsdp"}, "sgd"),
        ({"dispatch": "collective"}, "sgd"),
    ],
    ids=["recompute", "capacity", "fsdp", "collective"],
)
def test_losses_norms_and_weights_are_those_of_the_references(
    interpreted: Any, parallel: dict[str, Any], optim: str
) -> None:
    """Two steps of two micro-batches of a sequence; rows and bytes are counted alike."""
    by_triton = interpreted(2).run(training_case, "triton", parallel, optim)
    by_reference = interpreted(2).run(training_case, "reference", parallel, optim)
    for mine, reference in zip(by_triton, by_reference, strict=True):
        same_figures(mine[0], reference[0])
        assert mine[2:] == reference[2:]
    if optim == "sgd":  # Adam hides factors, and magnifies what is near zero
        found, expected = ([part[1] for part in run] for run in (by_triton, by_reference))
        same_weights(assemble(found), assemble(expected))
