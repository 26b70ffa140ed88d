"""A source of training sequences: token files, cut into sequences, shuffled anew in each epoch."""

import hashlib

import numpy as np

from olmo_shard.config import Config, DataConfig, DataSource
from olmo_shard.data.identity import SourceIdentity
from olmo_shard.data.token_file import TokenFile, find_token_files, out_of_vocabulary_problem
from olmo_shard.errors import DataError


class SequenceSource:
    """Sequences of length + 1 ids: the last one is only a label, and the next sequence starts with
    it.

    A sequence never crosses a file's end; what is left over there is not used.

    :param sequence_length: S.
    :param vocab_size: of the model; ids are checked against it as they are read.
    """

    def __init__(self, files: list[TokenFile], sequence_length: int, vocab_size: int) -> None:
        self.files, self.length = files, sequence_length
        self.bounds = [file.bound(vocab_size) for file in files]
        self._ids = [file.ids() for file in files]
        counts = [(len(ids) - 1) // sequence_length for ids in self._ids]
        self._ends = np.cumsum(counts)
        self.num_sequences = int(self._ends[-1])
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids in self._ids)

    @property
    def unused_ids(self) -> int:
        """Ids at the ends of files that fill no sequence; a file's last label is used."""
        spent = len(self.files) + self.num_sequences * self.length
        return self.num_tokens - spent

    @property
    def eos_id(self) -> int | None:
        return self.files[0].eos_id

    def identity(self, *, masking: bool) -> SourceIdentity:
        """Sizes, types and digests of the files.

        :param masking: whether document masking makes ``eos_id`` part of the content.
        """
        files = [file.identity() for file in self.files]
        return SourceIdentity(eos_id=self.eos_id if masking else None, files=files)

    def read(self, index: int) -> np.ndarray:
        """One sequence as int64 [S + 1].

        :raises DataError: naming file, offset and id where an id is outside the vocabulary.
        """
        file = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[file - 1]) if file else 0
        start = (index - first) * self.length
        ids = self._ids[file][start : start + self.length + 1]
        problem = out_of_vocabulary_problem(self.files[file], ids, start, self.bounds[file])
        if problem:
            raise DataError(problem)
        return ids.astype(np.int64)

    def shuffled(self, position: int, seed: int) -> int:
        """Index of the ``position``-th sequence of an endless stream of shuffled epochs."""
        epoch, place = divmod(position, self.num_sequences)
        if self._order is None or self._order[0] != (seed, epoch):
            order = np.random.default_rng([seed, epoch]).permutation(self.num_sequences)
            self._order = (seed, epoch), order
        return int(self._order[1][place])


def open_sources(
    sources: dict[str, DataSource], data: DataConfig, vocab_size: int
) -> list[SequenceSource]:
    """Resolve and check sources; all problems of all files in one error.

    :param sources: by the name that messages use.
    :raises DataError: naming each bad file and why.
    """
    problems: list[str] = []
    opened: list[SequenceSource] = []
    for name, source in sources.items():
        try:
            files = find_token_files(source)
        except DataError as error:
            problems.append(f"{name}: {error}")
            continue
        found = [problem for file in files if (problem := _problem(file, data, vocab_size))]
        problems += [f"{name}: {problem}" for problem in found]
        if not found:
            opened.append(SequenceSource(files, data.sequence_length, vocab_size))
    if problems:
        raise DataError("\n  ".join(["these data cannot be used:", *problems]))
    return opened


def data_identity(config: Config) -> dict[str, SourceIdentity]:
    """Identity of all training sources and validation sets, by name.

    :raises DataError: naming each bad file and why.
    """
    named = config.data.named_sources() | config.data.named_validation()
    opened = open_sources(named, config.data, config.model.vocab_size)
    masking = config.data.document_masking
    return {
        name: source.identity(masking=masking) for name, source in zip(named, opened, strict=True)
    }


def source_seed(seed: int, name: str) -> int:
    """A seed of its own for each source, so that two sources of one size are not shuffled alike."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:6], "little")


def _problem(file: TokenFile, data: DataConfig, vocab_size: int) -> str | None:
    problem = file.size_problem() or file.head_problem(vocab_size)
    if problem:
        return problem
    if file.num_tokens() <= data.sequence_length:
        return (
            f"{file.path}: {file.num_tokens()} ids are fewer than data.sequence_length + 1 = "
            f"{data.sequence_length + 1}"
        )
    if file.vocab_size is not None and file.vocab_size > vocab_size:
        return (
            f"{file.path}: its vocabulary has {file.vocab_size} ids, but model.vocab_size = "
            f"{vocab_size}; raise model.vocab_size"
        )
    bound = file.vocab_size or vocab_size
    if file.eos_id is not None and file.eos_id >= bound:
        return f"{file.path}: eos_id = {file.eos_id} is outside the vocabulary of {bound} ids"
    if data.document_masking and file.eos_id is None:
        return f"{file.path}: data.document_masking needs the source's eos_id"
    return None
