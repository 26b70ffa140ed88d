"""From text to token files: every kind of source, every kind of mistake."""

import gzip
import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer

from olmo_shard.config import DataSource
from olmo_shard.data import cuts
from olmo_shard.data.documents.files import find_files, standard_library_files
from olmo_shard.data.documents.report import Report
from olmo_shard.data.meta import Split, read_meta
from olmo_shard.data.prepare import narrowest_type
from olmo_shard.data.prepare import prepare as run_prepare
from olmo_shard.data.token_file import find_token_files
from olmo_shard.errors import DataError
from tests.support.prepare import found, options, prepare, printed


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    words = "the quick brown fox jumps over the lazy dog while mixture models learn "
    for index in range(6):
        (folder / f"{index}.txt").write_text(words * (5 + index) + str(index))
    lines = [json.dumps({"text": words + f"json {i}", "id": i}) for i in range(4)]
    with gzip.open(folder / "deep" / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    import pyarrow
    import pyarrow.parquet
    import zstandard

    table = pyarrow.table({"text": [words + f"row {i}" for i in range(3)]})
    pyarrow.parquet.write_table(table, folder / "b.parquet")
    packed = zstandard.ZstdCompressor().compress("\n".join(lines).encode())
    (folder / "c.jsonl.zst").write_bytes(packed)
    (folder / "ignored.bin").write_bytes(b"\x00")
    return folder


def test_prepare_round_trips_every_kind_of_source(tmp_path, texts):
    files = found(texts)
    documents = [text for file in files for text in file.documents(Report())]
    assert len(documents) == 6 + 4 + 3 + 4
    out = tmp_path / "out"
    meta = prepare(files, options(tmp_path))
    assert read_meta(out) == meta
    assert (meta.dtype, meta.vocab_size) == ("uint16", 300)
    assert meta.documents == {"train": 13, "validation": 4}
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    decoded = {}
    for split in ("train", "validation"):
        ids = np.fromfile(out / f"{split}.bin", dtype=np.uint16)
        assert len(ids) == meta.tokens[split]
        assert ids[-1] == meta.eos_id
        ends = np.flatnonzero(ids == meta.eos_id)
        parts = np.split(ids, ends[:-1] + 1)
        decoded[split] = [tokenizer.decode(part[:-1].tolist()) for part in parts]
    assert decoded["validation"] == documents[3::4]
    assert decoded["train"] == [d for i, d in enumerate(documents) if i % 4 != 3]


def test_a_given_tokenizer_gives_the_same_files(tmp_path, texts):
    files = found(texts)
    first = prepare(files, options(tmp_path))
    given = options(tmp_path, out=tmp_path / "again", tokenizer=tmp_path / "out" / "tokenizer.json")
    assert prepare(files, given) == first


def test_the_name_of_the_end_token_inside_a_text_does_not_end_a_document(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("before <|endoftext|> after " * 50)
    meta = prepare(
        found(source),
        options(tmp_path, validation_fraction=0.0, bpe_vocab_size=270),
    )
    ids = np.fromfile(tmp_path / "out" / "train.bin", dtype=np.uint16)
    assert (ids == meta.eos_id).sum() == 1


def test_prepared_files_that_were_changed_are_refused(tmp_path, texts):
    prepare(found(texts), options(tmp_path))
    source = DataSource(path=str(tmp_path / "out"))
    (file,) = find_token_files(source)
    assert file.size_problem() is None
    assert file.id_problem(300) is None
    content = file.path.read_bytes()
    file.path.write_bytes(content[:-2])
    assert "truncated or changed" in (file.size_problem() or "")
    file.path.write_bytes(content[2:] + b"\x01\x00")
    assert "checksum differs" in (file.id_problem(300) or "")
    (tmp_path / "out" / "meta.json").unlink()
    with pytest.raises(DataError, match=r"has no meta\.json"):
        find_token_files(source)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("{bad", "a.jsonl", r"a\.jsonl line 1: not valid JSON"),
        ('{"text": 3}', "a.jsonl", r"a\.jsonl line 1: no string in field 'text'"),
        ("3", "a.jsonl", r"a\.jsonl line 1: no string in field"),
        ("not parquet", "a.parquet", r"a\.parquet: not a Parquet file"),
        ("not gzip", "a.jsonl.gz", r"a\.jsonl\.gz after line 0"),
        ("not zstd", "a.jsonl.zst", r"a\.jsonl\.zst after line 0"),
        ('{"text": "a"}\n{bad', "a.ndjson", r"line 2: not valid JSON.*--skip-bad leaves bad input"),
    ],
)
def test_a_bad_document_is_named_by_file_and_line(tmp_path, content, name, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        prepare(found(path), options(tmp_path))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".prepare-*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bpe_vocab_size": 100}, r"--train-bpe 100: .* more than 256"),
        ({"bpe_vocab_size": 60000}, r"the source yields only \d+ ids"),
        ({"tokenizer": Path("none.json")}, r"--tokenizer none\.json: no such file"),
        ({"validation_fraction": 0.7}, r"0\.7 is not between 0 and 0\.5"),
        ({"eos": "<nope>"}, r"no special token <nope> to end documents.*<\|endoftext\|>"),
        ({"eos": "th"}, r"no special token th to end documents"),
        ({"out": Path("/proc/x/y")}, r"--out /proc/x/y cannot be written"),
    ],
)
def test_wrong_options_of_prepare(tmp_path, texts, changes, message):
    with pytest.raises(DataError, match=message):
        prepare(found(texts), options(tmp_path, **changes))


