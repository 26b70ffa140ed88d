"""The whole config, and the rules that span its sections.

Rules that also need the number of ranks are in ``config/layout.py``.
"""

from pydantic import model_validator

from olmo_shard.config.data import DataConfig
from olmo_shard.config.layout import experts_problem
from olmo_shard.config.model import ModelConfig
from olmo_shard.config.optim import OptimConfig, ScheduleConfig
from olmo_shard.config.parallel import ParallelConfig
from olmo_shard.config.run import RunConfig
from olmo_shard.config.section import Section
from olmo_shard.config.train import CheckpointConfig, EvalConfig, TrackingConfig, TrainConfig


class Config(Section):
    """All sections of one run."""

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
        if self.model.moe is not None:
            num_experts = self.model.moe.num_experts
            if problem := experts_problem(self.parallel.expert_parallel, num_experts):
                raise ValueError(problem)
        return self

    def num_microbatches(self, world_size: int) -> int:
        """Return the number of micro-batches per accumulation window, which is equal on all ranks.

        :param world_size: number of ranks of the run.
        """
        return self.train.global_batch_tokens // (world_size * self.train.micro_batch_tokens)
