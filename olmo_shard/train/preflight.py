"""Everything about a run that can be known without training."""

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from olmo_shard.config import Config
from olmo_shard.data.coverage import describe_data, describe_end
from olmo_shard.data.loader import DataLoader
from olmo_shard.data.source import open_sources
from olmo_shard.data.token_file import TokenFile
from olmo_shard.errors import DataError
from olmo_shard.kernels.backend import Backend, choose_backend
from olmo_shard.nn.transformer import Transformer
from olmo_shard.optim.parameter_groups import describe_groups, group_parameters
from olmo_shard.optim.schedule import check_schedule
from olmo_shard.parallel.dispatchers import describe_dispatcher
from olmo_shard.parallel.transport_candidate import DispatchRequest
from olmo_shard.train.checkpoint_folder import read_state
from olmo_shard.train.run_folder import check_something_left, check_writable, choose_checkpoint

SCAN_LIMIT_BYTES = 4 * 2**30
"""``train`` scans this much data before it starts; of more, ids are checked as they are read."""


def preflight(config: Config, world_size: int) -> list[TokenFile]:
    """Layout, batch, run folder and data files; reads 64 KiB of each file, writes nothing.

    :returns: all token files of the run.
    :raises OlmoShardError: for the first part that is wrong.
    """
    config.check_world(world_size)
    kernels_of(config)
    check_writable(config)
    named = config.data.named_sources() | config.data.named_validation()
    sources = open_sources(named, config.data, config.model.vocab_size)
    return [file for source in sources for file in source.files]


def check_start(config: Config) -> list[str]:
    """Whether the run can begin, or go on, from where it is told to, to an end that fits.

    :returns: lines for the log: the data, what is never trained on, and the end of the run.
    :raises OlmoShardError: where a checkpoint is missing, or is of another model or other data, the
        schedule does not fit into the run, or nothing is left to train.
    """
    loader, step = DataLoader(config), 0
    path = choose_checkpoint(config)
    if path is not None:
        state = read_state(path)
        loader.load_state(state.loader)
        step = state.train.step
        check_something_left(path, step, loader)
    elif config.checkpoint.init_from:
        read_state(Path(config.checkpoint.init_from))
    check_schedule(loader.total_steps(step), config.schedule)
    end = f"end       {describe_end(loader, step)}"
    return [*describe_data(loader, step), *check_parameter_groups(config), end]


def check_parameter_groups(config: Config) -> list[str]:
    """Check ``optim.groups`` against the names of the model's parameters.

    :returns: one line per parameter group for the log.
    :raises ConfigurationError: if a pattern matches no parameter, or a group gets none.
    """
    with torch.device("meta"):
        model = Transformer(config.model)
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return describe_groups(group_parameters(sizes, config.optim))


def check_dispatch(config: Config, num_ranks: int) -> str:
    """How token rows would travel on this host.

    :param num_ranks: ranks that share its memory; the ranks of one expert-parallel group at least.
    :raises ConfigurationError: if the transport that the config names cannot run here.
    """
    moe = config.model.moe
    if moe is None:
        return "none: no experts"
    request = DispatchRequest(
        parallel=config.parallel,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        width=config.model.d_model,
        max_tokens=config.train.micro_batch_tokens,
        device_type=device_type(config),
        backend=kernels_of(config),
    )
    return describe_dispatcher(request, num_ranks)


def device_type(config: Config) -> str:
    """Of the run on this machine."""
    if config.run.device != "auto":
        return config.run.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def kernels_of(config: Config) -> Backend:
    """What ``parallel.kernels`` comes to on this machine.

    :raises ConfigurationError: where it cannot run here.
    """
    return choose_backend(config.parallel.kernels, device_type(config))


def scan(files: list[TokenFile], vocab_size: int) -> None:
    """Read every id and checksum.

    :raises DataError: naming each file with an id outside the vocabulary, of a wrong type, or
        changed since it was written.
    """
    console = Console(stderr=True)
    unique = list(dict.fromkeys(files))
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("scan ids", total=sum(file.num_tokens() for file in unique))
        found = [
            file.id_problem(vocab_size, lambda count: progress.advance(task, count))
            for file in unique
        ]
    problems = [problem for problem in found if problem]
    if problems:
        raise DataError("\n  ".join(["these data cannot be used:", *problems]))


def scan_before_training(files: list[TokenFile], vocab_size: int) -> None:
    """The scan, where it takes seconds rather than hours."""
    if sum(file.path.stat().st_size for file in files) <= SCAN_LIMIT_BYTES:
        scan(files, vocab_size)
