"""Batches: each rank's part of every global batch, in an order that no layout changes.

The seed alone decides the stream of sequences. [Note: mixture] says which source gives the next
sequence. Each source draws from its own endless stream of shuffled epochs. Global batch t is the
t-th group of sequences of the stream, and rank r takes the r-th equal part of the group. So the
number of ranks and the micro-batch size only decide which rank computes a sequence, and when.

[Note: mixture] Each sequence comes from the source that is furthest below its share; ties go to the
first such source. With weights 3 and 1 the stream begins with sources 0, 0, 1, 0: after n sequences
every source has given weight x n sequences, to within one. The state that this needs is
``LoaderState``.

Shape letters: B sequences per micro-batch, S tokens per sequence.
"""

from typing import NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from olmo_shard.config import DataConfig, TrainConfig
from olmo_shard.data.budget import Budget
from olmo_shard.data.identity import SourceIdentity, difference
from olmo_shard.data.labels import IGNORE_INDEX
from olmo_shard.data.source import open_sources, source_seed
from olmo_shard.errors import CheckpointError


class MicroBatch(NamedTuple):
    """B sequences of S tokens, in the order of the arguments of the model's forward."""

    tokens_BS: Tensor
    """Ids, int64."""
    labels_BS: Tensor
    """Id that follows each token, int64; ``IGNORE_INDEX`` for a token without a label."""
    documents_BS: Tensor | None
    """Number of each token's document in its sequence, from 0, int64; ``None`` without masking."""

    def num_labelled(self) -> Tensor:
        """Return the number of tokens with a label, as an int64 scalar on the batch's device."""
        return (self.labels_BS != IGNORE_INDEX).sum()

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the micro-batch on another device."""
        documents = None if self.documents_BS is None else self.documents_BS.to(device)
        return MicroBatch(self.tokens_BS.to(device), self.labels_BS.to(device), documents)


class LoaderState(BaseModel):
    """The position in the stream of sequences, and everything that the stream depends on.

    Mixture weights may change at a resume. The counts up to that point are kept, and the new
    weights apply to the sequences after it. Two sources, an example:

        weights [1, 1], 160 sequences drawn:   sequences = 160, drawn = [80, 80],
                                               since_sequences = 0, since_drawn = [0, 0]
        resumed with weights [1, 3]:           since_sequences = 160, since_drawn = [80, 80]
        after 160 more sequences:              sequences = 320, drawn = [120, 200]

    Of the 160 new sequences, source 1 gave 200 - 80 = 120: three quarters, as the new weights ask.
    Without the two ``since`` fields source 1 would give every sequence until it had three quarters
    of all 320.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    sequences: int = 0
    """Number of sequences drawn so far, over all ranks and sources: the sum of ``drawn``."""
    drawn: list[int]
    """Number of sequences drawn so far from each source, over all ranks. It is also each source's
    position in its own stream of shuffled epochs.
    """
    seed: int
    """``run.seed``."""
    sequence_length: int
    """``data.sequence_length``."""
    document_masking: bool
    """``data.document_masking``."""
    sources: dict[str, SourceIdentity]
    """Files of each source, by its name. Other files or another order change the stream."""
    weights: list[float]
    """Mixture weight of each source. They apply to the sequences after ``since_sequences``."""
    since_sequences: int = 0
    """Value of ``sequences`` when ``weights`` came into force; 0 if they never changed."""
    since_drawn: list[int]
    """Value of ``drawn`` when ``weights`` came into force; zeros if they never changed."""


