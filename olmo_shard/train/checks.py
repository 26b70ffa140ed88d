"""All rules that a run must meet before its first step, as one ordered list: ``CHECKS``.

Rules about the config alone are validators in ``config/``: no config exists that breaks one. The
rules here also need the number of ranks, this machine, the run's folder, the data or a checkpoint.
A rule that is cheap to verify comes before one that reads more. The first broken rule raises an
``OlmoShardError``, and the rules after it are not verified.

Six parties verify the rules that concern them:

- ``check``: the command ``olmo-shard check``, on any machine.
- ``launcher``: ``olmo-shard train --nproc N`` before it starts the ranks, or ``train`` without a
  launcher, for its only rank.
- ``rank``: each rank, before it joins a process group. Its result is equal on all ranks.
- ``every rank``: all ranks together. If a rule is broken on one of them, all raise its error.
- ``host``: the first rank of each host, since hosts may have copies of the data.
- ``first rank``: rank 0 for all ranks, so that all see one state of the run's folder.

Three rules have other places on a rank: ``distributed.runtime`` verifies the machine before it
connects to its peers, ``parallelize`` chooses the dispatcher together with all ranks, and
``train.start`` compares the data of all ranks.
"""

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

from olmo_shard.config import Config
from olmo_shard.config.layout import check_expert_groups, check_expert_shards, check_global_batch
from olmo_shard.data.coverage import describe_data, describe_end
from olmo_shard.data.loader import DataLoader
from olmo_shard.data.scan import scan
from olmo_shard.data.source import open_sources
from olmo_shard.data.token_file import TokenFile
from olmo_shard.distributed.runtime import check_machine
from olmo_shard.errors import NothingLeftError
from olmo_shard.optim.parameter_groups import ParameterGroup
from olmo_shard.optim.schedule import check_schedule
from olmo_shard.train.checkpoint_folder import read_state
from olmo_shard.train.preflight import check_dispatch, kernels_of, parameter_groups
from olmo_shard.train.run_folder import check_writable, choose_checkpoint, nothing_left

Party = Literal["check", "launcher", "rank", "every rank", "host", "first rank"]

SCAN_LIMIT_BYTES = 4 * 2**30
"""Size of the data up to which ``train`` scans all ids before the first step, which takes seconds.
The ids of larger data are checked as they are read.
"""


class PlannedRun:
    """A run before its first step. What one rule has opened is kept for the rules after it.

    :param world_size: number of ranks of the run.
    :param scan_limit: size of the data, in bytes, up to which all ids are scanned; ``None`` means
        data of any size, and 0 none.
    :param ranks_on_host: number of ranks that share this host's memory; ``None`` means all ranks.
    """

    def __init__(
        self,
        config: Config,
        world_size: int,
        *,
        scan_limit: int | None = None,
        ranks_on_host: int | None = None,
    ) -> None:
        self.config, self.world_size, self.scan_limit = config, world_size, scan_limit
        self.ranks_on_host = ranks_on_host or world_size

    @cached_property
    def token_files(self) -> list[TokenFile]:
        """All training and validation files.

        :raises DataError: with the problems of all files in one message.
        """
        data = self.config.data
        named = data.named_sources() | data.named_validation()
        sources = open_sources(named, data, self.config.model.vocab_size)
        return [file for source in sources for file in source.files]

    @cached_property
    def parameter_groups(self) -> list[ParameterGroup]:
        """The parameter groups of the optimizer.

        :raises ConfigurationError: if a pattern of ``optim.groups`` matches no parameter.
        """
        return parameter_groups(self.config)

    @cached_property
    def dispatch(self) -> str:
        """How token rows will travel on this host, for the log.

        :raises ConfigurationError: if the transport that the config names cannot run here.
        """
        return check_dispatch(self.config, self.ranks_on_host)

    @cached_property
    def start(self) -> "StartPoint":
        """The position from which the run starts: its beginning, or that of a checkpoint.

        :raises CheckpointError: if a checkpoint is missing, or is of another model or other data.
        """
        config = self.config
        loader = DataLoader(
            config.data,
            config.train,
            vocab_size=config.model.vocab_size,
            seed=config.run.seed,
        )
        path = choose_checkpoint(Path(config.run.dir), config.checkpoint.resume, config.model)
        if path is not None:
            state = read_state(path)
            loader.load_state(state.loader)
            return StartPoint(path, state.train.step, loader)
        if config.checkpoint.init_from:
            read_state(Path(config.checkpoint.init_from))
        return StartPoint(None, 0, loader)


