"""Token files, loader, validation sets. Runs in CI."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from olmo_shard.config import Config, DataSource, load_config
from olmo_shard.data.documents import find_files, standard_library_files
from olmo_shard.data.loader import DataLoader, make_microbatch, total_steps
from olmo_shard.data.meta import read_meta
from olmo_shard.data.prepare import PrepareOptions, narrowest_type, prepare
from olmo_shard.data.token_file import resolve
from olmo_shard.data.validation import open_validation
from olmo_shard.errors import CheckpointError, ConfigurationError, DataError
from olmo_shard.nn.losses import IGNORE_INDEX
from olmo_shard.train.preflight import preflight, scan
from tests.support.configs import VOCAB, write_config, write_tokens


def config_at(tmp_path: Path, *overrides: str) -> Config:
    return load_config(str(write_config(tmp_path)), list(overrides))


def stream(config: Config, windows: int, world_size: int) -> list[list[int]]:
    """First ids of the sequences of each global batch, gathered over the ranks."""
    loaders = [DataLoader(config, rank, world_size) for rank in range(world_size)]
    batches = []
    for _ in range(windows):
        parts = [micro for loader in loaders for micro in loader.next_window()]
        batches.append(torch.cat([part.tokens_BS for part in parts]).flatten().tolist())
    return batches


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_global_batches_do_not_depend_on_the_ranks(tmp_path, world_size):
    config = config_at(tmp_path)
    assert stream(config, 20, world_size) == stream(config, 20, 1)


def test_global_batches_do_not_depend_on_the_micro_batch(tmp_path):
    assert stream(config_at(tmp_path), 5, 2) == stream(
        config_at(tmp_path, "train.micro_batch_tokens=128"), 5, 2
    )


def test_an_epoch_holds_each_sequence_once_and_the_next_is_shuffled_anew(tmp_path):
    config = config_at(tmp_path, "train.global_batch_tokens=32", "train.micro_batch_tokens=16")
    loader = DataLoader(config)
    source = loader.sources[0]
    assert source.num_sequences == 250
    orders = [[source.shuffled(e * 250 + i, 5) for i in range(250)] for e in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(250))
    assert orders[0] != orders[1]
    assert [source.shuffled(i, 6) for i in range(250)] != orders[0]


def test_labels_are_the_next_ids(tmp_path):
    ids = np.fromfile(write_tokens(tmp_path / "t.bin"), dtype=np.uint16)
    source = DataLoader(config_at(tmp_path)).sources[0]
    batch = make_microbatch([source.read(7)], [None])
    assert batch.tokens_BS[0].tolist() == ids[112:128].tolist()
    assert batch.labels_BS[0].tolist() == ids[113:129].tolist()
    assert batch.documents_BS is None


def test_a_resumed_loader_goes_on_where_it_stopped(tmp_path):
    config = config_at(tmp_path)
    loader = DataLoader(config)
    for _ in range(17):
        loader.next_window()
    resumed = DataLoader(config)
    resumed.load_state(loader.state)
    for _ in range(3):
        for mine, other in zip(loader.next_window(), resumed.next_window(), strict=True):
            assert torch.equal(mine.tokens_BS, other.tokens_BS)
    for change, message in [
        ({"seed": 4}, r"run\.seed = 3, but the checkpoint was trained with 4"),
        ({"sequence_length": 8}, r"data\.sequence_length = 16, but"),
        ({"source_tokens": [4002, 1]}, r"tokens of data\.sources = \[4002\], but"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            resumed.load_state(loader.state.model_copy(update=change))


def test_sources_are_mixed_by_weight(tmp_path):
    base = config_at(tmp_path)
    other = write_tokens(tmp_path / "other.bin", 900, seed=1)
    sources = [
        DataSource(path=str(tmp_path / "tokens.bin"), dtype="uint16", weight=3.0),
        DataSource(path=str(other), dtype="uint16", weight=1.0),
    ]
    data = base.data.model_copy(update={"sources": sources})
    loader = DataLoader(base.model_copy(update={"data": data}))
    for step in range(1, 30):
        loader.next_window()
        taken = loader.state.sequences
        assert taken == 16 * step
        assert loader.state.drawn[0] == pytest.approx(0.75 * taken, abs=1)


def test_changed_weights_count_from_the_resume_on(tmp_path):
    base = config_at(tmp_path)
    write_tokens(tmp_path / "other.bin", 900, seed=1)

    def mixed(*weights: float) -> DataLoader:
        names = ("tokens.bin", "other.bin")
        sources = [
            DataSource(path=str(tmp_path / name), dtype="uint16", weight=weight)
            for name, weight in zip(names, weights, strict=True)
        ]
        data = base.data.model_copy(update={"sources": sources})
        return DataLoader(base.model_copy(update={"data": data}))

    first = mixed(1.0, 1.0)
    for _ in range(10):
        first.next_window()
    resumed = mixed(1.0, 3.0)
    resumed.load_state(first.state)
    for _ in range(10):
        resumed.next_window()
    assert first.state.drawn == [80, 80]
    assert resumed.state.drawn == [80 + 40, 80 + 120]


def test_document_masking_ignores_labels_that_cross():
    batch = make_microbatch([np.array([5, 6, 0, 7, 8, 0, 9])], [0])
    assert batch.tokens_BS.tolist() == [[5, 6, 0, 7, 8, 0]]
    assert batch.labels_BS.tolist() == [[6, 0, IGNORE_INDEX, 8, 0, IGNORE_INDEX]]
    assert batch.documents_BS is not None
    assert batch.documents_BS.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert batch.num_labelled() == 4


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_validation_counts_each_sequence_once_with_equal_forwards(tmp_path, world_size):
    (validation,) = open_validation(config_at(tmp_path))
    assert validation.num_sequences == 20
    parts = [list(validation.batches(rank, world_size)) for rank in range(world_size)]
    assert len({len(part) for part in parts}) == 1
    shapes = {batch.tokens_BS.shape for part in parts for batch in part}
    assert shapes == {(2, 16)}
    labelled = [
        tuple(row.tolist())
        for part in parts
        for batch in part
        for row, labels in zip(batch.tokens_BS, batch.labels_BS, strict=True)
        if (labels != IGNORE_INDEX).all()
    ]
    assert len(labelled) == len(set(labelled)) == 20


@pytest.mark.parametrize(
    ("end", "steps"),
    [
        ("train.steps=7", 7),
        ("train.tokens=1000", 3),
        ("train.epochs=1.0", 15),
        ("train.epochs=2.0", 31),
    ],
)
def test_the_end_is_the_last_whole_step(tmp_path, end, steps):
    """250 sequences of 16 tokens, 16 sequences a step: an epoch is 15.6 steps."""
    overrides = [end] if "steps" in end else ["train.steps=null", end]
    config = config_at(tmp_path, *overrides)
    assert total_steps(config, DataLoader(config).num_sequences) == steps


def test_an_end_before_the_first_step_is_refused(tmp_path):
    config = config_at(tmp_path, "train.steps=null", "train.epochs=0.01")
    with pytest.raises(
        ConfigurationError, match=r"train.epochs = 0.01 is 32 tokens, less than one"
    ):
        total_steps(config, 250)


def test_every_bad_file_is_named_with_its_reason(tmp_path):
    good = write_tokens(tmp_path / "good.bin")
    bad = {
        "empty.bin": (b"", r"empty\.bin: empty \(0 bytes\)"),
        "odd.bin": (b"abc", r"odd\.bin: 3 bytes is not a multiple of 2"),
        "short.bin": (b"\x01\x00" * 16, r"short\.bin: 16 ids are fewer than .* 17"),
        "header.npy": (b"\x93NUMPY" + b"\x01\x00" * 40, r"header\.npy: has a NumPy header"),
        "wide.bin": (
            b"\x05\x00\x00\x00" * 200,
            r"every second uint16 is 0: the ids are of a wider type",
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
        ("data.sources.0.dtype=uint8", r"every second uint8 is 0: the ids are of a wider type"),
        ("data.sources.0.split=validation", r"raw token files have no splits"),
        ("data.sources.0.eos_id=64", r"eos_id = 64 is outside the vocabulary of 64 ids"),
        (
            "data.sources.0.dtype=uint32",
            r"is outside the vocabulary .* uint32 may be the wrong type",
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


def options(tmp_path: Path, **changes) -> PrepareOptions:
    fields = {
        "out": tmp_path / "out",
        "tokenizer": None,
        "bpe_vocab_size": 300,
        "eos": None,
        "validation_fraction": 0.25,
    }
    return PrepareOptions(**(fields | changes))


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
    from tokenizers import Tokenizer

    files = find_files([str(texts)], "text")
    documents = [text for file in files for text in file.documents()]
    assert len(documents) == 6 + 4 + 3 + 4
    out = tmp_path / "out"
    meta = prepare(files, options(tmp_path), Console(quiet=True))
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
    files = find_files([str(texts)], "text")
    first = prepare(files, options(tmp_path), Console(quiet=True))
    given = options(tmp_path, out=tmp_path / "again", tokenizer=tmp_path / "out" / "tokenizer.json")
    assert prepare(files, given, Console(quiet=True)) == first


def test_the_name_of_the_end_token_inside_a_text_does_not_end_a_document(tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("before <|endoftext|> after " * 50)
    meta = prepare(
        find_files([str(source)], "text"),
        options(tmp_path, validation_fraction=0.0, bpe_vocab_size=270),
        Console(quiet=True),
    )
    ids = np.fromfile(tmp_path / "out" / "train.bin", dtype=np.uint16)
    assert (ids == meta.eos_id).sum() == 1


def test_prepared_files_that_were_changed_are_refused(tmp_path, texts):
    prepare(find_files([str(texts)], "text"), options(tmp_path), Console(quiet=True))
    source = DataSource(path=str(tmp_path / "out"))
    (file,) = resolve(source)
    assert file.size_problem() is None
    assert file.id_problem(300) is None
    content = file.path.read_bytes()
    file.path.write_bytes(content[:-2])
    assert "truncated or changed" in (file.size_problem() or "")
    file.path.write_bytes(content[2:] + b"\x01\x00")
    assert "checksum differs" in (file.id_problem(300) or "")
    (tmp_path / "out" / "meta.json").unlink()
    with pytest.raises(DataError, match=r"has no meta\.json"):
        resolve(source)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("{bad", "a.jsonl", r"a\.jsonl line 1: not valid JSON"),
        ('{"text": 3}', "a.jsonl", r"a\.jsonl line 1: no string in field 'text'"),
        ("[]", "a.jsonl", r"a\.jsonl line 1: no string in field"),
        ("not parquet", "a.parquet", r"a\.parquet: not a Parquet file"),
        ("not gzip", "a.jsonl.gz", r"a\.jsonl\.gz after line 0"),
        ("not zstd", "a.jsonl.zst", r"a\.jsonl\.zst after line 0"),
    ],
)
def test_a_bad_document_is_named_by_file_and_line(tmp_path, content, name, message):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message):
        prepare(find_files([str(path)], "text"), options(tmp_path), Console(quiet=True))
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
        prepare(find_files([str(texts)], "text"), options(tmp_path, **changes), Console(quiet=True))


def test_prepare_does_not_overwrite(tmp_path, texts):
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"exists already"):
        prepare(find_files([str(texts)], "text"), options(tmp_path), Console(quiet=True))
    with pytest.raises(DataError, match=r"no such file or folder"):
        find_files([str(tmp_path / "none")], "text")
    with pytest.raises(DataError, match=r"no sources"):
        prepare([], options(tmp_path), Console(quiet=True))


def test_wider_ids_whose_first_ones_are_zeros_are_found_by_the_scan(tmp_path):
    ids = np.zeros(2000, dtype=np.uint32)
    ids[500:] = 7
    ids.tofile(tmp_path / "wide.bin")
    config = config_at(tmp_path, f"data.sources.0.path={tmp_path / 'wide.bin'}")
    with pytest.raises(DataError, match=r"every second uint16 is 0"):
        scan(preflight(config, 1), config.model.vocab_size)


@pytest.mark.parametrize(("fraction", "held_out"), [(0.0, 0), (0.3, 5), (0.4, 6), (0.5, 8)])
def test_the_held_out_share_is_what_was_asked_for(tmp_path, texts, fraction, held_out):
    files = find_files([str(texts)], "text")
    meta = prepare(files, options(tmp_path, validation_fraction=fraction), Console(quiet=True))
    assert meta.documents == {"train": 17 - held_out, "validation": held_out}


def test_nothing_to_train_on_is_an_error(tmp_path, texts):
    prepare(find_files([str(texts)], "text"), options(tmp_path), Console(quiet=True))
    (tmp_path / "empty.txt").write_text("")
    given = options(tmp_path, out=tmp_path / "b", tokenizer=tmp_path / "out" / "tokenizer.json")
    with pytest.raises(DataError, match=r"the 1 source file\(s\) hold no text to train on"):
        prepare(find_files([str(tmp_path / "empty.txt")], "text"), given, Console(quiet=True))
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
    meta = prepare(find_files([str(texts)], "text"), options(tmp_path), Console(quiet=True))
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


def test_a_micro_batch_moves_to_a_device():
    batch = make_microbatch([np.arange(5)], [3]).to(torch.device("meta"))
    assert batch.tokens_BS.is_meta
    assert batch.documents_BS is not None
    assert batch.documents_BS.is_meta
