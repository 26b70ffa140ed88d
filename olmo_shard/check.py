"""The command ``olmo-shard check``: validate a run without training, and resolve its config."""

from pathlib import Path

from olmo_shard.config import Config, dump_yaml
from olmo_shard.nn.flops import parameter_counts
from olmo_shard.optim.parameter_groups import describe_groups
from olmo_shard.train.checks import PlannedRun, run_checks
from olmo_shard.train.preflight import kernels_of
from olmo_shard.train.run_folder import describe_saves


def check(config: Config, nproc: int | None) -> str:
    """Verify every rule that ``check`` can verify, and read every id of the data.

    :param nproc: number of ranks of the run. ``None`` means the smallest number that the config can
        run on.
    :returns: the resolved config in YAML. Comments after it state what follows from the config.
    :raises OlmoShardError: for the first broken rule.
    """
    expert_parallel = config.parallel.expert_parallel
    world_size = nproc or expert_parallel
    # The ranks of one group share a host, or rowwise cannot run on CPUs. There may be more hosts.
    run = PlannedRun(config, world_size, ranks_on_host=expert_parallel)
    run_checks(run, "check")

    # A run at its end is not a mistake in the config, so the exit code stays 0.
    problem = run.start.problem()
    start = [problem] if problem else [*run.start.describe(), "ready to train"]
    counts = parameter_counts(config.model)
    comments = [
        f"{counts.total:,} parameters, {counts.active:,} active per token",
        f"valid for {world_size} rank(s), {config.num_microbatches(world_size)} micro-batch(es)",
        f"kernels {kernels_of(config)}",
        f"dispatch {run.dispatch}",
        *describe_groups(run.parameter_groups),
        *describe_saves(Path(config.run.dir), config.checkpoint),
        *start,
    ]
    return "\n".join([dump_yaml(config), *(f"# {comment}" for comment in comments)])
