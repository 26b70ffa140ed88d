"""The README tells the truth: its loop runs, and its commands exist. Runs on gloo."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_loop_without_the_trainer_runs_on_two_ranks_and_learns(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    script = tmp_path / "loop.py"
    script.write_text(block)
    assert len(block.splitlines()) <= 45
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            script,
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    losses = [float(line.split()[-1]) for line in result.stdout.splitlines() if "loss" in line]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 2


def test_make_targets_and_configs_that_the_readme_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make (\w+)", README, flags=re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for path in set(re.findall(r"configs/[\w.-]+\.yaml", README)):
        assert (ROOT / path).is_file(), path
