"""Contents of every format: what is read, replaced, refused."""

import gzip
import json
import lzma
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from olmo_shard.data.documents.files import find_files
from olmo_shard.data.documents.report import Report
from olmo_shard.errors import DataError

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def read(path: Path, *, field: str = "text", skip_bad: bool = False) -> tuple[list[str], list[str]]:
    """The documents of one file, and the report's lines."""
    report = Report(skip_bad=skip_bad)
    (file,) = find_files([str(path)], field, report)
    return list(file.documents(report)), report.lines()


def zstd(content: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(content)


SKIPPABLE = (0x184D2A50).to_bytes(4, "little") + (3).to_bytes(4, "little") + b"abc"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json.gz", gzip.compress(LINES)),
        ("a.json.gz", gzip.compress(LINES[:16]) + gzip.compress(LINES[16:])),
        ("a.JSON.ZST", zstd(LINES)),
        ("a.jsonl.zst", zstd(LINES[:5]) + zstd(LINES[5:16]) + zstd(LINES[16:])),
        ("a.jsonl.zst", SKIPPABLE + zstd(LINES) + SKIPPABLE),
        ("a.ndjson", LINES.replace(b"\n", b"\r\n")),
        ("a.json", b"\xef\xbb\xbf\n" + LINES),
        ("a.jsonl", LINES[:16] + b"\xef\xbb\xbf" + LINES[16:]),
    ],
)
def test_json_lines_of_all_frames_and_members(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == (["one", "two"], [])


def test_many_small_and_one_large_zstd_frame(tmp_path):
    documents = [f"document {index} " * (index % 7) + "." for index in range(3000)]
    lines = [json.dumps({"text": text}).encode() + b"\n" for text in documents]
    (tmp_path / "a.json.zst").write_bytes(b"".join(map(zstd, lines)) + zstd(b"".join(lines)))
    assert read(tmp_path / "a.json.zst") == (documents * 2, [])


@pytest.mark.parametrize("ending", ["jsonl", "txt"])
@pytest.mark.parametrize(
    ("compression", "content", "message"),
    [
        ("zst", zstd(LINES)[:-3], "it ends inside a zstd frame"),
        ("zst", zstd(LINES) + zstd(LINES)[:-1], "it ends inside a zstd frame"),
        ("zst", zstd(LINES) + b"\x28\xb5", "it ends inside a zstd frame"),
        ("zst", zstd(LINES) + b"junk", "Unknown frame descriptor"),
        ("zst", b"", "it is empty: not even one compressed frame"),
        ("gz", gzip.compress(LINES)[:-9], "ended before the end-of-stream marker"),
        ("gz", gzip.compress(LINES) + gzip.compress(LINES)[:-1], "ended before the end-of-stream"),
        ("gz", gzip.compress(LINES) + b"junk", "Not a gzipped file"),
        ("gz", b"", "it is empty: not even one compressed frame"),
        ("gz", LINES, "Not a gzipped file"),
    ],
)
def test_cut_frames_are_errors_that_name_the_file(tmp_path, ending, compression, content, message):
    path = tmp_path / f"a.{ending}.{compression}"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{path.name}.*{message}.*--skip-bad"):
        read(path)
    _, lines = read(path, skip_bad=True)
    assert len(lines) == 1
    assert lines[0].startswith(f"skipped: 1 bad files and records: {path}")


def test_text_loses_its_byte_order_mark_and_other_line_ends(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\rthrée\ufeff".encode())
    assert read(path) == (["one\ntwo\nthrée\ufeff"], [])
    path.write_bytes(b"")
    assert read(path) == ([], [f"skipped: 1 empty documents: {path}"])


def test_bytes_that_are_not_utf_8_are_replaced_and_counted(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(
        "déjà vu, \ufffd, and many other words".encode().replace("é".encode(), b"\xe9")
    )
    documents, lines = read(path)
    assert documents == ["d\ufffdjà vu, \ufffd, and many other words"]
    assert lines == [f"replaced by U+FFFD: 1 bytes that are not UTF-8: {path}"]


def archive(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a.txt", "text")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"text"), r"not text but gzip data \(give the file the ending \.gz\)"),
        (zstd(b"text"), "not text but zstd data"),
        (lzma.compress(b"text"), "not text but xz data"),
        (Path("/bin/sh").read_bytes(), "not text but an ELF binary"),
        (b"%PDF-1.7\n...", "not text but a PDF document"),
        (b"PAR1\x00\x01", "not text but Parquet data"),
        (b"text with\x00", "not text: 1 of 10 bytes are NUL"),
        ("text".encode("utf-16"), "UTF-16 text; only UTF-8 is read.*iconv -f UTF-16"),
        ("plain text".encode("utf-16-be"), "UTF-16 text"),
        ("plain text".encode("utf-16-le"), "UTF-16 text"),
        ("text".encode("utf-32"), "UTF-32 text"),
        ("ein Mädchen äöüß".encode("latin-1"), "not UTF-8 text: 5 of 16 characters are invalid"),
        ("слово за словом".encode("cp1251"), "not UTF-8 text: .* iconv"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.md.gz", "unknown"])
def test_binaries_and_other_encodings_are_refused_by_name(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match=rf"{name}: {message}"):
        read(path)
    assert read(path, skip_bad=True)[0] == []


def test_a_zip_archive_and_other_bytes_under_a_structured_name_are_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(archive(tmp_path / "a.zip"))
    with pytest.raises(DataError, match="a zip archive"):
        read(tmp_path / "a.txt")
    for content, message in (
        (gzip.compress(LINES), "gzip data"),
        (LINES.decode().encode("utf-16"), "UTF-16 text"),
        (b'[{"text": "one"}]', r"a JSON array; JSON Lines are read.*jq -c '\.\[\]'"),
        (b'\n{\n  "text": "one"\n}', r"a JSON object over several lines.*jq -c \."),
    ):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(DataError, match=rf"a\.json: .*{message}"):
            read(tmp_path / "a.json")
        assert read(tmp_path / "a.json", skip_bad=True)[0] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{bad", "not valid JSON"),
        (b'{"text": "caf\xe9"}', "not UTF-8"),
        (b'{"other": {"deep": 1}, "b": 2}', "no such field; fields: other.deep, b"),
        (b'{"text": null}', "the value is null"),
        (b'{"text": 3}', "the value is a number"),
        (b'{"text": true}', "the value is a boolean"),
        (b'{"text": {}}', "the value is an object"),
        (b'{"text": ["a", "b"]}', "the value is a list; join its strings"),
        (b"[" * 100_000, "not readable JSON"),
        (b'{"n": ' + b"1" * 5000 + b"}", "not readable JSON"),
        (b'{"text": "two\x00"}', "not valid JSON"),
    ],
)
def test_one_bad_line_is_named_or_skipped_and_counted(tmp_path, line, message):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 70_000 + b'"}\n' + line + b'\n{"text": "three"}\n')
    with pytest.raises(DataError, match=rf"a\.jsonl line 2: .*{message}.*--skip-bad"):
        read(path)
    documents, lines = read(path, skip_bad=True)
    assert [text[:9] for text in documents] == ["x" * 9, "three"]
    (only,) = lines
    assert only.startswith(f"skipped: 1 bad files and records: {path} line 2: ")


def test_surrogate_halves_and_nul_characters_are_counted(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"text": "a\\ud800b\\ud83d\\ude00"}\n{"text": "\\u0000\\u0000"}\n{"text": ""}\n'
    )
    documents, lines = read(path)
    assert documents == ["a?b😀", "\x00\x00"]
    assert lines == [
        f"replaced by '?': 1 halves of surrogate pairs: {path} line 1",
        f"kept: 2 NUL characters: {path} line 2 (2)",
        f"skipped: 1 empty documents: {path}",
    ]


def test_dotted_fields_of_json(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"meta": {"text": "nested"}}\n{"meta.text": "flat", "meta": {"text": "no"}}\n')
    assert read(path, field="meta.text") == (["nested", "flat"], [])
    with pytest.raises(DataError, match=r"line 1: no string in field 'meta\.none'.*meta\.text"):
        read(path, field="meta.none")


def parquet(path: Path, **columns) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=100)
    return path


TWO = ["one", "two"]


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array(TWO, pyarrow.large_string()),
        pyarrow.array(TWO, pyarrow.string_view()),
        pyarrow.array(TWO).dictionary_encode(),
        pyarrow.array([b"one", b"two"], pyarrow.binary()),
        pyarrow.array([b"one", b"two"], pyarrow.large_binary()),
    ],
    ids=lambda column: str(column.type)[:20],
)
def test_parquet_strings_of_every_type(tmp_path, column):
    path = parquet(tmp_path / "a.parquet", text=column, other=[1, 2])
    assert read(path) == (TWO, [])


