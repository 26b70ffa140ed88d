"""Rotary position embedding (Su et al., 2021), in the half-split layout of Llama and OLMo.

Shape letters: B sequences, S positions, H heads, d head width.
"""

import torch
from torch import Tensor


def rope_table(
    length: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles, each FP32 [length, head_dim / 2].

    :param length: number of positions, counted from 0.
    :param head_dim: width of a head; even.
    :param theta: base of the frequencies.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    # FP32 positions are exact up to 2^24; bf16 ones would be wrong from 257 on.
    positions = torch.arange(length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, theta**-exponents)
    return angles.cos(), angles.sin()


def apply_rope(x_BHSd: Tensor, cos_Sd: Tensor, sin_Sd: Tensor) -> Tensor:
    """Rotate the pairs (i, i + d/2) of each head in FP32; the result has the type of ``x``.

    :param cos_Sd: FP32 [S, d/2], as ``sin_Sd``, from ``rope_table``.
    """
    low, high = x_BHSd.float().chunk(2, dim=-1)
    rotated = torch.cat([low * cos_Sd - high * sin_Sd, high * cos_Sd + low * sin_Sd], dim=-1)
    return rotated.to(x_BHSd.dtype)
