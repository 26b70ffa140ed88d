"""The end of a run: its budget in steps, tokens or epochs, and how many steps are left of it.

A budget in tokens or epochs counts what has been drawn: sequences x sequence_length, skipped steps
and tokens without a label included. What is left of it is trained on in global batches of today's
size, so a batch that was changed at a resume changes the number of steps:

    train.tokens = 20,480, and 10 steps of 1,024 tokens are done: 10,240 tokens are left
    global batch 2,048:  5 more steps, the run ends at step 15
    global batch   512: 20 more steps, the run ends at step 30
"""

from fractions import Fraction

from olmo_shard.config import Config
from olmo_shard.errors import ConfigurationError


def budget_tokens(config: Config, num_sequences: int) -> int | None:
    """Tokens that the run may draw; ``None`` if its end is given in steps.

    :param num_sequences: sequences of one epoch over all sources.
    """
    train = config.train
    if train.epochs is None:
        return train.tokens
    # 2.3 x 100 is 229.99... in binary floating point: the decimal that was typed counts.
    return int(Fraction(str(train.epochs)) * num_sequences) * config.data.sequence_length


def tokens_left(config: Config, num_sequences: int, drawn: int) -> int | None:
    """Tokens of the budget that are not drawn yet; ``None`` if the end is given in steps.

    :param drawn: sequences that all ranks have drawn together.
    """
    budget = budget_tokens(config, num_sequences)
    return None if budget is None else max(0, budget - drawn * config.data.sequence_length)


def total_steps(config: Config, num_sequences: int, *, step: int = 0, drawn: int = 0) -> int:
    """The run's last step; an incomplete global batch at the end is not trained on.

    :param num_sequences: sequences of one epoch over all sources.
    :param step: steps done, skipped steps included.
    :param drawn: sequences that all ranks have drawn together in these steps.
    :raises ConfigurationError: where the budget of a new run is less than one step.
    """
    train = config.train
    left = tokens_left(config, num_sequences, drawn)
    if left is None:
        assert train.steps is not None
        return train.steps
    steps = step + left // train.global_batch_tokens
    if steps == 0:
        end = "tokens" if train.tokens is not None else "epochs"
        raise ConfigurationError(
            f"train.{end} = {getattr(train, end)} is {left} tokens, less than one step of "
            f"train.global_batch_tokens = {train.global_batch_tokens}"
        )
    return steps
