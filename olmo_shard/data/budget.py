"""The end of a run: its budget in steps, tokens or epochs, and the steps that are left of it.

A budget in tokens or epochs counts drawn sequences x sequence_length, including skipped steps and
tokens without a label. The rest of the budget is trained on in global batches of the current size,
so a changed batch size at a resume changes the number of steps:

    train.tokens = 20,480; 10 steps of 1,024 tokens are done, so 10,240 tokens are left
    global batch 2,048:  5 more steps, the run ends at step 15
    global batch   512: 20 more steps, the run ends at step 30
"""

from dataclasses import dataclass
from fractions import Fraction

from olmo_shard.config import TrainConfig
from olmo_shard.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How many tokens and steps a run may take."""

    train: TrainConfig
    sequence_length: int
    """Number of tokens per sequence."""
    num_sequences: int
    """Number of sequences per epoch, over all sources."""

    def tokens(self) -> int | None:
        """Return the tokens that the run may draw; ``None`` if its end is given in steps."""
        if self.train.epochs is None:
            return self.train.tokens
        # 2.3 x 100 is 229.99... in binary floating point. The decimal in the config is exact.
        sequences = int(Fraction(str(self.train.epochs)) * self.num_sequences)
        return sequences * self.sequence_length

    def tokens_left(self, drawn: int) -> int | None:
        """Return the tokens that are not drawn yet; ``None`` if the end is given in steps.

        :param drawn: sequences drawn so far, over all ranks.
        """
        tokens = self.tokens()
        return None if tokens is None else max(0, tokens - drawn * self.sequence_length)

    def total_steps(self, *, step: int = 0, drawn: int = 0) -> int:
        """Return the run's last step. An incomplete global batch at the end is not trained on.

        :param step: steps done, including skipped steps.
        :param drawn: sequences drawn in these steps, over all ranks.
        :raises ConfigurationError: if the budget of a new run is less than one step.
        """
        left = self.tokens_left(drawn)
        if left is None:
            assert self.train.steps is not None
            return self.train.steps
        steps = step + left // self.train.global_batch_tokens
        if steps == 0:
            end = "tokens" if self.train.tokens is not None else "epochs"
            raise ConfigurationError(
                f"train.{end} = {getattr(self.train, end)} is {left} tokens, less than one step of "
                f"train.global_batch_tokens = {self.train.global_batch_tokens}"
            )
        return steps
