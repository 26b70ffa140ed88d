"""The training step of a config's model, with changed parallel settings, and random batches."""

from typing import Any

import torch

from olmo_shard.config import Config, ParallelConfig
from olmo_shard.data.loader import MicroBatch
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.nn.transformer import Transformer
from olmo_shard.optim.sharded import DistributedOptimizer
from olmo_shard.parallel.apply import parallelize
from olmo_shard.train.step import TrainStep


def build(config: Config, mesh: Mesh, changes: dict[str, Any]) -> TrainStep:
    """Build model, parallel model, optimizer and training step; collective.

    :param changes: new values of fields of the section ``parallel``; a mapping changes the named
        fields of a subsection.
    """
    fields = config.parallel.model_dump()
    for name, value in changes.items():
        fields[name] = fields[name] | value if isinstance(value, dict) else value
    with torch.device("meta"):
        model = Transformer(config.model)
    parallel = ParallelConfig.model_validate(fields)
    tokens = config.train.micro_batch_tokens
    parallel_model = parallelize(model, mesh, parallel, config.run.seed, tokens)
    return TrainStep(model, DistributedOptimizer(parallel_model, mesh, config.optim), mesh)


def random_window(config: Config, mesh: Mesh, length: int) -> list[MicroBatch]:
    """An accumulation window of this rank: micro-batches of random token ids.

    :param length: number of micro-batches.
    """
    sequences = config.train.micro_batch_tokens // config.data.sequence_length
    shape = (sequences, config.data.sequence_length + 1)
    window = []
    for _ in range(length):
        ids = torch.randint(config.model.vocab_size, shape, device=mesh.device)
        window.append(MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), None))
    return window