def test_prepare_does_not_overwrite(tmp_path, texts):
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"exists already"):
        prepare(found(texts), options(tmp_path))
    with pytest.raises(DataError, match=r"no such file or folder"):
        found(tmp_path / "none")
    with pytest.raises(DataError, match=r"no sources"):
        prepare([], options(tmp_path))


@pytest.mark.parametrize(("fraction", "held_out"), [(0.0, 0), (0.3, 5), (0.4, 6), (0.5, 8)])
def test_the_held_out_share_is_what_was_asked_for(tmp_path, texts, fraction, held_out):
    files = found(texts)
    meta = prepare(files, options(tmp_path, validation_fraction=fraction))
    assert meta.documents == {"train": 17 - held_out, "validation": held_out}


def test_nothing_to_train_on_is_an_error(tmp_path, texts):
    prepare(found(texts), options(tmp_path))
    (tmp_path / "empty.txt").write_text("")
    given = options(tmp_path, out=tmp_path / "b", tokenizer=tmp_path / "out" / "tokenizer.json")
    with pytest.raises(DataError, match=r"the 1 source file\(s\) hold no text to train on"):
        prepare(found(tmp_path / "empty.txt"), given)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": "300"}, r"vocab_size Input should be a valid integer"),
        ({"vocab_size": 0}, r"vocab_size Input should be greater than 0"),
        ({"eos_id": 300}, r"eos_id = 300 is not below vocab_size = 300"),
        ({"tokens": None}, r"tokens Input should be an object"),
        ({"sha256": {}}, r"do not name the same splits"),
        ({"dtype": "int64"}, r"dtype Input should be 'uint8', 'uint16' or 'uint32'"),
        ({"more": 1}, r"more Extra inputs are not permitted"),
    ],
)
def test_a_wrong_meta_is_named_by_its_field(tmp_path, texts, change, message):
    meta = prepare(found(texts), options(tmp_path))
    (tmp_path / "out" / "meta.json").write_text(json.dumps(meta.model_dump() | change))
    with pytest.raises(DataError, match=message):
        read_meta(tmp_path / "out")


def test_narrowest_types_at_their_borders():
    sizes = {256: "uint8", 257: "uint16", 65536: "uint16", 65537: "uint32"}
    assert {size: narrowest_type(size) for size in sizes} == sizes


def test_the_standard_library_is_real_text():
    files = standard_library_files()
    assert sum(file.size for file in files) > 8_000_000
    assert not any("/test/" in str(file.path) for file in files)


def documents_of(out: Path, split: Split) -> list[str]:
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    meta = read_meta(out)
    ids = np.fromfile(out / f"{split}.bin", dtype=meta.dtype)
    assert hashlib.sha256(ids.tobytes()).hexdigest() == meta.sha256[split]
    assert len(ids) == meta.tokens[split]
    parts = np.split(ids, np.flatnonzero(ids == meta.eos_id) + 1)[:-1]
    assert len(parts) == meta.documents[split]
    return [tokenizer.decode(part[:-1].tolist()) for part in parts]


@pytest.mark.parametrize("size", [1, 2, 3, 49])
def test_few_documents_still_give_one_for_validation(tmp_path, size):
    texts = [f"document {i} " * 3 for i in range(size)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    chosen = options(tmp_path, validation_fraction=0.02, bpe_vocab_size=260)
    line = printed(found(tmp_path / "a.jsonl"), chosen)
    held_out = documents_of(tmp_path / "out", "validation")
    assert documents_of(tmp_path / "out", "train") + held_out == texts
    assert len(held_out) == (size > 1)
    assert ("the only document stays in train" in line) == (size == 1)
    assert (f"the last of {size} documents, as 0.02 of them is none" in line) == (size > 1)


def test_a_long_document_that_is_held_out_last_is_moved_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(cuts, "PIECE", 40)
    texts = ["short and sweet", "a long text of many pieces. " * 200]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    chosen = options(tmp_path, validation_fraction=0.02, bpe_vocab_size=270)
    prepare(found(tmp_path / "a.jsonl"), chosen)
    assert documents_of(tmp_path / "out", "train") == texts[:1]
    assert documents_of(tmp_path / "out", "validation") == texts[1:]


def test_the_summary_counts_each_input_once(tmp_path, texts):
    (texts / "z.jsonl").write_text('{"text": ""}\n{"text": "end"}\n')
    files = find_files([str(texts)], "text", report := Report())
    with io.StringIO() as stream:
        run_prepare(files, options(tmp_path), Console(file=stream, width=1000), report)
        assert stream.getvalue().splitlines() == [
            f"skipped: 1 files with an unknown ending: {texts}/ignored.bin",
            f"skipped: 1 empty documents: {texts}/z.jsonl",
        ]


def test_the_command_skips_bad_input_reads_nested_fields_and_adds_an_end_token(tmp_path, main):
    lines = [json.dumps({"meta": {"text": f"document {i} " * 9}}) for i in range(5)]
    (tmp_path / "a.json").write_text("\n".join([*lines, "{bad", "[]"]))
    shared = ["prepare", tmp_path / "a.json", "--text-field", "meta.text", "--train-bpe", "270"]
    code, output = main(*shared, "--out", tmp_path / "out")
    assert code == 2
    assert "a.json line 6: not valid JSON" in output
    assert "--skip-bad" in output
    code, output = main(*shared, "--out", tmp_path / "out", "--skip-bad")
    assert code == 0, output
    assert "skipped: 2 bad files and records" in output
    assert "train 4 documents" in output
    code, output = main(
        *shared, "--out", tmp_path / "b", "--skip-bad", "--add-eos", "--eos", "<end>"
    )
    assert code == 0, output
    assert "271 ids" in output
    assert read_meta(tmp_path / "b").eos_id == 270
