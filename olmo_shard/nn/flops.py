"""Parameters and FLOPs of a model, counted on a model without storage."""

from olmo_shard.config import ModelConfig
from olmo_shard.nn.families import meta_model
from olmo_shard.nn.protocol import ParameterCounts


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Numbers of parameters over all ranks."""
    return meta_model(config).parameter_counts()


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Forward and backward FLOPs per token, without any recompute.

    :param sequence_length: in tokens.
    """
    return meta_model(config).flops_per_token(sequence_length)
