"""The page that tells the story: from a config to a trained model, top to bottom."""

from pathlib import Path

from rich.console import Console as RichConsole

from olmo_shard.config import Config, TrackingConfig, dump_yaml, flatten
from olmo_shard.data.loader import DataLoader
from olmo_shard.data.validation import ValidationSet, open_validation
from olmo_shard.distributed.environment import RankInfo
from olmo_shard.distributed.mesh import build_mesh
from olmo_shard.distributed.rank_files import rank_files
from olmo_shard.distributed.runtime import runtime
from olmo_shard.nn.families import meta_model
from olmo_shard.optim.sharded import DistributedOptimizer
from olmo_shard.optim.spikes import SpikeFilter
from olmo_shard.parallel.apply import parallelize
from olmo_shard.train.callbacks import Callback
from olmo_shard.train.callbacks.console import Console, print_summary
from olmo_shard.train.callbacks.events import Events
from olmo_shard.train.callbacks.expert_map import ExpertMap
from olmo_shard.train.callbacks.jsonl import JsonLines
from olmo_shard.train.callbacks.loss_curve import LossCurve
from olmo_shard.train.callbacks.wandb import WandB
from olmo_shard.train.checks import SCAN_LIMIT_BYTES, PlannedRun, run_checks
from olmo_shard.train.records import CONFIG_FILE
from olmo_shard.train.start import check_inputs, check_same_data, opened_run, start_from
from olmo_shard.train.start_log import describe_result, describe_start
from olmo_shard.train.step import TrainStep
from olmo_shard.train.trainer import Trainer


def run(config: Config, info: RankInfo | None = None, *, scanned: bool = False) -> None:
    """Train as one rank. Collective over all ranks of the run.

    :param info: this rank; ``None`` for a run of one process.
    :param scanned: whether the launcher on this host has scanned all ids of the data already.
    :raises OlmoShardError: if a rule of ``train.checks`` is broken, or training cannot continue.
    """
    with runtime(info, config.run, config=flatten(config.model_dump())) as this_rank:
        # 1. Join the peers. Wrong layouts end here, because the groups of the mesh depend on them.
        rank, world_size = this_rank.rank, this_rank.world_size
        scan_limit = 0 if scanned else SCAN_LIMIT_BYTES
        planned = PlannedRun(config, world_size, scan_limit=scan_limit)
        run_checks(planned, "rank")
        mesh = build_mesh(this_rank, config.parallel.expert_parallel)

        # 2. Find all other mistakes before the run's folder changes or weights take memory.
        check_inputs(planned, mesh, this_rank.local_rank)
        check_same_data(config.data, config.model.vocab_size, mesh.control)

        run_dir = Path(config.run.dir)
        with opened_run(run_dir, mesh), rank_files(run_dir, mesh):
            # 3. Data: the same stream of sequences for every layout, and this rank's part of it.
            loader, validation = _open_data(config, rank, world_size)

            # 4. Model: its shape alone, since no rank could hold all weights. ``parallelize`` draws
            #    the weights that this rank keeps.
            model = meta_model(config.model)
            parallel_model = parallelize(
                model, mesh, config.parallel, config.run.seed, config.train.micro_batch_tokens
            )

            # 5. One optimizer step, as a function of a window of micro-batches.
            optimizer = DistributedOptimizer(parallel_model, mesh, config.optim)
            spikes = config.train.skip_spikes and SpikeFilter(
                config.train.skip_spikes, this_rank.device
            )
            step = TrainStep(model, optimizer, mesh, spikes)

            # 6. The loop around it. Only rank 0 reports, so callbacks must not communicate.
            console = RichConsole(highlight=False, soft_wrap=True)
            callbacks = _callbacks(config.tracking, console) if rank == 0 else []
            trainer = Trainer(config, mesh, loader, validation, step, callbacks)

            # 7. Resume. The config is written afterwards: a refused checkpoint leaves the old one.
            started = start_from(config.checkpoint, trainer, mesh)
            if rank == 0:
                (trainer.run_dir / CONFIG_FILE).write_text(dump_yaml(config), encoding="utf-8")

            # 8. Train to the end, free what peers share with this rank, and print the summary.
            notes = describe_start(trainer, this_rank, parallel_model)
            lines = trainer.fit([*notes, *started])
            parallel_model.close()
            if rank == 0:
                print_summary(console, [*describe_result(trainer.run_dir), *lines])


def _open_data(
    config: Config, rank: int, world_size: int
) -> tuple[DataLoader, list[ValidationSet]]:
    """Open the training data and the validation sets."""
    loader = DataLoader(
        config.data,
        config.train,
        vocab_size=config.model.vocab_size,
        seed=config.run.seed,
        rank=rank,
        world_size=world_size,
    )
    validation = open_validation(
        config.data,
        tokens=config.eval.tokens,
        micro_batch_tokens=config.train.micro_batch_tokens,
        vocab_size=config.model.vocab_size,
    )
    return loader, validation


def _callbacks(tracking: TrackingConfig, console: RichConsole) -> list[Callback]:
    """Everything that reports, in the order in which it reports."""
    tracker: list[Callback] = [] if tracking.wandb == "off" else [WandB(console)]
    return [Console(console), Events(), JsonLines(), *tracker, LossCurve(), ExpertMap()]
