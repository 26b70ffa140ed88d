"""Grouped-query causal self-attention.

Shape letters: B sequences, S positions, H query heads, G key and value heads, d head width, D model
width.

[Note: another attention] An attention is a module class that is built from the model's config and
has the methods of ``Attention``: ``forward``, ``parameter_readers`` and ``flops_per_token``.
``ATTENTIONS`` in ``config/model.py`` lists its name and import path; the config fields that it
reads stand in the same file.
"""

from typing import NamedTuple

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from olmo_shard.config import ModelConfig
from olmo_shard.nn.norm import RMSNorm
from olmo_shard.nn.readers import ParameterReaders
from olmo_shard.nn.rope import apply_rope


class AttentionInputs(NamedTuple):
    """The tensors that all blocks of one forward share."""

    cos_Sd: Tensor
    """FP32 [S, d/2]."""
    sin_Sd: Tensor
    """FP32 [S, d/2]."""
    mask_B1SS: Tensor | None
    """Boolean, true where a query may see a key; ``None`` means plain causal."""


class Attention(nn.Module):
    """Attention with rotary embedding; with ``qk_norm``, queries and keys are normalised."""

    residual_outputs = ("wo.weight",)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.n_heads, config.head_width
        query_width = config.n_heads * self.head_dim
        kv_width = config.kv_heads * self.head_dim
        self.wq = nn.Linear(config.d_model, query_width, bias=False)
        self.wk = nn.Linear(config.d_model, kv_width, bias=False)
        self.wv = nn.Linear(config.d_model, kv_width, bias=False)
        self.wo = nn.Linear(query_width, config.d_model, bias=False)
        # ``full`` normalises all heads of a token at once (OLMo 2), ``head`` each head (Qwen 3).
        self.norm_over_heads = config.qk_norm == "full"
        self.q_norm = self.k_norm = None
        if config.qk_norm != "none":
            full = self.norm_over_heads
            self.q_norm = RMSNorm(query_width if full else self.head_dim, config.norm_eps)
            self.k_norm = RMSNorm(kv_width if full else self.head_dim, config.norm_eps)

    def forward(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        """The output of the attention, [B, S, D], before it is added to the residual stream."""
        q_BHSd = self._heads(self.wq(x_BSD), self.q_norm)
        k_BGSd = self._heads(self.wk(x_BSD), self.k_norm)
        v_BGSd = self._heads(self.wv(x_BSD), None)
        out_BHSd = F.scaled_dot_product_attention(
            apply_rope(q_BHSd, inputs.cos_Sd, inputs.sin_Sd),
            apply_rope(k_BGSd, inputs.cos_Sd, inputs.sin_Sd),
            v_BGSd,
            attn_mask=inputs.mask_B1SS,
            # A mask is causal itself. Without one the kernel masks, and no [S, S] tensor exists.
            is_causal=inputs.mask_B1SS is None,
            enable_gqa=q_BHSd.shape[1] != k_BGSd.shape[1],
        )
        return self.wo(rearrange(out_BHSd, "b h s d -> b s (h d)"))

    def parameter_readers(self) -> ParameterReaders:
        """The attention waits for all its weights."""
        return [(self, self.parameters())]

    def flops_per_token(self, sequence_length: int) -> int:
        """Forward and backward FLOPs per token of the products between positions.

        6 x S x heads x head_dim: a causal attention computes half of the S x S products (PaLM,
        arXiv 2204.02311, appendix B, with the causal half).
        """
        return 6 * sequence_length * self.num_heads * self.head_dim

    def _heads(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """Split [B, S, heads x d] into [B, heads, S, d], with RMSNorm before or after the split."""
        if norm is not None and self.norm_over_heads:
            x = norm(x)
        x = rearrange(x, "b s (h d) -> b h s d", d=self.head_dim)
        if norm is not None and not self.norm_over_heads:
            x = norm(x)
        return x
