"""Log lines at the start of a run (what was chosen) and at its end (what came out)."""

import statistics
from pathlib import Path

from olmo_shard.config import Config
from olmo_shard.data.coverage import describe_data, describe_end
from olmo_shard.distributed.runtime import Runtime
from olmo_shard.nn.flops import parameter_counts
from olmo_shard.nn.readers import undeclared_classes
from olmo_shard.optim.parameter_groups import describe_groups
from olmo_shard.optim.schedule import describe_schedule
from olmo_shard.parallel.ddp import DDPModel
from olmo_shard.parallel.shards import ParallelModel
from olmo_shard.train.precision import describe_precision
from olmo_shard.train.records import METRICS_FILE, Record, read_records
from olmo_shard.train.trainer import Trainer


def describe_start(trainer: Trainer, runtime: Runtime, parallel_model: ParallelModel) -> list[str]:
    """Return the lines about a run that has its model, its data and its position."""
    config, loader, step = trainer.config, trainer.loader, trainer.state.step
    choice = parallel_model.dispatcher_choice
    counts = parameter_counts(config.model)
    return [
        f"config    {config.run.dir}/config.yaml (resolved, with all overrides)",
        f"model     {counts.total:,} parameters, {counts.active:,} active per token",
        _layout(config, runtime),
        describe_precision(config.parallel),
        f"kernels   {parallel_model.backend} (parallel.kernels = {config.parallel.kernels})",
        *([] if choice is None else [f"dispatch  {choice.note}"]),
        *_gather(parallel_model),
        *describe_data(loader, step),
        f"batch     {config.train.global_batch_tokens} tokens = {runtime.world_size} rank(s) x "
        f"{config.num_microbatches(runtime.world_size)} micro-batch(es) x "
        f"{config.train.micro_batch_tokens}",
        *describe_groups(trainer.optimizer.groups),
        f"schedule  {describe_schedule(config.optim.lr, trainer.total_steps, config.schedule)}; "
        f"{describe_end(loader, step)}",
    ]


def describe_result(run_dir: Path) -> list[tuple[str, str]]:
    """Return the lines of the summary that come from the run's record, as (name, value)."""
    # The median leaves out evaluations, checkpoints, and the slow first step.
    records = read_records(run_dir / METRICS_FILE)
    rate = statistics.median(record["tokens_per_second"] for record in records)
    return [
        ("first loss", _loss(records[0])),
        ("last loss", _loss(records[-1])),
        ("tokens/s", f"{rate:,.0f} (median of all steps)"),
        ("run directory", str(run_dir)),
    ]


def _gather(parallel_model: ParallelModel) -> list[str]:
    """A line if classes without declared parameter readers cost the overlap of the gather."""
    undeclared = undeclared_classes(parallel_model.model)
    if not isinstance(parallel_model, DDPModel) or not undeclared:
        return []
    return [
        "gather    ends before each forward, since these classes declare no parameter_readers: "
        + ", ".join(undeclared)
    ]


def _layout(config: Config, runtime: Runtime) -> str:
    """The line about ranks, groups, type and device."""
    parallel, ranks = config.parallel, runtime.world_size
    ep = parallel.expert_parallel
    return (
        f"layout    {parallel.mode}, {ranks} rank(s) = {ranks // ep} ep_dp x {ep} ep, "
        f"{parallel.compute_dtype}, {runtime.device.type}, {runtime.threads} thread(s) a rank"
    )


def _loss(record: Record) -> str:
    """The loss of a step, or the reason why it has none."""
    if record["loss"] is not None:
        loss = f"{record['loss']:.4f}"
    else:
        loss = "not finite" if record["tokens"] else "no token has a label"
    return f"{loss} (step {record['step']})"
