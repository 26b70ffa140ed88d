"""A model that trains hundreds of steps per second, and batches for it."""

from typing import Any

import torch
from torch import Tensor

from olmo_shard.config import ModelConfig, OptimConfig, ParallelConfig
from olmo_shard.data.loader import MicroBatch
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.nn.losses import IGNORE_INDEX
from olmo_shard.nn.moe import MoE
from olmo_shard.nn.transformer import Block, Transformer
from olmo_shard.optim.sharded import DistributedOptimizer
from olmo_shard.parallel.apply import parallelize
from olmo_shard.parallel.ddp import DDPModel
from olmo_shard.parallel.expert import shard_experts
from olmo_shard.parallel.shards import ParameterShard
from olmo_shard.train.step import StepOutput, TrainStep
from tests.support.ranks import mesh_of

SEQUENCES, LENGTH, VOCAB = 16, 12, 96


def model_config(router: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    """Config with 8 experts, top-2, a shared expert, one dense layer, and all balancing losses.

    :param router: changed fields of the router.
    :param changes: changed fields of the model; ``moe=None`` makes all layers dense.
    """
    router = {
        "lb_loss_weight": 0.02,
        "z_loss_weight": 0.001,
        "bias_gamma": 0.01,
        **(router or {}),
    }
    moe: dict[str, Any] = {"num_experts": 8, "top_k": 2, "hidden": 20, "num_shared_experts": 1}
    changed = changes.pop("moe", {})
    fields = {
        "vocab_size": VOCAB,
        "d_model": 36,
        "n_layers": 3,
        "n_heads": 6,
        "n_kv_heads": 2,
        "head_dim": 8,
        "qk_norm": "head",
        "ffn_hidden": 28,
        "n_dense_layers": 1,
        "z_loss_weight": 1e-4,
        "loss_chunk_tokens": 20,
        "init_std": 0.1,
        "moe": None if changed is None else moe | {"router": router} | changed,
        **changes,
    }
    return ModelConfig.model_validate(fields)


def moe_layer(model: Transformer, index: int) -> MoE:
    """The mixture-of-experts layer of a block."""
    block = model.blocks[index]
    assert isinstance(block, Block)
    assert isinstance(block.feed_forward, MoE)
    return block.feed_forward


def meta_model(config: ModelConfig) -> Transformer:
    """A model without memory for its weights."""
    with torch.device("meta"):
        return Transformer(config)


def global_batch(step: int, *, ignored: bool = True) -> tuple[Tensor, Tensor]:
    """Tokens and labels [SEQUENCES, LENGTH]; sequences have very unequal numbers of labels."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].clone()
    if ignored:
        keep = (
            torch.rand(labels.shape, generator=generator) < torch.linspace(0, 1, SEQUENCES)[:, None]
        )
        labels[~keep] = IGNORE_INDEX
    return tokens, labels


def window_of(
    step: int, rank: int, world_size: int, micro_sequences: int, *, ignored: bool = True
) -> list[MicroBatch]:
    """One rank's share of a global batch, as micro-batches."""
    tokens, labels = global_batch(step, ignored=ignored)
    share = SEQUENCES // world_size
    mine = range(rank * share, (rank + 1) * share, micro_sequences)
    return [
        MicroBatch(tokens[i : i + micro_sequences], labels[i : i + micro_sequences], None)
        for i in mine
    ]


def build(
    rank: Runtime,
    model: ModelConfig,
    parallel: dict[str, Any],
    optim: dict[str, Any],
    seed: int = 7,
) -> TrainStep:
    """A training step with its parallel model and optimizer; collective."""
    config = ParallelConfig.model_validate(parallel)
    mesh = mesh_of(rank, config.expert_parallel)
    module = meta_model(model)
    parallel_model = parallelize(module, mesh, config, seed, max_tokens=SEQUENCES * LENGTH)
    optimizer = DistributedOptimizer(parallel_model, mesh, OptimConfig.model_validate(optim))
    return TrainStep(module, optimizer, mesh)


def small_model(rank: Runtime, model: Any) -> tuple[Any, DDPModel]:
    """Any module in mode ddp. All weights are 1, each parameter is a bucket, a window has begun."""
    mesh = mesh_of(rank)
    config = ParallelConfig.model_validate({"ddp": {"bucket_cap_mb": 1e-6}})
    parameters = shard_experts(model, mesh)
    parallel_model = DDPModel(model, mesh, config, parameters, lambda p: torch.ones(p.shape))
    parallel_model.begin_window()
    return model, parallel_model


def train(
    step: TrainStep,
    rank: Runtime,
    steps: int,
    micro_sequences: int,
    lr: float = 0.05,
    start: int = 0,
) -> list[StepOutput]:
    """Run some steps on this rank's share of the global batches."""
    return [
        step(window_of(start + i, rank.rank, rank.world_size, micro_sequences), lr)
        for i in range(steps)
    ]


def figures(output: StepOutput) -> tuple[float, float]:
    """Loss and gradient norm."""
    return float(output.sums.cross_entropy / output.tokens.clamp(min=1)), float(output.grad_norm)


def owned(step: TrainStep) -> dict[str, list[tuple[int, list[float]]]]:
    """This rank's main weights: name to (offset in the logical tensor, values) per chunk."""
    chunks_of: dict[str, list[tuple[int, list[float]]]] = {}
    for shard, main in mains(step).values():
        start = 0
        for offset, length in shard.chunks:
            values = main[start : start + length].tolist()
            chunks_of.setdefault(shard.name, []).append((offset, values))
            start += length
    return chunks_of


def mains(step: TrainStep) -> dict[str, tuple[ParameterShard, Tensor]]:
    """Name to (shard, main weights), for the shards that this rank owns."""
    return {s.name: (s, s.of(part.main)) for part in step.optimizer.slices for s in part.shards}


def assemble(parts: list[dict[str, list[tuple[int, list[float]]]]]) -> dict[str, Tensor]:
    """The logical weights, from the chunks of all ranks.

    :param parts: result of ``owned`` on each rank.
    :raises AssertionError: if an element has no owner, or two.
    """
    whole: dict[str, Tensor] = {}
    for name in sorted({name for part in parts for name in part}):
        chunks = sorted(chunk for part in parts for chunk in part.get(name, []))
        position = 0
        for offset, values in chunks:
            assert offset == position, f"{name}: element {position} has no owner or two"
            position += len(values)
        whole[name] = torch.tensor([value for _, values in chunks for value in values])
    return whole
