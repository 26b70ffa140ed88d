"""Cross-entropy of the output head, without holding all logits at any time.

Shape letters: T tokens, D model width, V vocabulary, C tokens of a chunk.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from olmo_shard.data.labels import IGNORE_INDEX


class HeadLosses(NamedTuple):
    """FP32 sums over the tokens with a label."""

    objective: Tensor
    """Cross-entropy plus weighted z-loss. It alone carries a gradient."""
    cross_entropy: Tensor
    """Sum of -log p(label)."""
    z_loss: Tensor
    """Sum of logsumexp(logits)^2, unweighted."""


def head_losses(
    h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, *, z_loss_weight: float, chunk_tokens: int
) -> HeadLosses:
    """Cross-entropy and z-loss (PaLM, arXiv 2204.02311) of the logits h w^T, in FP32.

    The forward computes the gradients, chunk by chunk. A backward that computed them would need
    all logits, or compute them twice. At most [C, V] FP32 logits exist at one time.

    :param h_TD: hidden states after the last norm, in compute precision.
    :param w_VD: weight of the output head.
    :param labels_T: int64, ``IGNORE_INDEX`` where a token has no label.
    :param z_loss_weight: factor of the z-loss in ``objective``.
    :param chunk_tokens: number of tokens per chunk, C.
    """
    losses = _HeadLosses.apply(h_TD, w_VD, labels_T, z_loss_weight, chunk_tokens)
    return HeadLosses(*losses)  # type: ignore[misc]


class _HeadLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, w_VD: Tensor, labels_T: Tensor, z_weight: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        needs_grad = any(ctx.needs_input_grad[:2])
        cross_entropy = torch.zeros((), dtype=torch.float32, device=h_TD.device)
        z_loss = torch.zeros_like(cross_entropy)
        dh_TD = torch.empty_like(h_TD) if needs_grad else None
        dw_VD = torch.zeros_like(w_VD, dtype=torch.float32) if needs_grad else None
        for start in range(0, len(h_TD), chunk_tokens):
            # Losses of the chunk. After this, logits_CV is needed only for its gradient.
            chunk = slice(start, start + chunk_tokens)
            logits_CV = (h_TD[chunk] @ w_VD.T).float()
            labels_C = labels_T[chunk]
            labelled_C = labels_C != IGNORE_INDEX
            target_C1 = labels_C.clamp(min=0)[:, None]
            lse_C = logits_CV.logsumexp(dim=1)
            nll_C = lse_C - logits_CV.gather(1, target_C1).squeeze(1)
            # ``where`` instead of a product: an infinite logit of a token without a label must not
            # make a NaN.
            cross_entropy += torch.where(labelled_C, nll_C, 0).sum()
            z_loss += torch.where(labelled_C, lse_C.square(), 0).sum()
            if dh_TD is None or dw_VD is None:
                continue
            # d objective / d logits = p (1 + 2 z lse) - onehot(label), in the memory of the logits.
            scale_C = 1 + 2 * z_weight * lse_C
            dlogits_CV = logits_CV.sub_(lse_C[:, None]).exp_().mul_(scale_C[:, None])
            dlogits_CV.masked_fill_(~labelled_C[:, None], 0)
            dlogits_CV.scatter_add_(1, target_C1, -labelled_C[:, None].float())
            dlogits_CV = dlogits_CV.to(h_TD.dtype)
            torch.mm(dlogits_CV, w_VD, out=dh_TD[chunk])
            # The fill keeps out the NaN of zero times an infinite hidden state.
            dw_VD += dlogits_CV.T @ h_TD[chunk].masked_fill(~labelled_C[:, None], 0)
        if dh_TD is not None and dw_VD is not None:
            ctx.save_for_backward(dh_TD, dw_VD)
            ctx.weight_dtype = w_VD.dtype
        ctx.mark_non_differentiable(cross_entropy, z_loss)
        return cross_entropy + z_weight * z_loss, cross_entropy, z_loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dh_TD, dw_VD = ctx.saved_tensors
        scale = grads[0]
        # The product is FP32. A scale rounded to bf16 would be wrong by up to 2^-8, with one factor
        # for all gradients of the model. The one remaining error is the second rounding of each
        # product, at most 2^-9.
        dh_TD = (dh_TD.float() * scale).to(dh_TD.dtype)
        return dh_TD, (dw_VD * scale).to(ctx.weight_dtype), None, None, None