class StartPoint(NamedTuple):
    """Where a run starts."""

    checkpoint: Path | None
    """The checkpoint that the run resumes from; ``None`` for a new run."""
    step: int
    """Steps done at the checkpoint; 0 for a new run."""
    loader: DataLoader
    """A loader at the position of the checkpoint."""

    def problem(self) -> str | None:
        """Why there is no step to train; ``None`` if there is one."""
        if self.checkpoint is None:
            return None
        return nothing_left(self.checkpoint, self.step, self.loader)

    def describe(self) -> list[str]:
        """Lines for the log: the data, the data that are never trained on, and the run's end."""
        data = describe_data(self.loader, self.step)
        return [*data, f"end       {describe_end(self.loader, self.step)}"]


class Check(NamedTuple):
    """One rule."""

    rule: str
    """The rule, as a sentence."""
    verify: Callable[[PlannedRun], object]
    """Raises an ``OlmoShardError`` if the rule is broken."""
    parties: tuple[Party, ...]
    """The parties that verify the rule."""


def run_checks(run: PlannedRun, party: Party) -> None:
    """Verify the rules that concern a party, in order.

    :raises OlmoShardError: for the first broken rule.
    """
    for check in CHECKS:
        if party in check.parties:
            check.verify(run)


def _check_steps_left(run: PlannedRun) -> None:
    problem = run.start.problem()
    if problem is not None:
        raise NothingLeftError(problem)


def _check_schedule(run: PlannedRun) -> None:
    # The schedule of a run at its end has no effect any more, so ``check`` accepts it.
    if run.start.problem() is None:
        loader, step = run.start.loader, run.start.step
        check_schedule(loader.total_steps(step), run.config.schedule)


def _check_ids(run: PlannedRun) -> None:
    size = sum(file.path.stat().st_size for file in run.token_files)
    if run.scan_limit is None or size <= run.scan_limit:
        scan(run.token_files, run.config.model.vocab_size)


CHECKS = (
    Check(
        "This machine has the device and the CPU cores that the section run asks for.",
        lambda run: check_machine(run.config.run),
        ("launcher",),
    ),
    Check(
        "The ranks form whole expert-parallel groups.",
        lambda run: check_expert_groups(run.config.parallel.expert_parallel, run.world_size),
        ("check", "launcher", "rank"),
    ),
    Check(
        "The global batch is a whole number of micro-batches on every rank.",
        lambda run: check_global_batch(run.config.train, run.world_size),
        ("check", "launcher", "rank"),
    ),
    Check(
        "FSDP2 can shard the expert weights over their data-parallel ranks.",
        lambda run: check_expert_shards(run.config.parallel, run.config.model, run.world_size),
        ("check", "launcher", "rank"),
    ),
    Check(
        "The kernels that parallel.kernels names run on the device.",
        lambda run: kernels_of(run.config),
        ("check", "launcher", "every rank"),
    ),
    Check(
        "The run's folder exists and is writable, or can be created.",
        lambda run: check_writable(Path(run.config.run.dir)),
        ("check", "launcher", "every rank"),
    ),
    Check(
        "Every token file exists, has its declared type, and fits the model's vocabulary.",
        lambda run: run.token_files,
        ("check", "launcher", "every rank"),
    ),
    Check(
        "Every pattern of optim.groups matches a parameter of the model.",
        lambda run: run.parameter_groups,
        ("check", "launcher", "every rank"),
    ),
    Check(
        "The transport that parallel.dispatch names can run on this host.",
        lambda run: run.dispatch,
        ("check", "launcher"),
    ),
    Check(
        "The checkpoint to start from is complete, and is of this model and these data.",
        lambda run: run.start,
        ("check", "launcher", "first rank"),
    ),
    Check(
        "The run has a step left to train.",
        _check_steps_left,
        ("launcher", "first rank"),
    ),
    Check(
        "Warm-up and decay of the learning rate fit into the run.",
        _check_schedule,
        ("check", "launcher", "first rank"),
    ),
    Check(
        "Every id is below the vocabulary's size, and no file differs from its checksum.",
        _check_ids,
        ("check", "launcher", "host"),
    ),
)
"""All rules, in the order in which they are verified."""
