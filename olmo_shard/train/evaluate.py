"""Validation loss: the exact mean over the tokens of a set, the same on every rank."""

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
    """Mean cross-entropy by set name; ``None`` for a set in which no token has a label.

    Neither router biases nor counts move.
    """
    return {each.name: _loss(parallel_model, each, mesh) for each in sets}


def _loss(parallel_model: ParallelModel, validation: ValidationSet, mesh: Mesh) -> float | None:
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for batch in validation.batches(mesh.rank, mesh.world_size):
        batch = batch.to(mesh.device)
        output = parallel_model.model(*batch)
        total += torch.stack([output.cross_entropy.double(), batch.num_labelled().double()])
    parallel_model.raise_if_peer_lost()  # the loss is NaN where a transport has failed: say why
    collectives.all_reduce(total, mesh.control, kind="eval")
    return mean_over(int(total[1]), total[0])
