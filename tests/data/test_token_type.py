"""Token files whose declared type is wrong are refused, and true ones never."""

import re
from pathlib import Path

import numpy as np
import pytest

from olmo_shard.config import DataSource
from olmo_shard.errors import DataError
from olmo_shard.train.preflight import preflight, scan
from tests.support.configs import config_at

DOLMA2 = 100_352


def dolma2_like(count: int = 4000, seed: int = 0) -> np.ndarray:
    """Ids of a vocabulary of 100,352, of which 1.4 % are above 65,535."""
    generator = np.random.default_rng(seed)
    rare = generator.random(count) < 0.014
    return np.where(
        rare, generator.integers(65_536, DOLMA2, count), generator.zipf(1.3, count) % 65_536
    )


def problem_of(folder: Path, ids: np.ndarray, declared: str, vocab_size: int) -> str | None:
    """What preflight and scan say of a file of these ids, if anything."""
    path = folder / "ids.bin"
    ids.tofile(path)
    config = config_at(
        folder, f"model.vocab_size={vocab_size}", "data.validation={}", "eval.every=0"
    )
    source = DataSource(path=str(path), dtype=declared)  # pyright: ignore[reportArgumentType]
    data = config.data.model_copy(update={"sources": [source]})
    config = config.model_copy(update={"data": data})
    try:
        scan(preflight(config, 1), vocab_size)
    except DataError as error:
        return str(error)
    return None


def uniform(vocab_size: int, count: int = 4000, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, count)


@pytest.mark.parametrize(
    ("ids", "stored", "declared", "vocab_size", "named"),
    [
        (dolma2_like(), "<u4", "uint16", DOLMA2, "the ids are uint32"),
        (dolma2_like(), "<u4", "uint8", DOLMA2, "the ids are uint32"),
        (dolma2_like(), ">u4", "uint16", DOLMA2, "the ids are big-endian uint32"),
        (dolma2_like(), "<i8", "uint16", DOLMA2, "the ids are int64 or uint64"),
        (dolma2_like(), "<i8", "uint32", DOLMA2, "the ids are int64 or uint64"),
        (uniform(256_000), "<u4", "uint16", 256_000, "the ids are uint32"),
        (uniform(50_257), "<u4", "uint16", 50_257, "the ids are uint32"),
        (uniform(50_257), "<u2", "uint8", 50_257, "the ids are uint16"),
        (uniform(50_257), ">u2", "uint8", 50_257, "the ids are big-endian uint16"),
        (uniform(300), "<u2", "uint8", 300, "the ids are uint16"),
        (uniform(64), "<i8", "uint8", 64, "the ids are int64 or uint64"),
        (uniform(64, count=80), "<u4", "uint16", 64, "the ids are uint32"),
        (np.append(np.zeros(40_000), uniform(90)), "<u4", "uint16", 90, "the ids are uint32"),
    ],
)
def test_ids_of_a_wider_type_are_refused(
    tmp_path: Path, ids: np.ndarray, stored: str, declared: str, vocab_size: int, named: str
) -> None:
    problem = problem_of(tmp_path, ids.astype(stored), declared, vocab_size)
    assert problem is not None
    assert f"ids.bin: dtype {declared} is wrong: {named}" in problem


def test_the_message_shows_an_example_and_the_way_out(tmp_path: Path) -> None:
    ids = np.append(np.zeros(100, np.uint32), uniform(20_000).astype(np.uint32) + 70_000)
    problem = problem_of(tmp_path, ids, "uint16", DOLMA2)
    low, high = int(ids[100]) - 65_536, int(ids[101]) - 65_536
    assert problem is not None
    assert (
        f"at offset 200 the file has {low}, 1, {high}, 1 as uint16, and {ids[100]}, {ids[101]} as "
        "uint32; declare dtype uint32" in problem
    )


@pytest.mark.parametrize(
    ("stored", "declared", "vocab_size", "named"),
    [
        ("<u2", "uint32", 50_257, "as uint32 outside .* and as uint16 none"),
        ("<u2", "uint32", DOLMA2, "as uint32 outside .* and as uint16 none"),
        ("<u1", "uint32", 256, "as uint32 outside .* and as uint8 none"),
        ("<u1", "uint16", 256, "as uint16 outside .* and as uint8 none"),
        (
            ">u2",
            "uint16",
            50_257,
            "as uint16 outside .* and as big-endian uint16 none",
        ),
        (
            ">u4",
            "uint32",
            DOLMA2,
            "as uint32 outside .* and as big-endian uint32 none",
        ),
    ],
)
def test_ids_of_a_narrower_type_or_another_byte_order_name_the_likely_type(
    tmp_path: Path, stored: str, declared: str, vocab_size: int, named: str
) -> None:
    ids = uniform(min(vocab_size, 256 ** np.dtype(stored).itemsize)).astype(stored)
    problem = problem_of(tmp_path, ids, declared, vocab_size)
    assert problem is not None
    assert re.search(named, problem)


