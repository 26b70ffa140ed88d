"""Long documents are cut where the ids of the pieces are those of the whole."""

import pytest
from tokenizers import Tokenizer

from olmo_shard.data import cuts
from olmo_shard.data.cuts import RIGHT, Cutter, allowed_characters
from olmo_shard.data.encode import encode, pieces_of
from olmo_shard.data.split_pattern import splitting_characters
from tests.support.tokenizers import CUT, WHOLE, text_of, with_added


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
def test_pieces_have_the_ids_of_the_whole_document(monkeypatch, name):
    tokenizer = (CUT | WHOLE)[name]()
    monkeypatch.setattr(cuts, "PIECE", 40)
    cutter = Cutter(tokenizer)
    for seed in range(10, 16):
        text = text_of(seed)
        encoded = list(encode(pieces_of([text], cutter), tokenizer))
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        assert [number for piece in encoded for number in piece.ids] == whole
        assert (len(encoded) > 8) == (name in CUT), len(encoded)
        assert [piece.begins for piece in encoded] == [True] + [False] * (len(encoded) - 1)
        assert [piece.ends for piece in encoded] == [False] * (len(encoded) - 1) + [True]


@pytest.mark.parametrize("name", list(CUT))
def test_every_allowed_place_is_safe_without_the_check_at_the_cut(monkeypatch, name):
    """The analysis alone is right: the check of a cut's surroundings is a second line."""
    tokenizer = CUT[name]()
    monkeypatch.setattr(cuts, "PIECE", 1)
    monkeypatch.setattr(Cutter, "_holds", lambda *_: True)
    tokenizer.encode_special_tokens = True
    for seed in range(20, 30):
        text = text_of(seed)
        parts = tokenizer.encode_batch(
            list(Cutter(tokenizer).pieces(text)), add_special_tokens=False
        )
        whole = tokenizer.encode(text, add_special_tokens=False).ids
        assert [number for part in parts for number in part.ids] == whole


def test_characters_before_which_a_cut_is_safe():
    def allowed(tokenizer: Tokenizer) -> str:
        return "".join(sorted(allowed_characters(tokenizer) & set("\n .,'1_。")))

    assert allowed(CUT["byte-level"]()) == "\n ',.1_。"
    assert allowed(CUT["byte-level, prefix space"]()) == " "
    assert allowed(CUT["gpt-4o"]()) == "\n ,.1_。", "this pattern takes 's together with the word"
    assert allowed(CUT["llama 3"]()) == "\n ,.1_。"
    assert allowed(CUT["unigram, first"]()) == " "
    assert allowed(CUT["word level"]()) == "\n ,.。"
    assert allowed(with_added()) == " ',.1_。", "an added token ends in a line end"


@pytest.mark.parametrize(
    ("pattern", "kept", "split_before"),
    [
        (r"\p{L}+|\s+", " .1", " "),
        (r"\w+|\s+", " .", " "),
        (r"\p{L}+\s?|\s", ".1", ""),
        (r"\p{L} *\.|\s", "1", ""),
        (r"\s+(?!\S)", " .1", ""),
        (r"\d{2}|\s", " .1", " "),
        (r"\p{L}(?!\S)|\s", "", ""),
        (r"\s+$|\s", " .1", " "),
        (r"\p{L}$|\s", "", ""),
        (r"(?=x)\s", "", ""),
        (r"[a-z&&[x]]|\s", "", ""),
    ],
)
def test_what_a_pattern_joins_and_splits(pattern, kept, split_before):
    found = splitting_characters(pattern, frozenset(" .1"))
    assert ["".join(sorted(part)) for part in found] == [kept, split_before]


def test_short_documents_and_texts_without_a_place_stay_whole(monkeypatch):
    monkeypatch.setattr(cuts, "PIECE", 40)
    cutter = Cutter(CUT["byte-level"]())
    assert list(cutter.pieces("")) == [""]
    assert list(cutter.pieces("word " * 8)) == ["word " * 8]
    assert list(cutter.pieces("x" * 500)) == ["x" * 500]
    assert cutter.longest_piece == 500
    assert "x" not in RIGHT