def test_parquet_fields_inside_structs(tmp_path):
    rows = [{"text": text, "inner": {"body": text.upper()}, "n": 1} for text in TWO]
    path = parquet(tmp_path / "a.parquet", meta=rows, flat=TWO)
    assert read(path, field="meta.text") == (TWO, [])
    assert read(path, field="meta.inner.body") == (["ONE", "TWO"], [])
    names = r"columns: meta\.text, meta\.inner\.body, meta\.n, flat"
    for field in ("text", "meta.none", "meta.text.deep", "flat.x"):
        with pytest.raises(DataError, match=rf"no column '{field}' \(--text-field\); {names}"):
            read(path, field=field)
    dotted = parquet(tmp_path / "b.parquet", **{"meta.text": TWO})
    assert read(dotted, field="meta.text") == (TWO, [])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ([["a"], ["b", "c"]], r"holds list<.*>, not strings; join its strings into one column"),
        ([1, 2], "holds int64, not strings"),
        ([{"a": "b"}] * 2, "holds struct<.*>, not strings"),
    ],
)
def test_parquet_columns_without_text_are_refused_by_name(tmp_path, column, message):
    path = parquet(tmp_path / "a.parquet", text=column)
    with pytest.raises(DataError, match=rf"a\.parquet: column 'text' \(--text-field\) {message}"):
        read(path)


