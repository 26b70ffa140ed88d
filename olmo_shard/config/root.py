"""The whole config, and the rules that span sections or need the number of ranks."""

from pydantic import model_validator

from olmo_shard.config.base import Section
from olmo_shard.config.data import DataConfig
from olmo_shard.config.model import ModelConfig
from olmo_shard.config.optim import OptimConfig, ScheduleConfig
from olmo_shard.config.parallel import ParallelConfig
from olmo_shard.config.run import RunConfig
from olmo_shard.config.train import CheckpointConfig, EvalConfig, TrackingConfig, TrainConfig
from olmo_shard.errors import ConfigurationError


class Config(Section):
    run: RunConfig = RunConfig()
    data: DataConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    train: TrainConfig
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _sections_fit(self) -> "Config":
        if self.train.micro_batch_tokens % self.data.sequence_length:
            raise ValueError(
                f"train.micro_batch_tokens = {self.train.micro_batch_tokens} is not a multiple of "
                f"data.sequence_length = {self.data.sequence_length}"
            )
        if self.eval.every and not self.data.validation:
            raise ValueError(
                f"eval.every = {self.eval.every}, but data.validation names no validation set"
            )
        if self.model.moe is None and self.parallel.expert_parallel > 1:
            raise ValueError(
                f"parallel.expert_parallel = {self.parallel.expert_parallel}, but the model has no "
                "moe section; use expert_parallel 1"
            )
        if self.model.moe and self.model.moe.num_experts % self.parallel.expert_parallel:
            raise ValueError(
                f"parallel.expert_parallel = {self.parallel.expert_parallel} does not divide "
                f"model.moe.num_experts = {self.model.moe.num_experts}"
            )
        return self

    def check_world(self, world_size: int) -> None:
        """Rules that need the number of ranks.

        :param world_size: ranks of the run.
        :raises ConfigurationError: with the arithmetic that fails.
        """
        ep = self.parallel.expert_parallel
        if world_size % ep:
            raise ConfigurationError(
                f"parallel.expert_parallel = {ep} does not divide the {world_size} rank(s) of this "
                f"run; start a multiple of {ep} ranks (--nproc {ep}) or change expert_parallel"
            )
        self._check_batch(world_size)
        if self.parallel.mode == "fsdp" and self.model.moe:
            self._check_expert_shards(world_size // ep)

    def num_microbatches(self, world_size: int) -> int:
        """Micro-batches of one rank's accumulation window."""
        return self.train.global_batch_tokens // (world_size * self.train.micro_batch_tokens)

    def _check_batch(self, world_size: int) -> None:
        micro, batch = self.train.micro_batch_tokens, self.train.global_batch_tokens
        if batch % (world_size * micro):
            raise ConfigurationError(
                f"train.global_batch_tokens = {batch} is not a multiple of ranks x "
                f"train.micro_batch_tokens = {world_size} x {micro} = {world_size * micro} "
                f"(remainder {batch % (world_size * micro)})"
            )

    def _check_expert_shards(self, ep_dp: int) -> None:
        """FSDP2 cuts dimension 1 of expert weights where the experts do not fill all ranks."""
        assert self.model.moe is not None
        local = self.model.moe.num_experts // self.parallel.expert_parallel
        if fills_all(local, ep_dp):
            return
        widths = {"2 x moe.hidden": 2 * self.model.moe.hidden, "d_model": self.model.d_model}
        for name, width in widths.items():
            if width % ep_dp:
                raise ConfigurationError(
                    f"parallel.mode = fsdp shards {local} local expert(s) over {ep_dp} ranks along "
                    f"{name} = {width}, which {ep_dp} does not divide; change expert_parallel"
                )


def fills_all(length: int, ranks: int) -> bool:
    """Whether runs of ceil(length / ranks) items, the last one shorter, leave no rank empty."""
    run = -(-length // ranks)
    return -(-length // run) == ranks
