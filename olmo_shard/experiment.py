"""The page that tells the story: from a config to a trained model, top to bottom."""

import statistics
from pathlib import Path

from rich.console import Console as RichConsole

from olmo_shard.config import Config, dump_yaml, flatten
from olmo_shard.data.coverage import describe_data, describe_end
from olmo_shard.data.loader import DataLoader
from olmo_shard.data.validation import open_validation
from olmo_shard.distributed.environment import RankInfo
from olmo_shard.distributed.mesh import build_mesh
from olmo_shard.distributed.runtime import Runtime, runtime
from olmo_shard.nn.families import meta_model
from olmo_shard.nn.flops import parameter_counts
from olmo_shard.nn.readers import undeclared_classes
from olmo_shard.optim.schedule import describe_schedule
from olmo_shard.optim.sharded import DistributedOptimizer
from olmo_shard.optim.spikes import SpikeFilter
from olmo_shard.parallel.apply import parallelize
from olmo_shard.parallel.ddp import DDPModel
from olmo_shard.parallel.shards import ParallelModel
from olmo_shard.train.callbacks import Callback
from olmo_shard.train.callbacks.console import Console, print_summary
from olmo_shard.train.callbacks.events import Events
from olmo_shard.train.callbacks.expert_map import ExpertMap
from olmo_shard.train.callbacks.jsonl import JsonLines
from olmo_shard.train.callbacks.loss_curve import LossCurve
from olmo_shard.train.callbacks.wandb import WandB
from olmo_shard.train.precision import describe_precision
from olmo_shard.train.records import CONFIG_FILE, METRICS_FILE, Record, read_records
from olmo_shard.train.start import check_inputs, check_same_data, opened_run, start_from
from olmo_shard.train.step import TrainStep
from olmo_shard.train.trainer import Trainer


def run(config: Config, info: RankInfo | None = None, *, scanned: bool = False) -> None:
    """Train as one rank; collective over all ranks of the run.

    :param info: this rank; null for a run of one process.
    :param scanned: whether whoever started this rank has scanned the data already.
    """
    with runtime(info, config.run, config=flatten(config.model_dump())) as here:
        config.check_world(here.world_size)
        mesh = build_mesh(here, config.parallel.expert_parallel)
        check_inputs(config, mesh, scanned=scanned)
        check_same_data(config, mesh.control)
        with opened_run(config, mesh):
            loader = DataLoader(config, here.rank, here.world_size)
            validation = open_validation(config)

            model = meta_model(config.model)
            parallel_model = parallelize(
                model, mesh, config.parallel, config.run.seed, config.train.micro_batch_tokens
            )
            optimizer = DistributedOptimizer(parallel_model, mesh, config.optim)
            spikes = config.train.skip_spikes and SpikeFilter(config.train.skip_spikes, here.device)
            step = TrainStep(model, optimizer, mesh, spikes)

            console = RichConsole(highlight=False, soft_wrap=True)
            callbacks = _callbacks(config, console) if here.rank == 0 else []
            trainer = Trainer(config, mesh, loader, validation, step, callbacks)
            started = start_from(config, trainer, mesh)
            if here.rank == 0:
                (trainer.run_dir / CONFIG_FILE).write_text(dump_yaml(config), encoding="utf-8")
            notes = _describe(trainer, here, parallel_model)
            lines = trainer.fit([*notes, *started])
            parallel_model.close()
            if here.rank == 0:
                print_summary(console, [*_outcome(config), *lines])


def _callbacks(config: Config, console: RichConsole) -> list[Callback]:
    tracker: list[Callback] = [] if config.tracking.wandb == "off" else [WandB(console)]
    return [Console(console), Events(), JsonLines(), *tracker, LossCurve(), ExpertMap()]


def _describe(trainer: Trainer, here: Runtime, parallel_model: ParallelModel) -> list[str]:
    """What was chosen, for the log."""
    config, loader, step = trainer.config, trainer.loader, trainer.state.step
    parallel, train, connection = config.parallel, config.train, parallel_model.connection
    counts = parameter_counts(config.model)
    ep = parallel.expert_parallel
    return [
        f"config    {config.run.dir}/config.yaml (resolved, with all overrides)",
        f"model     {counts.total:,} parameters, {counts.active:,} active per token",
        f"layout    {parallel.mode}, {here.world_size} rank(s) = {here.world_size // ep} ep_dp "
        f"x {ep} ep, {parallel.compute_dtype}, {here.device.type}, {here.threads} thread(s) a rank",
        describe_precision(parallel),
        f"kernels   {parallel_model.backend} (parallel.kernels = {parallel.kernels})",
        *([] if connection is None else [f"dispatch  {connection.note}"]),
        *_describe_gather(parallel_model),
        *describe_data(loader, step),
        f"batch     {train.global_batch_tokens} tokens = {here.world_size} rank(s) x "
        f"{config.num_microbatches(here.world_size)} micro-batch(es) x {train.micro_batch_tokens}",
        f"schedule  {describe_schedule(config.optim.lr, trainer.total_steps, config.schedule)}; "
        f"{describe_end(loader, step)}",
    ]


def _describe_gather(parallel_model: ParallelModel) -> list[str]:
    """A line if code without declared parameter readers costs the overlap of the gather."""
    undeclared = undeclared_classes(parallel_model.model)
    if not isinstance(parallel_model, DDPModel) or not undeclared:
        return []
    return [
        "gather    ends before each forward, since these classes declare no parameter_readers: "
        + ", ".join(undeclared)
    ]


def _outcome(config: Config) -> list[tuple[str, str]]:
    """What the run came to, from its own record."""
    records = read_records(Path(config.run.dir) / METRICS_FILE)
    first, last = records[0], records[-1]
    rate = statistics.median(record["tokens_per_second"] for record in records)
    return [
        ("first loss", _loss(first)),
        ("last loss", _loss(last)),
        ("tokens/s", f"{rate:,.0f} (median of all steps)"),
        ("run directory", str(config.run.dir)),
    ]


def _loss(record: Record) -> str:
    if record["loss"] is not None:
        loss = f"{record['loss']:.4f}"
    else:
        loss = "not finite" if record["tokens"] else "no token has a label"
    return f"{loss} (step {record['step']})"
