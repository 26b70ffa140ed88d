"""The documents of each split: which ones are held out, and token files with their checksums."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import BinaryIO

import numpy as np

from olmo_shard.data.encode import EncodedPiece


class SplitWriter:
    """Appends documents to one token file.

    :param file: opened for reading and writing.
    """

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self.file, self.dtype = file, dtype
        self.tokens = self.documents = 0
        self._digest = hashlib.sha256()
        self._before_last = (0, self._digest)

    @property
    def sha256(self) -> str:
        """Checksum of all that was written."""
        return self._digest.hexdigest()

    def begin_document(self) -> None:
        self._before_last = (self.tokens, self._digest.copy())
        self.documents += 1

    def append(self, ids: Sequence[int] | np.ndarray) -> None:
        """Add ids to the document at hand."""
        data = np.asarray(ids, dtype=self.dtype).tobytes()
        self.file.write(data)
        self._digest.update(data)
        self.tokens += len(ids)

    def move_last_document(self, target: "SplitWriter") -> None:
        """Take the last document out of this file and append it to another."""
        start, digest = self._before_last
        offset = start * self.dtype.itemsize
        self.file.seek(offset)
        ids = np.frombuffer(self.file.read(), dtype=self.dtype)
        self.file.seek(offset)
        self.file.truncate()
        self.tokens, self._digest = start, digest
        self.documents -= 1
        target.begin_document()
        target.append(ids)


def write_splits(
    encoded: Iterable[EncodedPiece],
    eos: int,
    fraction: float,
    train: SplitWriter,
    validation: SplitWriter,
) -> None:
    """Write each document to one split, ended by EOS.

    Validation gets at least the last document, if its fraction is not 0 and train keeps one.

    :param fraction: share of the documents that go to validation, in 0 .. 0.5.
    """
    number, writer = 0, train
    for piece in encoded:
        if piece.begins:
            number += 1
            writer = validation if _held_out(number, fraction) else train
            writer.begin_document()
        writer.append(piece.ids)
        if piece.ends:
            writer.append([eos])
    if fraction and not validation.documents and train.documents > 1:
        train.move_last_document(validation)


def _held_out(number: int, fraction: float) -> bool:
    """Whether the ``number``-th document (from 1) goes to validation: evenly spread ones do."""
    return math.floor(number * fraction) > math.floor((number - 1) * fraction)
