"""The start of a run, after joining the peers and before the first step. All is collective."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from olmo_shard.config import CheckpointConfig, DataConfig
from olmo_shard.data.identity import difference, fingerprint
from olmo_shard.data.source import data_identity
from olmo_shard.distributed import collectives
from olmo_shard.distributed.agree import on_every_rank, on_first_rank
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import DataError
from olmo_shard.train.checks import PlannedRun, run_checks
from olmo_shard.train.earlier_records import set_aside
from olmo_shard.train.run_folder import choose_checkpoint, describe_saves, open_run
from olmo_shard.train.trainer import Trainer


def check_inputs(run: PlannedRun, mesh: Mesh, local_rank: int) -> None:
    """Verify the rules of every rank, then those of rank 0, then those of one rank per host.

    :param local_rank: this rank among the ranks of its host.
    :raises OlmoShardError: on every rank, if a rule is broken on one of them.
    """
    on_every_rank(mesh.control, lambda: run_checks(run, "every rank"))
    on_first_rank(mesh.control, lambda: run_checks(run, "first rank"))
    on_every_rank(mesh.control, lambda: run_checks(run, "host") if local_rank == 0 else None)


def check_same_data(data: DataConfig, vocab_size: int, group: dist.ProcessGroup) -> None:
    """Compare all training and validation files over the ranks.

    Each rank reads a sample of each file, at most 1 MiB.

    :param vocab_size: number of ids of the model.
    :param group: all ranks of the run.
    :raises DataError: on every rank, with a rank, a file, and whether its size, type, order or
        content differs from the file of rank 0.
    """
    identity = on_every_rank(group, lambda: data_identity(data, vocab_size))
    # Fingerprints are short, so ranks with equal data exchange little.
    if len(set(collectives.gather_objects(fingerprint(identity), group))) == 1:
        return
    first, *others = collectives.gather_objects(identity, group)
    for rank, other in enumerate(others, start=1):
        clause = difference(other, first, f"on rank {rank}", "on rank 0")
        if clause:
            raise DataError(
                f"the ranks have different data: {clause}; copy one version of the data to the "
                "hosts of all ranks"
            )


@contextmanager
def opened_run(run_dir: Path, mesh: Mesh) -> Iterator[None]:
    """Create the run's folder and hold its lock, on rank 0 for all ranks.

    :raises ConfigurationError: on every rank, if the folder cannot be used.
    """
    with ExitStack() as stack:
        on_first_rank(mesh.control, lambda: stack.enter_context(open_run(run_dir)))
        yield


def start_from(config: CheckpointConfig, trainer: Trainer, mesh: Mesh) -> list[str]:
    """Load the checkpoint to start from, if there is one.

    Rank 0 chooses for all ranks, because ranks that look at a shared file system by themselves may
    see different states of it.

    :returns: lines for the log.
    :raises CheckpointError: on every rank, if the checkpoint cannot be used.
    """
    run_dir, model = trainer.run_dir, trainer.config.model
    path = on_first_rank(mesh.control, lambda: choose_checkpoint(run_dir, config.resume, model))
    lines = [_load(config, trainer, path)]
    # Records continue only after a resume from a checkpoint of this folder.
    if path is None or path.resolve().parent != (run_dir / "checkpoints").resolve():
        # A branch of another run is a W&B run of its own.
        trainer.state.tracker_run_id, trainer.state.tracker_segments = None, []
        aside = on_first_rank(mesh.control, lambda: set_aside(run_dir))
        if aside is not None:
            lines.append(f"records   of an earlier start in {run_dir} are now in {aside}")
    return [*lines, *on_first_rank(mesh.control, lambda: describe_saves(run_dir, config))]


def _load(config: CheckpointConfig, trainer: Trainer, path: Path | None) -> str:
    """Load a checkpoint, or the weights of ``init_from``; returns a line for the log."""
    if path is not None:
        trainer.load(path)
        ignored = config.init_from and "; checkpoint.init_from was for the first start"
        step = f"step {trainer.state.step} of {trainer.total_steps}"
        return f"resume    {step}, from {path}{ignored or ''}"
    if config.init_from:
        trainer.checkpointer.load_weights(Path(config.init_from))
        return f"start     new run, weights from {config.init_from}"
    return "start     new run"
