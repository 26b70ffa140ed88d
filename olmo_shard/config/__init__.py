"""The config: pydantic models that do not import torch. Every field states its meaning and unit."""

from olmo_shard.config.data import DataConfig, DataSource
from olmo_shard.config.loading import dump_yaml, load_config
from olmo_shard.config.model import ModelConfig, MoEConfig, RouterConfig
from olmo_shard.config.optim import OptimConfig, ScheduleConfig
from olmo_shard.config.parallel import DDPConfig, FSDPConfig, ParallelConfig
from olmo_shard.config.root import Config
from olmo_shard.config.run import RunConfig
from olmo_shard.config.section import flatten
from olmo_shard.config.train import (
    CheckpointConfig,
    EvalConfig,
    SpikeConfig,
    TrackingConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "DDPConfig",
    "DataConfig",
    "DataSource",
    "EvalConfig",
    "FSDPConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "RouterConfig",
    "RunConfig",
    "ScheduleConfig",
    "SpikeConfig",
    "TrackingConfig",
    "TrainConfig",
    "dump_yaml",
    "flatten",
    "load_config",
]
