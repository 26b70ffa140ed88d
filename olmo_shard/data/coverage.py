"""Log lines about the data: how much of it a run draws, and what it never trains on."""

from olmo_shard.data.loader import DataLoader


def describe_data(loader: DataLoader, step: int) -> list[str]:
    """Return lines with the size of an epoch, each source's epochs, and the unused data.

    :param step: steps done at the loader's position.
    """
    steps = loader.total_steps(step)
    epochs = ", ".join(
        f"{name} {drawn / source.num_sequences:.2f}"
        for (name, drawn), source in zip(
            _drawn_after(loader, steps - step), loader.sources, strict=True
        )
    )
    return [
        f"data      {loader.num_sequences:,} sequences of {loader.data.sequence_length} tokens "
        f"an epoch; epochs by step {steps}: {epochs}",
        f"unused    {_unused(loader)}",
    ]


def describe_end(loader: DataLoader, step: int) -> str:
    """Return a line that derives the number of steps from the budget.

    :param step: steps done at the loader's position.
    """
    train, steps = loader.train, loader.total_steps(step)
    left = loader.budget.tokens_left(loader.state.sequences)
    if left is None:
        return f"{steps} steps"
    budget = f"train.tokens = {train.tokens}" if train.tokens else f"train.epochs = {train.epochs}"
    return (
        f"{steps} steps: {step} done, and {steps - step} of {train.global_batch_tokens:,} tokens "
        f"within the {left:,} tokens left of {budget}"
    )


def _drawn_after(loader: DataLoader, steps: int) -> list[tuple[str, float]]:
    """Per source: its name, and the sequences drawn from it after ``steps`` more steps.

    The number is the expectation by weight, which the loader meets to within one sequence.
    """
    more = max(0, steps) * loader.batch_sequences
    state, shares = loader.state, loader.shares.tolist()
    drawn = (count + more * share for count, share in zip(state.drawn, shares, strict=True))
    return list(zip(state.sources, drawn, strict=True))


def _unused(loader: DataLoader) -> str:
    """The ids that fill no sequence and the tokens that fill no global batch, with their shares."""
    total = sum(source.num_tokens for source in loader.sources)
    unfilled = sum(source.unused_ids for source in loader.sources)
    line = (
        f"{unfilled:,} of {total:,} ids ({unfilled / total:.2%}) fill no sequence, at the ends of "
        "files"
    )
    left, budget = loader.budget.tokens_left(loader.state.sequences), loader.budget.tokens()
    if left is None or budget is None:
        return line
    rest = left % loader.train.global_batch_tokens
    return (
        f"{line}; {rest // loader.data.sequence_length:,} sequence(s), {rest:,} of the budget's "
        f"{budget:,} tokens ({rest / budget:.2%}), fill no global batch, at the end of the run"
    )
