"""Validation loss: the exact mean over the tokens of a set, equal on every rank."""

import torch

from olmo_shard.data.validation import ValidationSet
from olmo_shard.distributed import collectives
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.parallel.shards import ParallelModel
from olmo_shard.train.metrics import mean_over


@torch.no_grad()
def evaluate(
    parallel_model: ParallelModel, sets: list[ValidationSet], mesh: Mesh
) -> dict[str, float | None]:
    """Mean cross-entropy of each validation set; collective.

    An evaluation changes neither router biases nor lagged counts.

    :returns: losses by set name; ``None`` for a set in which no token has a label.
    """
    return {validation.name: _loss(parallel_model, validation, mesh) for validation in sets}


def _loss(parallel_model: ParallelModel, validation: ValidationSet, mesh: Mesh) -> float | None:
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for batch in validation.batches(mesh.rank, mesh.world_size):
        batch = batch.to(mesh.device)
        output = parallel_model.model(*batch)
        total += torch.stack([output.cross_entropy.double(), batch.num_labelled().double()])
    # A lost peer makes the loss NaN. Raise here, with the reason, instead.
    parallel_model.raise_if_peer_lost()
    collectives.all_reduce(total, mesh.control, kind="eval")
    return mean_over(int(total[1]), total[0])
