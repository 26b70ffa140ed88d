"""Grouped-query causal self-attention.

Shape letters: B sequences, S positions, H query heads, G key and value heads, d head width, D model
width.
"""

from typing import NamedTuple

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from olmo_shard.config import ModelConfig
from olmo_shard.nn.norm import RMSNorm
from olmo_shard.nn.rope import apply_rope


class AttentionInputs(NamedTuple):
    """What all blocks share in one forward."""

    cos_Sd: Tensor
    sin_Sd: Tensor
    mask_B1SS: Tensor | None
    """Boolean, true where a query may see a key; null means plain causal."""


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_width
        query_width = config.n_heads * self.head_dim
        kv_width = config.kv_heads * self.head_dim
        self.wq = nn.Linear(config.d_model, query_width, bias=False)
        self.wk = nn.Linear(config.d_model, kv_width, bias=False)
        self.wv = nn.Linear(config.d_model, kv_width, bias=False)
        self.wo = nn.Linear(query_width, config.d_model, bias=False)
        self.norm_over_heads = config.qk_norm == "full"
        self.q_norm = self.k_norm = None
        if config.qk_norm != "none":
            full = self.norm_over_heads
            self.q_norm = RMSNorm(query_width if full else self.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(kv_width if full else self.head_dim, config.norm_eps)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        q_BHSd = self._heads(self.wq(x_BSD), self.q_norm)
        k_BGSd = self._heads(self.wk(x_BSD), self.k_norm)
        v_BGSd = self._heads(self.wv(x_BSD), None)
        out_BHSd = F.scaled_dot_product_attention(
            apply_rope(q_BHSd, inputs.cos_Sd, inputs.sin_Sd),
            apply_rope(k_BGSd, inputs.cos_Sd, inputs.sin_Sd),
            v_BGSd,
            attn_mask=inputs.mask_B1SS,
            is_causal=inputs.mask_B1SS is None,
            enable_gqa=q_BHSd.shape[1] != k_BGSd.shape[1],
        )
        return self.wo(rearrange(out_BHSd, "b h s d -> b s (h d)"))

    def _heads(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        if norm is not None and self.norm_over_heads:
            x = norm(x)
        x = rearrange(x, "b s (h d) -> b h s d", d=self.head_dim)
        if norm is not None and not self.norm_over_heads:
            x = norm(x)
        return x
