"""Parameters and FLOPs of a model by formula."""

from typing import NamedTuple

from olmo_shard.config import ModelConfig


class ParameterCounts(NamedTuple):
    total: int
    active: int
    """Parameters that one token uses: top_k routed experts of a layer instead of all."""


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Count parameters from the shape alone (a test compares with a model on the meta device)."""
    width, head = config.d_model, config.head_width
    queries, keys = config.n_heads * head, config.kv_heads * head
    attention = 2 * width * queries + 2 * width * keys
    qk_norm = {"none": 0, "head": 2 * head, "full": queries + keys}[config.qk_norm]
    embeddings = config.vocab_size * width * (1 if config.tie_embeddings else 2)
    total = active = embeddings + width
    for index in range(config.n_layers):
        dense = attention + qk_norm + 2 * width
        routed = visited = 0
        if config.is_moe_layer(index):
            moe = config.moe
            assert moe is not None
            expert = 3 * width * moe.hidden
            dense += width * moe.num_experts + moe.num_shared_experts * expert
            routed, visited = moe.num_experts * expert, moe.top_k * expert
        else:
            assert config.ffn_hidden is not None
            dense += 3 * width * config.ffn_hidden
        total += dense + routed
        active += dense + visited
    return ParameterCounts(total, active)


def flops_per_token(config: ModelConfig, sequence_length: int) -> float:
    """Forward and backward FLOPs of a token, without any recompute.

    6 for each active parameter that multiplies (the embedding table does not, the head does), and 6
    x layers x S x heads x head_dim for causal attention, which computes half of the S x S products.
    (PaLM's appendix B, arXiv 2204.02311, with the causal half.)
    """
    active = parameter_counts(config).active
    multiplying = active - (0 if config.tie_embeddings else config.vocab_size * config.d_model)
    attention = config.n_layers * sequence_length * config.n_heads * config.head_width
    return 6 * multiplying + 6 * attention
