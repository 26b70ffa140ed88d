"""Fakes of SLURM's programs: a cluster of one host, on which jobs start at once."""

import os
import sys
from pathlib import Path

SBATCH = """
import os, re, shutil, subprocess, sys
script, *arguments = sys.argv[1:]
options = dict(re.findall(r"^#SBATCH --([\\w-]+)=(\\S+)", open(script).read(), re.M))
spool = os.path.join(os.path.dirname(__file__), "spool")
os.makedirs(spool, exist_ok=True)
copy = shutil.copy(script, os.path.join(spool, "slurm_script"))
job = {
    "SLURM_SUBMIT_DIR": os.getcwd(),
    "SLURM_JOB_ID": str(1 + os.getpid() % 700),
    "SLURM_JOB_NODELIST": "node[1-2]",
}
if "cpus-per-task" in options:
    job["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
command = ["bash", copy, *arguments]
sys.exit(subprocess.call(command, cwd=spool, env=os.environ | job))
"""
"""Runs a copy of the script in another folder, as SLURM does. Job numbers are below 700: olmo-shard
derives ports from them that no outgoing connection uses.
"""

SCONTROL = """
import sys
assert sys.argv[1:] == ["show", "hostnames", "node[1-2]"], sys.argv
print("localhost\\nnode2")
"""

SRUN = """
import json, os, subprocess, sys
words = sys.argv[1:]
options = {}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
with open(os.path.join(os.path.dirname(__file__), "srun.json"), "w") as file:
    json.dump({"options": options, "command": words, "environ": dict(os.environ)}, file)
def task(rank):
    log = open(options["--output"].replace("%t", str(rank)), "a")
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    environ = os.environ | step | {"SLURM_PROCID": str(rank)}
    return subprocess.Popen(words, env=environ, stdout=log, stderr=log)
tasks = [task(rank) for rank in range(2)]
sys.exit(max(abs(each.wait()) for each in tasks))
"""
"""Runs two tasks on this host, and writes its options and environment to ``srun.json``."""


def cluster(folder: Path) -> dict[str, str]:
    """Environment in which ``sbatch``, ``scontrol`` and ``srun`` are the fakes.

    :param folder: folder for the programs and their files.
    """
    for name, text in {"sbatch": SBATCH, "scontrol": SCONTROL, "srun": SRUN}.items():
        program = folder / name
        program.write_text(f"#!{sys.executable}{text}", encoding="utf-8")
        program.chmod(0o755)
    return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
