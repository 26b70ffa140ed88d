"""The line of the log that states the types of a run's numbers."""

from olmo_shard.config import ParallelConfig


def describe_precision(parallel: ParallelConfig) -> str:
    """One line with the types of a run's numbers.

    ``docs/training.md`` has the whole table, with measured bounds of the differences.
    """
    computed, summed, sent = parallel.compute_dtype, "float32", "float32"
    if parallel.mode == "ddp":
        summed = parallel.ddp.grad_dtype
        sent = parallel.ddp.wire_dtype or summed
    if {computed, summed, sent} == {"float32"}:
        return "precision float32 throughout"
    return (
        f"precision {computed} weights and activations; gradients add up in {summed} and travel in "
        f"{sent}; main weights, moments, router, losses and norms are float32"
    )
