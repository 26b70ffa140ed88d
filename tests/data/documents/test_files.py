"""Which files of a source are read, refused, or skipped and counted."""

import os
import socket
from pathlib import Path

import pytest

from olmo_shard.data.documents.endings import Ending, ending_of
from olmo_shard.data.documents.files import find_files
from olmo_shard.data.documents.report import Report
from olmo_shard.errors import DataError


def names(source: Path, report: Report) -> list[str]:
    return [str(f.path.relative_to(source)) for f in find_files([str(source)], "text", report)]


def make(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("text")


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.txt", "text", ""),
        ("A.MD", "text", ""),
        ("a.Rst.GZ", "text", ".gz"),
        ("a.text.zst", "text", ".zst"),
        ("a.py", "text", ""),
        ("c4-train.00000-of-01024.json.gz", "json", ".gz"),
        ("a.json.zst", "json", ".zst"),
        ("a.JSONL", "json", ""),
        ("a.ndjson.gz", "json", ".gz"),
        ("a.json", "json", ""),
        ("A.Parquet", "parquet", ""),
    ],
)
def test_endings_say_format_and_compression(name, kind, compression):
    assert ending_of(name) == Ending(format=kind, compression=compression)


@pytest.mark.parametrize("name", ["a", "a.so", "a.gz", "a.csv.gz", "a.parquet.gz", "a.txt.bz2"])
def test_other_endings_are_unknown(name):
    assert ending_of(name) is None


def test_a_folder_gives_known_files_in_name_order_and_counts_the_rest(tmp_path):
    make(tmp_path, "b.txt", "A.MD", "deep/c.jsonl", ".hidden.txt", ".git/config.txt")
    make(tmp_path, ".git/objects/a.txt", "lib.so", "deep/d.png", "other/e.txt")
    (tmp_path / "linked").symlink_to(tmp_path / "other")
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s.txt"))
        report = Report()
        found = names(tmp_path, report)
    assert found == ["A.MD", "b.txt", "link.txt", "deep/c.jsonl", "other/e.txt"]
    at = str(tmp_path)
    assert sorted(report.lines()) == [
        f"skipped: 1 links to folders: {at}/linked",
        f"skipped: 2 FIFOs, sockets and devices: {at}/pipe.txt; {at}/s.txt",
        f"skipped: 2 files with an unknown ending: {at}/lib.so; {at}/deep/d.png",
        f"skipped: 2 hidden files and folders: {at}/.git; {at}/.hidden.txt",
    ]


def test_a_prepared_folder_among_the_sources_is_no_source(tmp_path):
    make(tmp_path, "a.txt", "data/meta.json", "data/tokenizer.json", "data/train.bin")
    report = Report()
    assert names(tmp_path, report) == ["a.txt"]
    assert report.lines() == [f"skipped: 1 folders that prepare wrote: {tmp_path}/data"]


def test_a_named_file_is_read_whatever_its_ending_and_even_if_hidden(tmp_path):
    make(tmp_path, ".notes", "main.c")
    found = find_files([str(tmp_path / ".notes"), str(tmp_path / "main.c")], "text", Report())
    assert [list(file.documents(Report())) for file in found] == [["text"], ["text"]]


def test_special_files_and_dangling_links_are_named_and_never_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone.txt").symlink_to("nowhere")
    for source, message in (
        ("pipe", r"source \S+/pipe: not a regular file"),
        ("gone.txt", r"source \S+/gone\.txt: a link to nowhere, which does not exist"),
        ("none", r"source \S+/none: no such file or folder"),
    ):
        with pytest.raises(DataError, match=message):
            find_files([str(tmp_path / source)], "text", Report())
    with pytest.raises(DataError, match=r"/gone\.txt: a link to nowhere.*--skip-bad"):
        find_files([str(tmp_path)], "text", Report())
    make(tmp_path, "a.txt")
    report = Report(skip_bad=True)
    assert names(tmp_path, report) == ["a.txt"]
    assert "a link to nowhere" in "".join(report.lines())
    with pytest.raises(DataError, match="a source is an empty string"):
        find_files([""], "text", Report())
    with pytest.raises(DataError, match="/dev/null: not a regular file"):
        find_files(["/dev/null"], "text", Report())


def test_a_folder_without_readable_files_says_what_was_skipped(tmp_path):
    make(tmp_path, "a.bin", ".b.txt")
    with pytest.raises(DataError, match=r"no file with one of the endings \.txt.*1 hidden.*a\.bin"):
        find_files([str(tmp_path)], "text", Report())


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    make(tmp_path, "a.txt", "closed/b.txt")
    scan = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r"source \S+/closed: Permission denied"):
        find_files([str(tmp_path)], "text", Report())


def test_a_name_that_is_not_utf_8_can_be_printed(tmp_path):
    name = os.fsdecode(b"\xff.so")
    make(tmp_path, "a.txt", name)
    report = Report()
    names(tmp_path, report)
    assert report.lines() == [f"skipped: 1 files with an unknown ending: {tmp_path}/?.so"]
