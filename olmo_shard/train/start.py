"""What happens between building a trainer and its first step: agree, resume, leave a record."""

from pathlib import Path

from olmo_shard.config import Config, dump_yaml
from olmo_shard.distributed import collectives
from olmo_shard.distributed.agree import on_first_rank
from olmo_shard.distributed.mesh import Mesh
from olmo_shard.errors import CheckpointError, ConfigurationError
from olmo_shard.train.checkpoint_folder import complete_checkpoints, read_state
from olmo_shard.train.trainer import Trainer


def check_same_config(config: Config, mesh: Mesh) -> None:
    """:raises ConfigurationError: naming the first field that differs between ranks; collective."""
    digests = collectives.gather_objects(config.digest(), mesh.control)
    if collectives.all_equal(digests):
        return
    first, *others = collectives.gather_objects(_flat(config.model_dump()), mesh.control)
    assert isinstance(first, dict)
    for rank, other in enumerate(others, start=1):
        assert isinstance(other, dict)
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ConfigurationError(
                    f"the ranks have different configs: {name} = {first.get(name)!r} on rank 0, "
                    f"{other.get(name)!r} on rank {rank}"
                )


def start_from(config: Config, trainer: Trainer, mesh: Mesh) -> str:
    """Resume, or begin a new run; returns a line for the log. Collective: rank 0 decides."""
    chosen = on_first_rank(mesh.control, lambda: _open_run(config))
    if chosen is not None:
        trainer.load(chosen)
        return f"resume    step {trainer.state.step} of {trainer.total_steps}, from {chosen}"
    if config.checkpoint.init_from:
        trainer.checkpointer.load_weights(Path(config.checkpoint.init_from))
        return f"start     new run, weights from {config.checkpoint.init_from}"
    return "start     new run"


def choose_checkpoint(config: Config) -> Path | None:
    """The checkpoint to resume from, by ``checkpoint.resume``.

    :raises CheckpointError: where a named one is missing, or ``never`` meets a run that has some.
    """
    run_dir, resume = Path(config.run.dir), config.checkpoint.resume
    complete = complete_checkpoints(run_dir)
    if resume == "auto":
        return complete[-1] if complete else None
    if resume != "never":
        read_state(Path(resume))
        return Path(resume)
    if complete:
        raise CheckpointError(
            f"checkpoint.resume = never, but run.dir = {run_dir} holds {complete[-1].name}: "
            "choose another run.dir, remove the old run, or use checkpoint.resume=auto"
        )
    return None


def check_something_left(path: Path, total_steps: int) -> None:
    """:raises ConfigurationError: where a checkpoint is at the run's end already."""
    step = read_state(path)["train"]["step"]
    if step >= total_steps:
        raise ConfigurationError(
            f"nothing to train: {path} is at step {step} of {total_steps}; raise train.steps "
            "(or tokens, epochs), choose another run.dir, or name another checkpoint.resume"
        )


def _open_run(config: Config) -> Path | None:
    """Make the run's folder, write the resolved config, choose the checkpoint to resume from."""
    run_dir = Path(config.run.dir)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(dump_yaml(config), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"run.dir = {run_dir} cannot be written: {error.strerror}"
        ) from error
    return choose_checkpoint(config)


def _flat(tree: dict, prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tree.items():
        nested = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat
