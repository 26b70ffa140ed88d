"""Token files that cannot be used are named, with their reasons."""

import re
from pathlib import Path

import numpy as np
import pytest

from olmo_shard.config import DataSource
from olmo_shard.data.loader import DataLoader
from olmo_shard.data.token_file import TokenFile
from olmo_shard.errors import DataError
from olmo_shard.train.preflight import preflight, scan
from tests.support.configs import VOCAB, config_at, write_tokens


def test_every_bad_file_is_named_with_its_reason(tmp_path):
    good = write_tokens(tmp_path / "good.bin")
    bad = {
        "empty.bin": (b"", r"empty\.bin: empty \(0 bytes\)"),
        "odd.bin": (b"abc", r"odd\.bin: 3 bytes is not a multiple of 2"),
        "short.bin": (b"\x01\x00" * 16, r"short\.bin: 16 ids are fewer than .* 17"),
        "header.npy": (b"\x93NUMPY" + b"\x01\x00" * 40, r"header\.npy: has a NumPy header"),
        "wide.bin": (
            b"\x05\x00\x00\x00\x06\x00\x00\x00" * 200,
            r"wide\.bin: dtype uint16 is wrong: the ids are uint32",
        ),
    }
    for name, (content, _) in bad.items():
        (tmp_path / name).write_bytes(content)
    paths = [str(good), *(str(tmp_path / name) for name in bad)]
    config = config_at(tmp_path)
    data = config.data.model_copy(update={"sources": [DataSource(path=paths, dtype="uint16")]})
    with pytest.raises(DataError) as caught:
        preflight(config.model_copy(update={"data": data}), 1)
    for _, reason in bad.values():
        assert re.search(reason, str(caught.value)), reason
    assert "good.bin" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.sources.0.path=missing.bin", r"no such file or folder: missing\.bin"),
        ("data.sources.0.path=missing-*.bin", r"missing-\*\.bin: no file matches"),
        ("data.sources.0.dtype=null", r"raw token files need dtype"),
        ("data.sources.0.dtype=uint8", r"dtype uint8 is wrong: the ids are uint16"),
        ("data.sources.0.split=validation", r"raw token files have no splits"),
        ("data.sources.0.eos_id=64", r"eos_id = 64 is outside the vocabulary of 64 ids"),
        (
            "data.sources.0.dtype=uint32",
            r"is outside the vocabulary .* as uint16 none: that is probably their type",
        ),
    ],
)
def test_a_source_that_cannot_be_used(tmp_path, override, message):
    config = config_at(tmp_path, override)
    with pytest.raises(DataError, match=message):
        scan(preflight(config, 1), config.model.vocab_size)


def test_an_id_outside_the_vocabulary_is_found_by_scan_and_by_reading(tmp_path):
    config = config_at(tmp_path)
    ids = np.fromfile(tmp_path / "tokens.bin", dtype=np.uint16)
    ids[1000] = VOCAB
    ids.tofile(tmp_path / "tokens.bin")
    message = rf"tokens\.bin: id {VOCAB} at offset 1000 is outside the vocabulary of {VOCAB} ids"
    with pytest.raises(DataError, match=message):
        scan(preflight(config, 1), config.model.vocab_size)
    with pytest.raises(DataError, match=message):
        DataLoader(config).sources[0].read(1000 // 16)


def test_masking_needs_to_know_the_end_of_a_document(tmp_path):
    config = config_at(tmp_path, "data.document_masking=true", "data.sources.0.eos_id=null")
    with pytest.raises(DataError, match=r"document_masking needs the source's eos_id"):
        DataLoader(config)


def test_a_file_named_as_prepared_and_as_raw_is_still_verified(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "train.bin")
    prepared, raw = (
        TokenFile(path=path, dtype=np.dtype("uint16"), eos_id=0, vocab_size=VOCAB, sha256=checksum)
        for checksum in ("0" * 64, None)
    )
    with pytest.raises(DataError, match=r"the checksum differs from meta\.json"):
        scan([prepared, raw], VOCAB)
