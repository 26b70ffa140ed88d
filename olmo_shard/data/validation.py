"""Validation sets: the same forwards on every rank, and each sequence counted once."""

from collections.abc import Iterator

import numpy as np

from olmo_shard.config import Config
from olmo_shard.data.labels import IGNORE_INDEX
from olmo_shard.data.loader import MicroBatch, make_microbatch
from olmo_shard.data.source import SequenceSource, open_sources


class ValidationSet:
    """The first ``eval.tokens`` of a source, in file order."""

    def __init__(self, name: str, source: SequenceSource, config: Config) -> None:
        self.name, self.source = name, source
        length = config.data.sequence_length
        self.num_sequences = min(source.num_sequences, max(1, config.eval.tokens // length))
        self.micro_sequences = config.train.micro_batch_tokens // length
        self.eos_id = source.eos_id if config.data.document_masking else None

    def batches(self, rank: int, world_size: int) -> Iterator[MicroBatch]:
        """A rank's micro-batches: as many and of one shape on every rank.

        Places without a sequence are filled with copies of the first one, without labels.
        """
        together = world_size * self.micro_sequences
        first = self.source.read(0)
        for start in range(0, self.num_sequences, together):
            places = range(start + rank * self.micro_sequences, self.num_sequences)
            real = [self.source.read(index) for index in places[: self.micro_sequences]]
            filler: list[np.ndarray] = [first] * (self.micro_sequences - len(real))
            batch = make_microbatch(real + filler, [self.eos_id] * self.micro_sequences)
            batch.labels_BS[len(real) :] = IGNORE_INDEX
            yield batch


def open_validation(config: Config) -> list[ValidationSet]:
    """All validation sets of the config.

    :raises DataError: naming each bad file and why.
    """
    named = config.data.named_validation()
    sources = open_sources(named, config.data, config.model.vocab_size)
    return [
        ValidationSet(name, source, config)
        for name, source in zip(config.data.validation, sources, strict=True)
    ]
