"""Parameters and FLOPs by formula, and peak rates of devices, for MFU."""

import re
from typing import NamedTuple

from olmo_shard.config import ModelConfig

_PEAK_FLOPS = {
    r"\bH100 .*HBM3\b": 989e12,
    r"\bH200$": 989e12,
    r"\bA100\b": 312e12,
    r"\bB200$": 2250e12,
}
"""Dense bf16 FLOP/s by a pattern of the device's name, as the vendor states them. Slower variants
of a chip (PCIe, NVL) are not in the table."""


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


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device; null if unknown: no MFU rather than a wrong one."""
    found = (peak for name, peak in _PEAK_FLOPS.items() if re.search(name, device_name))
    return next(found, None)
