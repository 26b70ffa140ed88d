"""Ids of documents, in batches that are bounded in memory."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tokenizers import Tokenizer

from olmo_shard.data.cuts import Cutter
from olmo_shard.data.signals import call_in_thread

_BATCH_CHARACTERS = 1 << 21
"""Characters that are encoded at once, in parallel; one piece may be longer."""
_BATCH_PIECES = 4096


class Piece(NamedTuple):
    """Text of a document, or of a part of one."""

    text: str
    begins: bool
    """Whether the piece is the first of its document."""
    ends: bool
    """Whether the piece is the last of its document."""


class EncodedPiece(NamedTuple):
    """Ids of a document, or of a part of one."""

    ids: list[int]
    begins: bool
    ends: bool


def pieces_of(documents: Iterable[str], cutter: Cutter) -> Iterator[Piece]:
    """The documents in order, long ones cut where their ids allow a cut."""
    for document in documents:
        begins, waiting = True, None
        for text in cutter.pieces(document):
            if waiting is not None:
                yield Piece(waiting, begins, ends=False)
                begins = False
            waiting = text
        assert waiting is not None
        yield Piece(waiting, begins, ends=True)


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[EncodedPiece]:
    """The ids of each piece, without any that a post-processor adds.

    The name of a special token inside of a text is text: it must not end the document.
    """
    tokenizer.encode_special_tokens = True
    for batch in _batches(pieces):
        texts = [piece.text for piece in batch]
        for piece, ids in zip(batch, call_in_thread(_ids, tokenizer, texts), strict=True):
            yield EncodedPiece(ids, piece.begins, piece.ends)


def _ids(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return (encoding.ids for encoding in encodings)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        if batch and (
            characters + len(piece.text) > _BATCH_CHARACTERS or len(batch) == _BATCH_PIECES
        ):
            yield batch
            batch, characters = [], 0
        batch.append(piece)
        characters += len(piece.text)
    if batch:
        yield batch
