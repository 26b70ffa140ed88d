"""Validation sets: equal numbers of forwards on all ranks, and each sequence counted once."""

from collections.abc import Iterator

import numpy as np

from olmo_shard.config import DataConfig
from olmo_shard.data.labels import IGNORE_INDEX
from olmo_shard.data.loader import MicroBatch, make_microbatch
from olmo_shard.data.source import SequenceSource, open_sources


class ValidationSet:
    """The first sequences of a source, in file order.

    :param num_sequences: largest number of sequences to evaluate; the source may have fewer.
    :param micro_sequences: sequences per micro-batch.
    :param masking: whether attention and labels stay within documents.
    """

    def __init__(
        self,
        name: str,
        source: SequenceSource,
        *,
        num_sequences: int,
        micro_sequences: int,
        masking: bool,
    ) -> None:
        self.name, self.source, self.micro_sequences = name, source, micro_sequences
        self.num_sequences = min(source.num_sequences, num_sequences)
        self.eos_id = source.eos_id if masking else None

    def batches(self, rank: int, world_size: int) -> Iterator[MicroBatch]:
        """Yield one rank's micro-batches. Their number and shape are equal on all ranks.

        A place without a sequence holds a copy of the first sequence, without labels: every rank
        takes part in every collective operation of the forward, and the copies count nothing.
        """
        sequences_of_all_ranks = world_size * self.micro_sequences
        first = self.source.read(0)
        for start in range(0, self.num_sequences, sequences_of_all_ranks):
            places = range(start + rank * self.micro_sequences, self.num_sequences)
            real = [self.source.read(index) for index in places[: self.micro_sequences]]
            filler: list[np.ndarray] = [first] * (self.micro_sequences - len(real))
            batch = make_microbatch(real + filler, [self.eos_id] * self.micro_sequences)
            batch.labels_BS[len(real) :] = IGNORE_INDEX
            yield batch


def open_validation(
    data: DataConfig, *, tokens: int, micro_batch_tokens: int, vocab_size: int
) -> list[ValidationSet]:
    """Open all validation sets of the config.

    :param tokens: largest number of tokens per set; at least one sequence is read.
    :param micro_batch_tokens: tokens per micro-batch.
    :param vocab_size: number of ids of the model.
    :raises DataError: naming each file that cannot be used, and why.
    """
    sources = open_sources(data.named_validation(), data, vocab_size)
    return [
        ValidationSet(
            name,
            source,
            num_sequences=max(1, tokens // data.sequence_length),
            micro_sequences=micro_batch_tokens // data.sequence_length,
            masking=data.document_masking,
        )
        for name, source in zip(data.validation, sources, strict=True)
    ]
