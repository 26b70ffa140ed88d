"""What a run draws from its data, and what it never trains on, as lines for the log."""

from olmo_shard.data.budget import budget_tokens, tokens_left
from olmo_shard.data.loader import DataLoader


def describe_data(loader: DataLoader, step: int) -> list[str]:
    """Size of an epoch, epochs of each source by the run's end, and data that are never used.

    :param step: steps done at the loader's position.
    """
    config, steps = loader.config, loader.total_steps(step)
    epochs = ", ".join(
        f"{name} {drawn / source.num_sequences:.2f}"
        for (name, drawn), source in zip(
            _drawn_at(loader, steps - step), loader.sources, strict=True
        )
    )
    return [
        f"data      {loader.num_sequences:,} sequences of {config.data.sequence_length} tokens "
        f"an epoch; epochs by step {steps}: {epochs}",
        f"unused    {_unused(loader)}",
    ]


def describe_end(loader: DataLoader, step: int) -> str:
    """How the number of steps follows from the budget."""
    train, steps = loader.config.train, loader.total_steps(step)
    left = tokens_left(loader.config, loader.num_sequences, loader.state.sequences)
    if left is None:
        return f"{steps} steps"
    budget = f"train.tokens = {train.tokens}" if train.tokens else f"train.epochs = {train.epochs}"
    return (
        f"{steps} steps: {step} done, and {steps - step} of {train.global_batch_tokens:,} tokens "
        f"within the {left:,} tokens left of {budget}"
    )


def _drawn_at(loader: DataLoader, steps: int) -> list[tuple[str, float]]:
    """Names of the sources, and sequences drawn from each after some more steps, to within one."""
    more = max(0, steps) * loader.batch_sequences
    state, shares = loader.state, loader.shares.tolist()
    drawn = (count + more * share for count, share in zip(state.drawn, shares, strict=True))
    return list(zip(state.sources, drawn, strict=True))


def _unused(loader: DataLoader) -> str:
    """Ids that fill no sequence, and tokens that fill no global batch, with their shares."""
    config, total = loader.config, sum(source.num_tokens for source in loader.sources)
    unfilled = sum(source.unused_ids for source in loader.sources)
    line = (
        f"{unfilled:,} of {total:,} ids ({unfilled / total:.2%}) fill no sequence, at the ends of "
        "files"
    )
    left = tokens_left(config, loader.num_sequences, loader.state.sequences)
    budget = budget_tokens(config, loader.num_sequences)
    if left is None or budget is None:
        return line
    rest = left % config.train.global_batch_tokens
    return (
        f"{line}; {rest // config.data.sequence_length:,} sequence(s), {rest:,} of the budget's "
        f"{budget:,} tokens ({rest / budget:.2%}), fill no global batch, at the end of the run"
    )
