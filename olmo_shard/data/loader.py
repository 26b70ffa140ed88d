"""Batches: a rank's share of every global batch, in an order that no layout changes.

The stream of sequences is a function of the seed alone: sources take turns so that each always has
the share its weight says (the one furthest behind is next; ties go to the first), and each source
runs through shuffled epochs of its own. Global batch t is the t-th group of sequences of that
stream; rank r takes the r-th equal part of it. So the number of ranks and the micro-batch size
change nothing but who computes what.
"""

from typing import NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from olmo_shard.config import Config
from olmo_shard.data.budget import total_steps
from olmo_shard.data.identity import SourceIdentity, difference
from olmo_shard.data.labels import IGNORE_INDEX
from olmo_shard.data.source import open_sources, source_seed
from olmo_shard.errors import CheckpointError


class MicroBatch(NamedTuple):
    """B sequences of S tokens, as the model takes them."""

    tokens_BS: Tensor
    labels_BS: Tensor
    documents_BS: Tensor | None

    def num_labelled(self) -> Tensor:
        return (self.labels_BS != IGNORE_INDEX).sum()

    def to(self, device: torch.device) -> "MicroBatch":
        documents = None if self.documents_BS is None else self.documents_BS.to(device)
        return MicroBatch(self.tokens_BS.to(device), self.labels_BS.to(device), documents)


class LoaderState(BaseModel):
    """The position in the stream, and what the stream is made of."""

    model_config = ConfigDict(extra="forbid", strict=True)

    sequences: int = 0
    """Sequences that all ranks have taken."""
    drawn: list[int]
    """Of these, from each source."""
    seed: int
    sequence_length: int
    document_masking: bool
    sources: dict[str, SourceIdentity]
    """Files of each source: other files, or another order of them, are another stream."""
    weights: list[float]
    """Of the sources, in force since the next two."""
    since_sequences: int = 0
    since_drawn: list[int]


class DataLoader:
    """Accumulation windows of one rank.

    :param config: the run's config; its data are checked here.
    """

    def __init__(self, config: Config, rank: int = 0, world_size: int = 1) -> None:
        self.config, self.rank, self.world_size = config, rank, world_size
        named = config.data.named_sources()
        self.sources = open_sources(named, config.data, config.model.vocab_size)
        self._seeds = [source_seed(config.run.seed, name) for name in named]
        weights = np.array([source.weight for source in config.data.sources])
        self.shares = weights / weights.sum()
        """Part of the sequences that each source gives."""
        self.batch_sequences = config.train.global_batch_tokens // config.data.sequence_length
        self.micro_sequences = config.train.micro_batch_tokens // config.data.sequence_length
        self.state = LoaderState(
            drawn=[0] * len(self.sources),
            seed=config.run.seed,
            sequence_length=config.data.sequence_length,
            document_masking=config.data.document_masking,
            sources={
                name: source.identity(masking=config.data.document_masking)
                for name, source in zip(named, self.sources, strict=True)
            },
            weights=weights.tolist(),
            since_drawn=[0] * len(self.sources),
        )

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch over all sources."""
        return sum(source.num_sequences for source in self.sources)

    def total_steps(self, step: int = 0) -> int:
        """The run's last step, seen from the loader's position.

        :param step: steps done at this position.
        :raises ConfigurationError: where the budget of a new run is less than one step.
        """
        drawn = self.state.sequences
        return total_steps(self.config, self.num_sequences, step=step, drawn=drawn)

    def next_window(self) -> list[MicroBatch]:
        """This rank's micro-batches of the next global batch."""
        turns = [self._next() for _ in range(self.batch_sequences)]
        share = self.batch_sequences // self.world_size
        mine = [
            self.sources[source].read(self.sources[source].shuffled(position, self._seeds[source]))
            for source, position in turns[self.rank * share : (self.rank + 1) * share]
        ]
        eos = [self._masking_eos(source) for source, _ in turns[self.rank * share :][:share]]
        step = self.micro_sequences
        return [
            make_microbatch(mine[start : start + step], eos[start : start + step])
            for start in range(0, share, step)
        ]

    def load_state(self, state: LoaderState) -> None:
        """Go on at a position. Changed weights count from here on.

        :raises CheckpointError: where it is the position in another stream: sequences would be
            repeated or left out.
        """
        fields = {
            "run.seed": "seed",
            "data.sequence_length": "sequence_length",
            "data.document_masking": "document_masking",
        }
        changes = [
            f"{what} = {getattr(self.state, name)}, but the checkpoint was trained with "
            f"{getattr(state, name)}"
            for what, name in fields.items()
            if getattr(self.state, name) != getattr(state, name)
        ]
        now, before = self.state.sources, state.sources
        changed = difference(now, before, "in this run", "in the checkpoint")
        changes += [changed] if changed else []
        if changes:
            raise CheckpointError(
                f"{changes[0]}: the order or the content of the data would change; restore it, or "
                "start anew from the weights with checkpoint.init_from in another run.dir"
            )
        weights, self.state = self.state.weights, state.model_copy(deep=True)
        if weights != state.weights:
            self.state.weights = weights
            self.state.since_sequences = state.sequences
            self.state.since_drawn = list(state.drawn)

    def _next(self) -> tuple[int, int]:
        """Source and position in its own stream of the next sequence."""
        state, drawn = self.state, self.state.drawn
        since = np.array(drawn) - state.since_drawn
        due = self.shares * (state.sequences + 1 - state.since_sequences) - since
        source = int(np.argmax(due))
        position = drawn[source]
        drawn[source] += 1
        self.state.sequences += 1
        return source, position

    def _masking_eos(self, source: int) -> int | None:
        return self.sources[source].eos_id if self.config.data.document_masking else None


def make_microbatch(sequences: list[np.ndarray], eos_ids: list[int | None]) -> MicroBatch:
    """Stack sequences of S + 1 ids.

    :param eos_ids: of each sequence, the id that ends a document where documents are masked, else
        null. A token that ends a document has no label: what follows is another document.
    """
    ids = torch.from_numpy(np.stack(sequences))
    tokens_BS, labels_BS = ids[:, :-1].contiguous(), ids[:, 1:].clone()
    if eos_ids[0] is None:
        return MicroBatch(tokens_BS, labels_BS, None)
    ends_BS = tokens_BS == torch.tensor(eos_ids)[:, None]
    labels_BS[ends_BS] = IGNORE_INDEX
    documents_BS = ends_BS.cumsum(dim=1) - ends_BS.long()
    return MicroBatch(tokens_BS, labels_BS, documents_BS)
