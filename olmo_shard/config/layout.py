"""Rules of the layout: numbers that must divide each other.

Each rule is here once. The validators of the config, the checks before a run and the functions of
the library that need the rule call it.
"""

from olmo_shard.config.model import ModelConfig
from olmo_shard.config.parallel import ParallelConfig
from olmo_shard.config.train import TrainConfig
from olmo_shard.errors import ConfigurationError


def experts_problem(expert_parallel: int, num_experts: int) -> str | None:
    """Describe why a layer's experts cannot be divided evenly over a group; ``None`` if they can.

    :param expert_parallel: number of ranks per expert-parallel group.
    :param num_experts: number of routed experts per layer.
    """
    if num_experts % expert_parallel == 0:
        return None
    return (
        f"parallel.expert_parallel = {expert_parallel} does not divide model.moe.num_experts = "
        f"{num_experts}"
    )


def check_expert_groups(expert_parallel: int, world_size: int) -> None:
    """Check that the ranks form whole expert-parallel groups.

    :param expert_parallel: number of ranks per group.
    :param world_size: number of ranks of the run.
    :raises ConfigurationError: if the group size does not divide the number of ranks.
    """
    if world_size % expert_parallel:
        raise ConfigurationError(
            f"parallel.expert_parallel = {expert_parallel} does not divide the {world_size} "
            f"rank(s) of this run; start a multiple of {expert_parallel} ranks (--nproc "
            f"{expert_parallel}) or change expert_parallel"
        )


def check_global_batch(train: TrainConfig, world_size: int) -> None:
    """Check that all ranks compute the same number of whole micro-batches per step.

    :param world_size: number of ranks of the run.
    :raises ConfigurationError: with the arithmetic that fails.
    """
    micro, batch = train.micro_batch_tokens, train.global_batch_tokens
    if batch % (world_size * micro):
        raise ConfigurationError(
            f"train.global_batch_tokens = {batch} is not a multiple of ranks x "
            f"train.micro_batch_tokens = {world_size} x {micro} = {world_size * micro} "
            f"(remainder {batch % (world_size * micro)})"
        )


def check_expert_shards(parallel: ParallelConfig, model: ModelConfig, world_size: int) -> None:
    """Check that FSDP2 can shard the expert weights over their data-parallel ranks.

    FSDP2 shards expert weights by expert. If that would leave a rank without experts, it shards
    their dimension 1, which the number of ranks must then divide.

    :param world_size: number of ranks of the run; a multiple of ``expert_parallel``.
    :raises ConfigurationError: if the number of ranks does not divide a dimension to be sharded.
    """
    if parallel.mode != "fsdp" or model.moe is None:
        return
    # The ranks that hold the same experts share them: one shard per rank.
    ep_dp = world_size // parallel.expert_parallel
    num_local_experts = model.moe.num_experts // parallel.expert_parallel
    if leaves_no_rank_empty(num_local_experts, ep_dp):
        return
    widths = {"2 x moe.hidden": 2 * model.moe.hidden, "d_model": model.d_model}
    for name, width in widths.items():
        if width % ep_dp:
            raise ConfigurationError(
                f"parallel.mode = fsdp shards {num_local_experts} local expert(s) over {ep_dp} "
                f"ranks along {name} = {width}, which {ep_dp} does not divide; change "
                "expert_parallel"
            )


def leaves_no_rank_empty(length: int, ranks: int) -> bool:
    """Return whether shards of ceil(length / ranks) items reach every rank.

    8 items on 4 ranks are 2 + 2 + 2 + 2. 5 items on 4 ranks are 2 + 2 + 1 and leave rank 3 empty.
    """
    shard = -(-length // ranks)
    return -(-length // shard) == ranks
