"""Identity of the data: files, their order and their content."""

import os
from pathlib import Path

import numpy as np
import pytest

from olmo_shard.config import Config, DataSource
from olmo_shard.data.identity import fingerprint, sample_digest
from olmo_shard.data.loader import DataLoader
from olmo_shard.data.meta import Meta
from olmo_shard.data.source import data_identity
from olmo_shard.errors import CheckpointError, DataError
from tests.support.configs import VOCAB, config_at, write_tokens


def reading(base: Config, *sources: DataSource, masking: bool = False) -> Config:
    changes = {"sources": list(sources), "document_masking": masking}
    return base.model_copy(update={"data": base.data.model_copy(update=changes)})


def raw(*paths: Path, eos_id: int | None = 0) -> DataSource:
    return DataSource(path=[str(path) for path in paths], dtype="uint16", eos_id=eos_id)


def prepared(folder: Path, ids: Path) -> DataSource:
    """A prepared folder with the ids of another file."""
    folder.mkdir()
    (folder / "train.bin").write_bytes(ids.read_bytes())
    count = ids.stat().st_size // 2
    digest = sample_digest(ids)  # any text that follows from the content
    Meta(
        dtype="uint16",
        vocab_size=VOCAB,
        eos_id=0,
        tokens={"train": count},
        documents={"train": 1},
        sha256={"train": digest},
    ).save(folder)
    return DataSource(path=str(folder))


def refusal(before: Config, now: Config) -> str | None:
    """What a resume says of changed data, if anything."""
    loader = DataLoader(before)
    loader.next_window()
    try:
        DataLoader(now).load_state(loader.state)
    except CheckpointError as error:
        return str(error)
    return None


def test_a_resume_names_the_file_and_what_differs(tmp_path: Path) -> None:
    base = config_at(tmp_path)
    a, b, c = (write_tokens(tmp_path / f"{name}.bin", seed=name) for name in range(3))
    short, extra = write_tokens(tmp_path / "s.bin", 4001), write_tokens(tmp_path / "x.bin", seed=9)
    before = reading(base, raw(a, b), raw(c))
    cases = {
        f"data.sources.0: order: {b} is file 0 of data.sources.0 in this run, "
        "file 1 of data.sources.0 in the checkpoint": (raw(b, a), raw(c)),
        f"data.sources.0: order: {c} is file 1 of data.sources.0 in this run, "
        "file 0 of data.sources.1 in the checkpoint": (raw(a, c), raw(b)),
        f"data.sources.0: size of {short}: 4001 ids in this run, 4002 ids in {b} in the "
        "checkpoint": (raw(a, short), raw(c)),
        f"data.sources.0: content of {extra}: sample": (raw(a, extra), raw(c)),
        "data.sources.0: 3 file(s) in this run, 2 in the checkpoint; "
        f"{extra} is only in this run": (raw(a, b, extra), raw(c)),
        "data.sources.0: 1 file(s) in this run, 2 in the checkpoint; "
        f"{b} is only in the checkpoint": (raw(a), raw(c)),
        "the sources are data.sources.0 in this run, data.sources.0, data.sources.1 in": (
            raw(a, b),
        ),
    }
    for expected, sources in cases.items():
        found = refusal(before, reading(base, *sources))
        assert found is not None, expected
        assert expected in found
        assert "start anew from the weights with checkpoint.init_from" in found


def test_one_changed_id_is_other_content(tmp_path: Path) -> None:
    config = config_at(tmp_path)
    loader, path = DataLoader(config), tmp_path / "tokens.bin"
    ids = np.fromfile(path, dtype=np.uint16)
    ids[2000] ^= 1
    ids.tofile(path)
    os.utime(path, (1, 1))  # both writes may fall in one tick of the file system's clock
    with pytest.raises(CheckpointError, match=rf"content of {path}: sample \w+ in this run, samp"):
        DataLoader(config).load_state(loader.state)


