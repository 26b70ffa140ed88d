"""A source of sequences: token files, cut into sequences, which are shuffled anew per epoch.

Shape letters: S tokens per sequence.
"""

import hashlib

import numpy as np

from olmo_shard.config import DataConfig, DataSource
from olmo_shard.data.identity import SourceIdentity
from olmo_shard.data.token_file import TokenFile, find_token_files, out_of_vocabulary_problem
from olmo_shard.errors import DataError


class SequenceSource:
    """Sequences of S + 1 ids each, cut from files.

    The last id of a sequence serves as a label only, and is the first id of the next sequence. So a
    file of n ids holds (n - 1) // S sequences. No sequence crosses the end of a file, and the
    rest of a file is not used.

    :param sequence_length: S.
    :param vocab_size: number of ids of the model; ids are checked against it as they are read.
    """

    def __init__(self, files: list[TokenFile], sequence_length: int, vocab_size: int) -> None:
        self.files, self.length = files, sequence_length
        self.bounds = [file.bound(vocab_size) for file in files]
        """Per file, one more than the largest id allowed."""
        self._ids = [file.ids() for file in files]
        counts = [(len(ids) - 1) // sequence_length for ids in self._ids]
        # Global index of the sequence after each file's last one.
        self._ends = np.cumsum(counts)
        self.num_sequences = int(self._ends[-1])
        # Order of the epoch at hand, with its key (seed, epoch): computed once per epoch.
        self._order: tuple[tuple[int, int], np.ndarray] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of ids in all files."""
        return sum(len(ids) for ids in self._ids)

    @property
    def unused_ids(self) -> int:
        """Number of ids at the ends of files that are in no sequence, not even as a label."""
        # S ids per sequence, and one more per file: the label of the file's last token.
        used = len(self.files) + self.num_sequences * self.length
        return self.num_tokens - used

    @property
    def eos_id(self) -> int | None:
        """Id that ends each document; ``None`` if the config names none for raw files."""
        return self.files[0].eos_id

    def identity(self, *, masking: bool) -> SourceIdentity:
        """Return the sizes, types and digests of the files.

        :param masking: whether document masking makes ``eos_id`` part of the content.
        """
        files = [file.identity() for file in self.files]
        return SourceIdentity(eos_id=self.eos_id if masking else None, files=files)

    def read(self, index: int) -> np.ndarray:
        """Return one sequence, int64 [S + 1].

        :param index: number of the sequence, from 0, in the order of the files.
        :raises DataError: with file, offset and id, if an id is outside the vocabulary.
        """
        # The file of the sequence, and the sequence's offset in the file.
        file = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[file - 1]) if file else 0
        start = (index - first) * self.length
        ids = self._ids[file][start : start + self.length + 1]
        problem = out_of_vocabulary_problem(self.files[file], ids, start, self.bounds[file])
        if problem:
            raise DataError(problem)
        return ids.astype(np.int64)

    def shuffled(self, position: int, seed: int) -> int:
        """Return the index of a sequence in an endless stream of shuffled epochs.

        :param position: position in the stream, from 0. Epoch e has the positions from e x
            num_sequences on.
        """
        # The order is a function of seed and epoch alone, so a resume needs only the position.
        epoch, place = divmod(position, self.num_sequences)
        if self._order is None or self._order[0] != (seed, epoch):
            order = np.random.default_rng([seed, epoch]).permutation(self.num_sequences)
            self._order = (seed, epoch), order
        return int(self._order[1][place])


def open_sources(
    sources: dict[str, DataSource], data: DataConfig, vocab_size: int
) -> list[SequenceSource]:
    """Find and check the files of sources. Reads 64 KiB of each file.

    :param sources: sources by the names that messages use.
    :param vocab_size: number of ids of the model.
    :raises DataError: with the problems of all files in one message.
    """
    # Collect the problems of all files, so that a user can repair them together.
    problems: list[str] = []
    opened: list[SequenceSource] = []
    for name, source in sources.items():
        try:
            files = find_token_files(source)
        except DataError as error:
            problems.append(f"{name}: {error}")
            continue
        file_problems = [problem for file in files if (problem := _problem(file, data, vocab_size))]
        problems += [f"{name}: {problem}" for problem in file_problems]
        if not file_problems:
            opened.append(SequenceSource(files, data.sequence_length, vocab_size))
    if problems:
        raise DataError("\n  ".join(["these data cannot be used:", *problems]))
    return opened


def data_identity(data: DataConfig, vocab_size: int) -> dict[str, SourceIdentity]:
    """Return the identities of all training sources and validation sets, by name.

    :param vocab_size: number of ids of the model.
    :raises DataError: with the problems of all files in one message.
    """
    named = data.named_sources() | data.named_validation()
    opened = open_sources(named, data, vocab_size)
    return {
        name: source.identity(masking=data.document_masking)
        for name, source in zip(named, opened, strict=True)
    }


def source_seed(seed: int, name: str) -> int:
    """Return the seed of one source's order: two sources of equal size get different orders."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:6], "little")


def _problem(file: TokenFile, data: DataConfig, vocab_size: int) -> str | None:
    """The first problem of a file, cheapest tests first; ``None`` if there is none."""
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
