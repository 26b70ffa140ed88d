"""What happens between joining the peers and the first step: agree, then resume or begin."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from olmo_shard.config import Config
from olmo_shard.data.identity import difference, fingerprint
from olmo_shard.data.source import data_identity
from olmo_shard.distributed import collectives
from olmo_shard.distributed.agree import on_every_rank, on_first_rank
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import DataError
from olmo_shard.train.earlier_records import set_aside
from olmo_shard.train.preflight import check_start, preflight, scan_before_training
from olmo_shard.train.run_folder import choose_checkpoint, describe_saves, open_run
from olmo_shard.train.trainer import Trainer


def check_inputs(config: Config, mesh: Mesh, *, scanned: bool) -> None:
    """What every rank can see must be right, and rank 0 scans the data; collective.

    :raises OlmoShardError: on every rank, where one of them finds something wrong.
    """
    files = on_every_rank(mesh.control, lambda: preflight(config, mesh.world_size))
    on_first_rank(mesh.control, lambda: check_start(config))
    if not scanned:
        vocab_size = config.model.vocab_size
        on_first_rank(mesh.control, lambda: scan_before_training(files, vocab_size))


def check_same_data(config: Config, group: dist.ProcessGroup) -> None:
    """Compare every training and validation file over the ranks; collective.

    Each rank reads a sample of each file, at most 1 MiB.

    :param group: all ranks of the run.
    :raises DataError: on every rank, naming a rank, a file, and whether its size, type, order or
        content differs from the file of rank 0.
    """
    data = on_every_rank(group, lambda: data_identity(config))
    if len(set(collectives.gather_objects(fingerprint(data), group))) == 1:
        return
    first, *others = collectives.gather_objects(data, group)
    for rank, other in enumerate(others, start=1):
        found = difference(other, first, f"on rank {rank}", "on rank 0")
        if found:
            raise DataError(
                f"the ranks have different data: {found}; copy one version of the data to the "
                "hosts of all ranks"
            )


@contextmanager
def opened_run(config: Config, mesh: Mesh) -> Iterator[None]:
    """Hold the run's folder for this job alone; collective."""
    with ExitStack() as stack:
        on_first_rank(mesh.control, lambda: stack.enter_context(open_run(config)))
        yield


def start_from(config: Config, trainer: Trainer, mesh: Mesh) -> list[str]:
    """Resume, or begin a new run; returns lines for the log. Collective: rank 0 decides."""
    chosen = on_first_rank(mesh.control, lambda: choose_checkpoint(config))
    lines = [_loaded_from(config, trainer, chosen)]
    run_dir = Path(config.run.dir)
    if chosen is None or chosen.resolve().parent != (run_dir / "checkpoints").resolve():
        aside = on_first_rank(mesh.control, lambda: set_aside(run_dir))
        if aside is not None:
            lines.append(f"records   of an earlier start in {run_dir} are now in {aside}")
    return [*lines, *on_first_rank(mesh.control, lambda: describe_saves(config))]


def _loaded_from(config: Config, trainer: Trainer, chosen: Path | None) -> str:
    if chosen is not None:
        trainer.load(chosen)
        ignored = config.checkpoint.init_from and "; checkpoint.init_from was for the first start"
        step = f"step {trainer.state.step} of {trainer.total_steps}"
        return f"resume    {step}, from {chosen}{ignored or ''}"
    if config.checkpoint.init_from:
        trainer.checkpointer.load_weights(Path(config.checkpoint.init_from))
        return f"start     new run, weights from {config.checkpoint.init_from}"
    return "start     new run"
