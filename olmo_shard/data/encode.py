"""Encoding of documents into ids, in batches of bounded memory."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tokenizers import Tokenizer

from olmo_shard.data.cuts import Cutter
from olmo_shard.data.termination import call_in_thread

_BATCH_CHARACTERS = 1 << 21
"""Largest number of characters per batch; the pieces of a batch are encoded in parallel. A single
piece may be longer.
"""
_BATCH_PIECES = 4096
"""Largest number of pieces per batch."""


class Piece(NamedTuple):
    """Text of a document, or of a part of a document."""

    text: str
    begins: bool
    """Whether the piece is the first of its document."""
    ends: bool
    """Whether the piece is the last of its document."""


class EncodedPiece(NamedTuple):
    """Ids of a document, or of a part of a document."""

    ids: list[int]
    begins: bool
    """Whether the piece is the first of its document."""
    ends: bool
    """Whether the piece is the last of its document."""


def pieces_of(documents: Iterable[str], cutter: Cutter) -> Iterator[Piece]:
    """Yield the documents in order. Long documents are cut where a cut changes no id."""
    for document in documents:
        # One piece is held back, because only the end of the loop shows which piece is the last.
        begins, held_back = True, None
        for text in cutter.pieces(document):
            if held_back is not None:
                yield Piece(held_back, begins, ends=False)
                begins = False
            held_back = text
        assert held_back is not None
        yield Piece(held_back, begins, ends=True)


def encode(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[EncodedPiece]:
    """Yield the ids of each piece, without ids that a post-processor would add.

    The name of a special token in a text is encoded as text, so that it does not end the document.
    """
    tokenizer.encode_special_tokens = True
    for batch in _batches(pieces):
        texts = [piece.text for piece in batch]
        for piece, ids in zip(batch, call_in_thread(_ids, tokenizer, texts), strict=True):
            yield EncodedPiece(ids, piece.begins, piece.ends)


def _ids(tokenizer: Tokenizer, texts: list[str]) -> Iterator[list[int]]:
    """The ids of each text; native code, in parallel."""
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return (encoding.ids for encoding in encodings)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Batches within both limits; a piece beyond the limit of characters is a batch by itself."""
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
