"""Batches and pieces bound the memory and change no id."""

import subprocess
import sys
from pathlib import Path

import pytest

from olmo_shard.data import cuts, encode
from olmo_shard.data import prepare as prepare_module
from tests.support.prepare import found, options, prepare, printed
from tests.support.tokenizers import text_of


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for seed in range(8):
        (folder / f"{seed}.txt").write_text(text_of(seed, 20 * seed).replace("\x00", ""))
    return folder


def test_pieces_and_batches_change_no_byte(tmp_path, texts, monkeypatch):
    """The trained tokenizer and the ids are those of whole documents, encoded one by one."""
    monkeypatch.setattr(encode, "_BATCH_PIECES", 1)
    prepare(found(texts), options(tmp_path))
    monkeypatch.setattr(encode, "_BATCH_PIECES", 1000)
    for name, piece, batch in (("b", 40, 1), ("c", 40, 300), ("d", 1, 10_000)):
        monkeypatch.setattr(cuts, "PIECE", piece)
        monkeypatch.setattr(encode, "_BATCH_CHARACTERS", batch)
        prepare(found(texts), options(tmp_path, out=tmp_path / name))
        for file in ("train.bin", "validation.bin", "tokenizer.json", "meta.json"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "out" / file).read_bytes()


def test_batches_are_bounded_by_characters_and_by_pieces(monkeypatch):
    monkeypatch.setattr(encode, "_BATCH_CHARACTERS", 10)
    monkeypatch.setattr(encode, "_BATCH_PIECES", 3)
    pieces = [encode.Piece("x" * n, True, True) for n in (4, 4, 4, 11, 1, 1, 1, 1)]
    batches = [[len(piece.text) for piece in batch] for batch in encode._batches(pieces)]
    assert batches == [[4, 4], [4], [11], [1, 1, 1], [1]]


def test_a_document_of_4_mb_needs_less_than_250_mb_more(tmp_path):
    """Encoded at once, a document needs 190 times its size: 760 MB."""
    (tmp_path / "tiny.txt").write_text("words and more words " * 50)
    (tmp_path / "long.txt").write_text("a long text of many words\n" * 160_000)
    prepare(found(tmp_path / "tiny.txt"), options(tmp_path, bpe_vocab_size=262))
    shared = ["--tokenizer", str(tmp_path / "out" / "tokenizer.json"), "--out"]
    peaks = []
    for name in ("tiny", "long"):
        arguments = ["prepare", str(tmp_path / f"{name}.txt"), *shared, str(tmp_path / name)]
        code = (
            f"import resource; from olmo_shard.cli import app; app({arguments!r}, "
            "standalone_mode=False); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
        )
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        peaks.append(int(result.stdout.split()[-1]) / 1024)
    assert peaks[1] - peaks[0] < 250


def test_text_that_cannot_be_cut_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(cuts, "PIECE", 40)
    monkeypatch.setattr(prepare_module, "_LONG_PIECE", 640)
    (tmp_path / "a.txt").write_text("words " + "x" * 1000)
    line = printed(found(tmp_path / "a.txt"), options(tmp_path, bpe_vocab_size=258))
    assert "memory: 1,006 characters were encoded at once" in line