class DataLoader:
    """The accumulation windows of one rank.

    :param data: sources and their mixture. The files are checked here, without reading all ids.
    :param train: batch sizes, and the budget of the run.
    :param vocab_size: number of ids of the model; ids are checked against it as they are read.
    :param seed: seed of the order of the sequences.
    :raises DataError: naming each file that cannot be used.
    """

    def __init__(
        self,
        data: DataConfig,
        train: TrainConfig,
        *,
        vocab_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.data, self.train, self.rank, self.world_size = data, train, rank, world_size
        named = data.named_sources()
        self.sources = open_sources(named, data, vocab_size)
        self._seeds = [source_seed(seed, name) for name in named]
        weights = np.array([source.weight for source in data.sources])
        self.shares = weights / weights.sum()
        """Share of the sequences that each source gives; they add up to 1."""
        self.batch_sequences = train.global_batch_tokens // data.sequence_length
        """Number of sequences per global batch."""
        self.micro_sequences = train.micro_batch_tokens // data.sequence_length
        """Number of sequences per micro-batch."""
        self.state = LoaderState(
            drawn=[0] * len(self.sources),
            seed=seed,
            sequence_length=data.sequence_length,
            document_masking=data.document_masking,
            sources={
                name: source.identity(masking=data.document_masking)
                for name, source in zip(named, self.sources, strict=True)
            },
            weights=weights.tolist(),
            since_drawn=[0] * len(self.sources),
        )

    @property
    def num_sequences(self) -> int:
        """Number of sequences per epoch, over all sources."""
        return sum(source.num_sequences for source in self.sources)

    @property
    def budget(self) -> Budget:
        """The budget of the run."""
        return Budget(
            train=self.train,
            sequence_length=self.data.sequence_length,
            num_sequences=self.num_sequences,
        )

    def total_steps(self, step: int = 0) -> int:
        """Return the run's last step, from the loader's position on.

        :param step: steps done at this position.
        :raises ConfigurationError: if the budget of a new run is less than one step.
        """
        return self.budget.total_steps(step=step, drawn=self.state.sequences)

    def next_window(self) -> list[MicroBatch]:
        """Return this rank's micro-batches of the next global batch."""
        # Every rank draws the whole global batch, so that all ranks keep the same state. It reads
        # only the sequences of its own part.
        batch = [self._draw() for _ in range(self.batch_sequences)]
        share = self.batch_sequences // self.world_size
        own_part = batch[self.rank * share : (self.rank + 1) * share]
        sequences = [
            self.sources[source].read(self.sources[source].shuffled(position, self._seeds[source]))
            for source, position in own_part
        ]
        eos_ids = [self._masking_eos(source) for source, _ in own_part]
        step = self.micro_sequences
        return [
            make_microbatch(sequences[start : start + step], eos_ids[start : start + step])
            for start in range(0, share, step)
        ]

    def load_state(self, state: LoaderState) -> None:
        """Continue at a position. Changed mixture weights apply from this position on.

        :raises CheckpointError: if the stream of the position is another one. Its sequences would
            be repeated or left out.
        """
        # 1. The streams must be equal: seed, cutting into sequences, and files.
        fields = {
            "run.seed": "seed",
            "data.sequence_length": "sequence_length",
            "data.document_masking": "document_masking",
        }
        changes = [
            f"{field} = {getattr(self.state, name)}, but the checkpoint was trained with "
            f"{getattr(state, name)}"
            for field, name in fields.items()
            if getattr(self.state, name) != getattr(state, name)
        ]
        changed_data = difference(
            self.state.sources, state.sources, "in this run", "in the checkpoint"
        )
        changes += [changed_data] if changed_data else []
        if changes:
            raise CheckpointError(
                f"{changes[0]}: the order or the content of the data would change; restore it, or "
                "start anew from the weights with checkpoint.init_from in another run.dir"
            )
        # 2. Take over the position; the weights are those of the config, from here on.
        weights, self.state = self.state.weights, state.model_copy(deep=True)
        if weights != state.weights:
            self.state.weights = weights
            self.state.since_sequences = state.sequences
            self.state.since_drawn = list(state.drawn)

    def _draw(self) -> tuple[int, int]:
        """Draw the next sequence: its source, and its position in the source's own stream."""
        state, drawn = self.state, self.state.drawn
        drawn_since = np.array(drawn) - state.since_drawn
        # By how many sequences each source is below its share, counting the one to be drawn.
        due = self.shares * (state.sequences + 1 - state.since_sequences) - drawn_since
        source = int(np.argmax(due))
        position = drawn[source]
        drawn[source] += 1
        state.sequences += 1
        return source, position

    def _masking_eos(self, source: int) -> int | None:
        """The id that ends documents of a source; ``None`` without document masking."""
        return self.sources[source].eos_id if self.data.document_masking else None


def make_microbatch(sequences: list[np.ndarray], eos_ids: list[int | None]) -> MicroBatch:
    """Stack sequences of S + 1 ids into tokens and labels.

    With document masking, a token that ends a document has no label, because the next token is of
    another document. Ids 5 6 0 7 8 with end id 0 become

        tokens     5  6     0  7
        labels     6  0  none  8
        documents  0  0     0  1

    :param sequences: B arrays, int64 [S + 1].
    :param eos_ids: per sequence, the id that ends a document; ``None`` without document masking.
    """
    ids = torch.from_numpy(np.stack(sequences))
    tokens_BS, labels_BS = ids[:, :-1].contiguous(), ids[:, 1:].clone()
    if eos_ids[0] is None:
        return MicroBatch(tokens_BS, labels_BS, None)
    ends_BS = tokens_BS == torch.tensor(eos_ids)[:, None]
    labels_BS[ends_BS] = IGNORE_INDEX
    documents_BS = ends_BS.cumsum(dim=1) - ends_BS.long()
    return MicroBatch(tokens_BS, labels_BS, documents_BS)