def test_other_bytes_of_the_same_size_in_another_type_are_refused(tmp_path: Path) -> None:
    base = config_at(tmp_path)
    wide = tmp_path / "wide.bin"
    np.fromfile(tmp_path / "tokens.bin", dtype=np.uint16).astype(np.uint32).tofile(wide)
    found = refusal(base, reading(base, DataSource(path=str(wide), dtype="uint32", eos_id=0)))
    assert f"type of {wide}: uint32 in this run, uint16 in" in str(found)


def test_data_may_move_be_mixed_anew_and_lie_twice(tmp_path: Path) -> None:
    base = config_at(tmp_path)
    a, b = (write_tokens(tmp_path / f"{name}.bin", seed=name) for name in range(2))
    before = reading(base, raw(a, b, a))
    moved = tmp_path / "moved.bin"
    moved.write_bytes(a.read_bytes())
    assert refusal(before, reading(base, raw(moved, b, a))) is None
    heavier = raw(a, b, a).model_copy(update={"weight": 3.0})
    assert refusal(before, reading(base, heavier)) is None
    # The same content, first as raw ids and then as a prepared folder.
    assert refusal(reading(base, raw(a)), reading(base, prepared(tmp_path / "data", a))) is None


def test_the_end_of_documents_counts_where_it_decides_labels(tmp_path: Path) -> None:
    base, path = config_at(tmp_path), tmp_path / "tokens.bin"
    zero, one = raw(path, eos_id=0), raw(path, eos_id=1)
    assert refusal(reading(base, zero), reading(base, one)) is None
    found = refusal(reading(base, zero, masking=True), reading(base, one, masking=True))
    assert "data.sources.0: eos_id: 1 in this run, 0 in the checkpoint" in str(found)


def test_a_prepared_folder_is_known_by_its_checksum(tmp_path: Path) -> None:
    base, path = config_at(tmp_path), tmp_path / "tokens.bin"
    first = prepared(tmp_path / "a", path)
    assert refusal(reading(base, first), reading(base, prepared(tmp_path / "b", path))) is None
    write_tokens(path, seed=5)
    found = refusal(reading(base, first), reading(base, prepared(tmp_path / "c", path)))
    assert "c/train.bin: sha256" in str(found)


def test_a_sample_sees_both_ends_the_size_and_evenly_spread_blocks(tmp_path: Path) -> None:
    """Of 3 MiB, 16 blocks of 64 KiB; changes between two blocks are not seen, as documented."""
    path = tmp_path / "large.bin"
    size = 3 << 20
    content = bytearray(np.random.default_rng(0).bytes(size))

    def digest_with(*places: int) -> str:
        changed = bytearray(content)
        for place in places:
            changed[place] ^= 1
        path.write_bytes(changed)
        return sample_digest(path)

    whole = digest_with()
    blocks = [(size - (1 << 16)) * index // 15 for index in range(16)]
    seen = [digest_with(place) for place in (0, size - 1, *blocks, blocks[7] + (1 << 16) - 1)]
    assert whole not in seen
    assert digest_with(blocks[7] + (1 << 16)) == whole
    path.write_bytes(content + b"\0")
    assert sample_digest(path) != whole


def test_the_fingerprint_does_not_know_paths(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    configs = [config_at(tmp_path / name) for name in ("a", "b")]
    here, there = (data_identity(config) for config in configs)
    assert here != there
    assert fingerprint(here) == fingerprint(there)
    assert list(here) == ["data.sources.0", "data.validation.held_out"]
    changed = write_tokens(tmp_path / "b" / "tokens.bin", seed=4)
    os.utime(changed, (1, 1))
    assert fingerprint(data_identity(configs[1])) != fingerprint(here)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch) -> None:
    config = config_at(tmp_path)
    original = Path.open

    def refuse(path: Path, *args, **kwargs):
        if path.name == "tokens.bin":
            raise PermissionError(13, "Permission denied")
        return original(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"tokens\.bin cannot be read: Permission denied"):
        data_identity(config)
