"""Records at a resume: what is done again is moved, never deleted."""

import json
from pathlib import Path

from olmo_shard.train.records import read_records
from olmo_shard.train.rewind import Rewound, rewind


def write(path: Path, steps: tuple[int, ...], rest: str = "") -> None:
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps) + rest)


def steps(path: Path) -> list[int]:
    return [record["step"] for record in read_records(path)]


def test_lines_beyond_the_checkpoint_are_kept_in_a_file_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", (1, 2, 3, 4), rest='{"step": 5, "lo')
    write(tmp_path / "eval.jsonl", (2, 4))
    write(tmp_path / "experts.jsonl", (2,))
    found = rewind(tmp_path, 2)
    replaced = {"metrics.replaced.jsonl": 2, "eval.replaced.jsonl": 1}
    assert found == Rewound(last_step=4, replaced=replaced)
    assert steps(tmp_path / "metrics.jsonl") == [1, 2]
    assert steps(tmp_path / "metrics.replaced.jsonl") == [3, 4]
    assert steps(tmp_path / "eval.jsonl") == [2]
    assert steps(tmp_path / "eval.replaced.jsonl") == [4]
    assert steps(tmp_path / "experts.jsonl") == [2]


def test_a_second_resume_adds_to_what_the_first_replaced(tmp_path: Path) -> None:
    for last in (4, 3):
        write(tmp_path / "metrics.jsonl", tuple(range(1, last + 1)))
        rewind(tmp_path, 2)
    assert steps(tmp_path / "metrics.replaced.jsonl") == [3, 4, 3]


def test_a_new_run_has_nothing_to_move(tmp_path: Path) -> None:
    assert rewind(tmp_path, 0) == Rewound()
    assert not list(tmp_path.iterdir())


def test_a_move_that_a_kill_cut_short_is_done_once(tmp_path: Path) -> None:
    for _ in range(2):
        write(tmp_path / "metrics.jsonl", (1, 2, 3))
        rewind(tmp_path, 2)
    assert steps(tmp_path / "metrics.replaced.jsonl") == [3]


def test_an_event_that_a_kill_cut_short_spoils_no_later_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, (0, 9), rest='{"step": 9, "ev')
    rewind(tmp_path, 2)
    assert path.read_text() == '{"step": 0}\n{"step": 9}\n'
