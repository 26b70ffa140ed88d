"""The two splits: which documents go to validation, and the token files with their checksums."""

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import BinaryIO

import numpy as np

from olmo_shard.data.encode import EncodedPiece


class SplitWriter:
    """Writer of one split's token file.

    :param file: file opened for reading and writing.
    :param dtype: type of the ids in the file.
    """

    def __init__(self, file: BinaryIO, dtype: np.dtype) -> None:
        self.file, self.dtype = file, dtype
        self.tokens = self.documents = 0
        self._digest = hashlib.sha256()
        # Ids and digest before the last document, which ``move_last_document`` goes back to.
        self._before_last = (0, self._digest)

    @property
    def sha256(self) -> str:
        """SHA-256 digest, in hex, of the file's content."""
        return self._digest.hexdigest()

    def begin_document(self) -> None:
        """Count a new document; the ids appended next belong to it."""
        self._before_last = (self.tokens, self._digest.copy())
        self.documents += 1

    def append(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append ids to the current document."""
        # The digest is computed while writing, so that no file is read again.
        data = np.asarray(ids, dtype=self.dtype).tobytes()
        self.file.write(data)
        self._digest.update(data)
        self.tokens += len(ids)

    def move_last_document(self, target: "SplitWriter") -> None:
        """Remove the last document from this file and append it to another one."""
        # The digest before the document was kept, because SHA-256 cannot go back.
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
    """Write each document to one of the splits, followed by the end token.

    If the fraction is not 0 but selects no document, the last document goes to validation, unless
    it is the only one.

    :param encoded: pieces of documents, in order.
    :param eos: id of the end token.
    :param fraction: share of the documents that go to validation, from 0 to 0.5.
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
    # Only now the number of documents is known.
    if fraction and not validation.documents and train.documents > 1:
        train.move_last_document(validation)


def _held_out(number: int, fraction: float) -> bool:
    """Whether document ``number``, from 1, goes to validation; such documents are evenly spread."""
    return math.floor(number * fraction) > math.floor((number - 1) * fraction)
