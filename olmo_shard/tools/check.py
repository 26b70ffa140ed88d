"""What ``olmo-shard check`` does: validate a run without training, and resolve its config."""

from olmo_shard.config import Config, dump_yaml
from olmo_shard.errors import NothingLeftError
from olmo_shard.nn.flops import parameter_counts
from olmo_shard.train.preflight import (
    check_dispatch,
    check_start,
    kernels_of,
    preflight,
    scan,
)
from olmo_shard.train.run_folder import describe_saves


def check(config: Config, nproc: int | None) -> str:
    """Check everything, every id included.

    :param nproc: ranks of the run; null takes the fewest that the config can run on.
    :returns: the resolved config in YAML, with what it comes to as comments.
    :raises OlmoShardError: for the first part that is wrong.
    """
    world_size = nproc or config.parallel.expert_parallel
    scan(preflight(config, world_size), config.model.vocab_size)
    dispatch = check_dispatch(config, config.parallel.expert_parallel)
    counts = parameter_counts(config.model)
    saves = "\n".join(f"# {line}" for line in describe_saves(config))
    try:
        start = "\n# ".join([*check_start(config), "ready to train"])
    except NothingLeftError as error:  # no fault of the config
        start = str(error)
    return (
        f"{dump_yaml(config)}\n"
        f"# {counts.total:,} parameters, {counts.active:,} active per token\n"
        f"# valid for {world_size} rank(s), {config.num_microbatches(world_size)} micro-batch(es)\n"
        f"# kernels {kernels_of(config)}\n"
        f"# dispatch {dispatch}\n"
        f"{saves}\n"
        f"# {start}"
    )
