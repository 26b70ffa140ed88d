"""Settings of a tokenizer.json that change ids are off; end tokens are special."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors

from olmo_shard.data.meta import read_meta
from olmo_shard.data.tokenizer import EOS, add_eos, eos_id, load_tokenizer, new_byte_level
from olmo_shard.errors import DataError
from tests.support.prepare import found, options, prepare

TEXT = "a text of some words, which are many words and more words " * 20


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text(TEXT)
    return tmp_path / "a.txt"


@pytest.fixture
def trained(tmp_path: Path, source: Path) -> Path:
    """A tokenizer.json of 280 ids."""
    prepare(found(source), options(tmp_path, out=tmp_path / "first", bpe_vocab_size=280))
    return tmp_path / "first" / "tokenizer.json"


def switch_on(path: Path, setting: str) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    if setting == "truncation":
        tokenizer.enable_truncation(max_length=5)
    elif setting == "padding":
        tokenizer.enable_padding(pad_id=3, pad_to_multiple_of=1000)
    elif setting == "template":
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{EOS} $A $A {EOS}", special_tokens=[(EOS, 0)]
        )
    else:
        assert isinstance(tokenizer.model, models.BPE)
        tokenizer.model.dropout = 0.5
    tokenizer.save(str(path))


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("truncation", "truncation (5)"),
        ("padding", "padding (on)"),
        ("template", "post_processor (TemplateProcessing)"),
        ("dropout", "dropout (0.5)"),
    ],
)
def test_stored_settings_change_no_id_and_are_not_written(tmp_path, trained, source, setting, said):
    plain = np.fromfile(trained.parent / "train.bin", dtype=np.uint16)
    switch_on(trained, setting)
    stored = Tokenizer.from_file(str(trained)).encode(TEXT, add_special_tokens=False).ids
    assert [*stored, 0] != plain.tolist(), "the setting is on"
    meta = prepare(found(source), options(tmp_path, tokenizer=trained))
    assert np.fromfile(tmp_path / "out" / "train.bin", dtype=np.uint16).tolist() == plain.tolist()
    assert meta.tokens["train"] == len(plain)
    written = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert [*written.encode(TEXT).ids, 0] == plain.tolist()
    lines: list[str] = []
    load_tokenizer(trained, lines.append)
    (line,) = lines
    assert line.endswith(f": {said}")


def test_a_plain_tokenizer_is_written_as_given(tmp_path, trained, source):
    tokenizer = Tokenizer.from_file(str(trained))
    tokenizer.post_processor = processors.ByteLevel()
    tokenizer.save(str(trained))
    lines: list[str] = []
    load_tokenizer(trained, lines.append)
    assert lines == []
    prepare(found(source), options(tmp_path, tokenizer=trained))
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == trained.read_bytes()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"model": 3}', "\xff", "[" * 100_000])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match=r"--tokenizer \S+t\.json: not a tokenizer\.json"):
        load_tokenizer(tmp_path / "t.json", print)


def without_eos(path: Path, **added) -> None:
    """Take the special token out of a tokenizer.json, or change it."""
    settings = json.loads(path.read_text())
    settings["added_tokens"] = [settings["added_tokens"][0] | added] if added else []
    if not added:
        del settings["model"]["vocab"][EOS]
        settings["model"]["vocab"] = {t: n - 1 for t, n in settings["model"]["vocab"].items()}
    path.write_text(json.dumps(settings))


def test_a_tokenizer_without_an_end_token_gets_one(tmp_path, trained, source):
    without_eos(trained)
    with pytest.raises(DataError, match=r"it has none; or add one with --add-eos"):
        prepare(found(source), options(tmp_path, tokenizer=trained))
    for name in (None, "<end>"):
        out = tmp_path / f"out-{name}"
        prepare(
            found(source), options(tmp_path, out=out, tokenizer=trained, add_eos=True, eos=name)
        )
        meta = read_meta(out)
        assert (meta.vocab_size, meta.eos_id) == (280, 279)
        written = Tokenizer.from_file(str(out / "tokenizer.json"))
        assert written.token_to_id(name or EOS) == 279
        ids = np.fromfile(out / "train.bin", dtype=np.uint16)
        assert np.flatnonzero(ids == 279).tolist() == [len(ids) - 1]
        assert written.decode(ids.tolist()) == TEXT


def test_a_token_that_text_can_hold_is_no_end_token(tmp_path, trained, source):
    """An added token that is not special is found inside of texts, where a document would end."""
    without_eos(trained, special=False)
    with pytest.raises(DataError, match=r"no special token <\|endoftext\|>"):
        prepare(found(source), options(tmp_path, tokenizer=trained))
    with pytest.raises(DataError, match=r"as a piece of ordinary text; name another one"):
        prepare(found(source), options(tmp_path, tokenizer=trained, add_eos=True))


def test_an_end_token_is_not_added_twice_nor_over_another_id():
    tokenizer = new_byte_level()
    add_eos(tokenizer, "<end>")
    assert eos_id(tokenizer, "<end>") == 0
    with pytest.raises(DataError, match=r"has <end> already, as a special token; drop --add-eos"):
        add_eos(tokenizer, "<end>")
    gaps = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 3}, []))
    with pytest.raises(DataError, match=r"ids of the tokenizer have gaps: 3 tokens.*id is 3"):
        add_eos(gaps, None)
