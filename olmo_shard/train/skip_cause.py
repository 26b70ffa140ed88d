"""Why a step was skipped: the text of the message. Reading the tensors waits for the device."""

import math

import torch.distributed as dist

from olmo_shard.config import SpikeConfig
from olmo_shard.distributed import collectives
from olmo_shard.train.step_sums import StepOutput

NO_LABEL = (
    "no token of the global batch has a label, so there is nothing to learn from: look at the data "
    "of data.sources (with data.document_masking a document of one token has no label)"
)


def spike_cause(output: StepOutput, config: SpikeConfig) -> str:
    """The figures of a step that are above the limits of ``train.skip_spikes``."""
    loss = float(output.sums.cross_entropy / output.tokens)
    figures = {"loss": loss, "gradient norm": float(output.grad_norm)}
    above = [
        f"{name} {value:.4g} is above {limit:.4g}"
        for (name, value), limit in zip(figures.items(), output.limits.tolist(), strict=True)
        if not value <= limit
    ]
    rule = f"mean + {config.sigmas:g} standard deviations of the last {config.window} steps"
    return f"{' and '.join(above)}, {rule}"


def non_finite_cause(
    output: StepOutput,
    moe_layers: list[str],
    parameters: list[str],
    shards: list[str],
    group: dist.ProcessGroup,
) -> str:
    """The first place, in the order of computation, with a value that is not finite; collective.

    :param moe_layers: names of the MoE layers, in layer order.
    :param parameters: names of all parameters, in the order of forward.
    :param shards: name of the parameter of each shard that this rank owns.
    :param group: all ranks of the run.
    """
    # Forward: a NaN in the hidden states shows first in the next router's z-loss.
    z_loss_L = output.local_sums.layers.get("router_z_loss")
    z_losses = [] if z_loss_L is None else z_loss_L.tolist()
    in_forward = [
        f"the router of {name}"
        for name, z_loss in zip(moe_layers, z_losses, strict=True)
        if not math.isfinite(z_loss)
    ]
    if not math.isfinite(float(output.local_sums.cross_entropy)):
        in_forward.append("the cross-entropy")
    # Backward runs from the last parameter to the first.
    finite = output.squares.isfinite().tolist()
    bad = {name for name, is_finite in zip(shards, finite, strict=True) if not is_finite}
    in_backward = [name for name in reversed(parameters) if name in bad]

    by_rank = collectives.gather_objects((in_forward, in_backward), group)
    for rank, (forward, _) in enumerate(by_rank):
        if forward:
            return f"the first value that is not finite is {forward[0]} on rank {rank}"
    for rank, (_, backward) in enumerate(by_rank):
        if backward:
            return (
                f"the gradient of {backward[0]}, summed over the ranks, is not finite (rank "
                f"{rank} owns that part of the sum; any rank may have brought the value in)"
            )
    return "every rank's gradients are finite, their squares overflow"