def test_one_id_outside_the_vocabulary_blames_no_type(tmp_path: Path) -> None:
    ids = uniform(DOLMA2).astype(np.uint32)
    ids[3] = DOLMA2
    problem = problem_of(tmp_path, ids, "uint32", DOLMA2)
    assert problem is not None
    assert problem.endswith(f"id {DOLMA2} at offset 3 is outside the vocabulary of {DOLMA2} ids")


def true_files(dtype: str, vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """Files that are what they say, some of them odd."""
    generator = np.random.default_rng(seed)
    top = min(vocab_size, 1 + np.iinfo(dtype).max)
    anything = int(generator.integers(1, top))
    sparse = np.zeros(3000, np.int64)
    sparse[2 * generator.integers(0, 1500, 6)] = anything
    runs = np.repeat(generator.integers(0, top, 60), generator.integers(1, 200, 60))
    return {
        "random": generator.integers(0, top, 3000),
        "zipf": generator.zipf(1.2, 3000) % top,
        "binary": generator.integers(0, 2, 3000),
        "small vocabulary": generator.integers(0, min(top, 5), 3000),
        "constant": np.full(3000, anything),
        "all zeros": np.zeros(3000),
        "X 0 X 0": np.tile([anything, 0], 1500),
        "0 X 0 X": np.tile([0, anything], 1500),
        "1 0 0 0": np.tile([1, 0, 0, 0], 750),
        "X 0 0 0": np.tile([anything, 0, 0, 0], 750),
        "few ids at even places": sparse,
        "runs": runs,
        "short": generator.integers(0, top, 17),
        "short, every second 0": np.tile([1, 0, 2 % top, 0], 10),
        "documents of 0 to 3 ids": np.concatenate(
            [[*generator.integers(0, top, generator.integers(0, 4)), 0] for _ in range(900)]
        ),
        "padding after each half": np.pad(
            generator.integers(0, top, (40, 33)), ((0, 0), (0, 31))
        ).flatten(),
    }


@pytest.mark.parametrize("vocab_size", [2, 5, 64, 256, 300, 50_257, 65_536, DOLMA2, 256_000])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_true_files_raise_no_alarm(tmp_path: Path, dtype: str, vocab_size: int) -> None:
    for seed in range(4):
        for kind, ids in true_files(dtype, vocab_size, seed).items():
            problem = problem_of(tmp_path, ids.astype(dtype), dtype, vocab_size)
            assert problem is None, f"{kind}, seed {seed}: {problem}"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"\x93NUMPY\x01\x00" + b"\x01\x00" * 400, "has a NumPy header"),
        (b"PK\x03\x04" + b"\x01\x00" * 400, r"is a zip archive \(\.npz\?\)"),
        (b"MMIDIDX\x00\x00" + b"\x01" * 801, r"is the index \(\.idx\) of a Megatron data set"),
        (b"\x1f\x8b\x08\x00" + b"\x01\x00" * 400, "is compressed with gzip"),
        (b"\x28\xb5\x2f\xfd" + b"\x01\x00" * 400, "is compressed with zstd"),
        (b"PAR1" + b"\x01\x00" * 400, "is a Parquet file"),
        ("Plain text, naïvely given as ids. ".encode() * 50, "is UTF-8 text"),
    ],
)
def test_files_of_other_formats_are_no_ids(tmp_path: Path, content: bytes, named: str) -> None:
    content += b"\x20" * (len(content) % 2)
    problem = problem_of(tmp_path, np.frombuffer(content, np.uint8), "uint16", DOLMA2)
    assert problem is not None
    assert re.search(rf"ids\.bin: {named}", problem)


def test_bytes_as_ids_may_be_text(tmp_path: Path) -> None:
    ids = np.frombuffer(b"A model of bytes: ids below 256, which are text.\n" * 40, np.uint8)
    assert problem_of(tmp_path, ids, "uint8", 256) is None