def test_bad_parquet_rows_are_named_or_skipped_and_counted(tmp_path):
    path = parquet(tmp_path / "a.parquet", text=[b"one", b"\xff\xfe", None, b"four"] * 50)
    with pytest.raises(DataError, match=r"a\.parquet row 2: the bytes in field 'text' are not UTF"):
        read(path)
    documents, lines = read(path, skip_bad=True)
    assert documents == ["one", "four"] * 50
    (only,) = lines
    assert only.startswith(f"skipped: 100 bad files and records: {path} row 2: the bytes")
    assert "row 3: no string in field 'text' (--text-field): the value is null" in only
    assert only.endswith("and 97 more")
    missing = [{"text": "one"}, None, {"text": None}]
    path = parquet(tmp_path / "b.parquet", meta=missing)
    with pytest.raises(DataError, match=r"row 2: .*the value is null"):
        read(path, field="meta.text")


def test_a_cut_parquet_file_is_refused(tmp_path):
    path = parquet(tmp_path / "a.parquet", text=TWO)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"a\.parquet: not a Parquet file"):
        read(path)


def test_a_file_that_vanished_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.jsonl").write_bytes(LINES)
    files = find_files([str(tmp_path)], "text", Report())
    for file in files:
        file.path.unlink()
        with pytest.raises(DataError, match=f"{file.path.name}.*No such file or directory"):
            list(file.documents(Report()))
