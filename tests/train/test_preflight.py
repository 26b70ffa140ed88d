"""How token rows would travel, said before anything starts."""

import pytest

from olmo_shard.train import preflight
from tests.support.configs import write_config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], "# dispatch local\n"),
        (["parallel.dispatch=collective"], "# dispatch collective\n"),
        (["model.moe=null", "model.n_dense_layers=0"], "# dispatch none: no experts\n"),
        (
            ["parallel.expert_parallel=2"],
            "# dispatch rowwise where all ranks of a group are on one host: mailboxes of 2 slots x "
            "1 peer(s) x 32 rows x 144 B = 9,344 bytes (9.1 KiB) a rank, 18,688 bytes (18.2 KiB) "
            "for 2 rank(s); 5,000,000 bytes (4.8 MiB) available here\n",
        ),
        (
            ["parallel.expert_parallel=2", "model.d_model=32768"],
            "# dispatch collective: rowwise cannot run here: the mailboxes of 2 rank(s) need "
            "16,779,520 bytes (16.0 MiB) of shared memory, 5,000,000 bytes (4.8 MiB) are available",
        ),
        (
            ["parallel.expert_parallel=2", "parallel.symmetric_heap=torch"],
            "# dispatch collective: rowwise cannot run here: parallel.symmetric_heap = torch is "
            "memory of GPUs, this is a run on cpu\n",
        ),
        (
            ["parallel.expert_parallel=2", "run.device=cuda"],
            "# dispatch rowwise where the GPUs of a group reach each other: mailboxes of 2 slots x "
            "1 peer(s) x 32 rows x 144 B = 9,344 bytes (9.1 KiB) a rank\n",
        ),
        (
            ["parallel.expert_parallel=2", "run.device=cuda", "parallel.kernels=reference"],
            "# dispatch collective: rowwise cannot run here: rows on GPUs are moved by Triton "
            "kernels, and parallel.kernels = reference\n",
        ),
    ],
)
def test_a_check_says_how_rows_would_travel(tmp_path, main, monkeypatch, overrides, said):
    monkeypatch.setattr(preflight, "available_memory", lambda: 5_000_000)
    code, printed = main("check", write_config(tmp_path), *overrides)
    assert code == 0, printed
    assert said in printed


@pytest.mark.parametrize("command", ["check", "train"])
def test_mailboxes_that_do_not_fit_are_refused_before_any_rank_starts(
    tmp_path, main, monkeypatch, command
):
    monkeypatch.setattr(preflight, "available_memory", lambda: 10_000)
    wanted = ["parallel.expert_parallel=2", "parallel.dispatch=rowwise", "--nproc", "2"]
    code, printed = main(command, write_config(tmp_path), *wanted)
    assert code == 2
    assert (
        "parallel.dispatch = rowwise cannot run here: the mailboxes of 2 rank(s) need 18,688 bytes "
        "(18.2 KiB) of shared memory, 10,000 bytes (9.8 KiB) are available; "
    ) in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", ["check", "train"])
def test_triton_on_a_cpu_is_refused(tmp_path, main, command):
    code, printed = main(command, write_config(tmp_path), "parallel.kernels=triton")
    assert code == 2
    assert "parallel.kernels = triton needs a GPU, this is a run on cpu" in printed
    assert not (tmp_path / "run").exists()
