"""The router: which experts a token visits, with what weights, and the losses that balance them.

Shape letters: T tokens, E experts, K top-k, B sequences.

[Note: balance] The load-balancing loss of a layer is the Switch form E x sum_e f_e P_e: f_e is the
fraction of routes (T x K of them, so f sums to 1) that expert e got, P_e the mean probability. At
perfect balance it is 1.0, whatever E and K. It is not linear in the batch, so its scope is part of
its definition:

- ``global``: f from the whole global batch of the step before. Linear in the tokens at hand, hence
  the same for every micro-batch size, number of ranks and EP degree. At step 1, f = 1/E: no
  gradient.
- ``sequence``: f and P within each sequence.
- ``micro_batch``: f and P within the micro-batch. It depends on how the batch is split.

Only tokens with a label count, in losses and loads. All losses are sums over tokens: the caller
divides by the tokens of the whole accumulation window, as it does the cross-entropy.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from olmo_shard.config import ModelConfig
from olmo_shard.nn.recompute import decide_once


class Routing(NamedTuple):
    """The decision of one layer."""

    topk_idx_TK: Tensor
    """int64, distinct experts of each token, best first; ties go to the lowest id."""
    topk_weights_TK: Tensor
    """FP32."""
    logits_TE: Tensor
    """FP32."""


class RouterStats(NamedTuple):
    """Sums over the tokens with a label."""

    lb_loss: Tensor
    """Scalar: load-balancing loss x tokens, unweighted."""
    z_loss: Tensor
    """Scalar: sum of logsumexp(logits)^2, unweighted."""
    counts_E: Tensor
    """FP32 [E]: routes to each expert; no gradient."""


class Router(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.config = config.moe.router
        self.num_experts, self.top_k = config.moe.num_experts, config.moe.top_k
        self.gate = nn.Linear(config.d_model, self.num_experts, bias=False)
        self.expert_bias: Tensor
        self.lagged_counts: Tensor
        self.register_buffer("expert_bias", torch.empty(self.num_experts, dtype=torch.float32))
        # Routes of the whole global batch of the step before (scope ``global``).
        self.register_buffer("lagged_counts", torch.empty(self.num_experts, dtype=torch.float32))

    def reset_buffers(self) -> None:
        self.expert_bias.zero_()
        self.lagged_counts.zero_()

    def forward(self, x_BSD: Tensor) -> Routing:
        """Route every token. Selection sees the bias; the weights do not.

        :param x_BSD: hidden states in compute precision.
        """
        logits_TE = F.linear(x_BSD.flatten(0, 1).float(), self.gate.weight.float())
        after = self.config.score_order == "after_topk"
        scores_TE = logits_TE if after else self._score(logits_TE)
        selection_TE = scores_TE.detach() + self.expert_bias

        def choose() -> Tensor:
            # Stable: ties go to the lowest id on every device, and a NaN still gives distinct ids.
            order_TE = torch.sort(selection_TE, dim=-1, descending=True, stable=True).indices
            return order_TE[:, : self.top_k].contiguous()

        topk_idx_TK = decide_once(choose)
        weights_TK = scores_TE.gather(1, topk_idx_TK)
        if after:
            weights_TK = self._score(weights_TK)
        if self.config.normalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp(min=1e-20)
        return Routing(topk_idx_TK, weights_TK * self.config.scale, logits_TE)

    def _score(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1) if self.config.scoring == "softmax" else logits.sigmoid()

    def stats(self, routing: Routing, labelled_BS: Tensor) -> RouterStats:
        """Losses and loads.

        :param labelled_BS: boolean, tokens that have a label.
        """
        topk_idx_TK, _, logits_TE = routing
        labelled_T = labelled_BS.flatten()
        # where, not a product: a NaN of a token without a label must not reach the loss.
        z_loss = torch.where(labelled_T, logits_TE.logsumexp(dim=-1).square(), 0).sum()
        counts_E = self._counts(topk_idx_TK, labelled_BS, groups=1)[0]
        if self.config.lb_loss_weight == 0:
            return RouterStats(torch.zeros_like(z_loss), z_loss, counts_E)
        probs_TE = self._score(logits_TE)
        probs_TE = probs_TE / probs_TE.sum(dim=-1, keepdim=True).clamp(min=1e-20)
        probs_TE = torch.where(labelled_T[:, None], probs_TE, 0)
        lb_loss = self._load_balancing_loss(probs_TE, topk_idx_TK, labelled_BS)
        return RouterStats(lb_loss, z_loss, counts_E)

    def _counts(self, topk_idx_TK: Tensor, labelled_BS: Tensor, groups: int) -> Tensor:
        """Routes of tokens with a label to each expert, FP32 [groups, E]: counted, not one-hot."""
        labelled_TK = labelled_BS.reshape(-1, 1).expand_as(topk_idx_TK)
        counts_GE = torch.zeros(groups, self.num_experts, device=topk_idx_TK.device)
        routes_GR = topk_idx_TK.reshape(groups, -1)
        return counts_GE.scatter_add_(1, routes_GR, labelled_TK.reshape(groups, -1).float())

    def _load_balancing_loss(
        self, probs_TE: Tensor, topk_idx_TK: Tensor, labelled_BS: Tensor
    ) -> Tensor:
        """See [Note: balance]. Probabilities are zero where a token has no label."""
        scope = self.config.lb_loss_scope
        if scope == "global":
            total = self.lagged_counts.sum()
            even = torch.full_like(self.lagged_counts, 1 / self.num_experts)
            f_E = torch.where(total > 0, self.lagged_counts / total.clamp(min=1), even)
            return self.num_experts * (probs_TE.sum(dim=0) * f_E).sum()
        groups = len(labelled_BS) if scope == "sequence" else 1
        probs_GE = rearrange(probs_TE, "(g t) e -> g t e", g=groups).sum(dim=1)
        counts_GE = self._counts(topk_idx_TK, labelled_BS, groups)
        f_GE = counts_GE / counts_GE.sum(dim=-1, keepdim=True).clamp(min=1)
        return self.num_experts * (probs_GE * f_GE).sum()


@torch.no_grad()
def update_after_step(routers: list[Router], counts_LE: Tensor, applied: Tensor) -> None:
    """Loss-free balancing (Wang et al., 2024, arXiv 2408.15664) and the lagged counts.

    The bias moves by ``bias_gamma`` towards the mean load, then its mean is taken off. The bias is
    equal on every rank, since the counts are. Nothing moves in a skipped step, and a bias with
    ``bias_gamma: 0`` keeps every bit: a user may have set that bias by hand.

    :param counts_LE: [layers, E] routes of the whole global batch.
    :param applied: boolean scalar, false if the step was skipped.
    """
    for router, counts_E in zip(routers, counts_LE.float(), strict=True):
        router.lagged_counts.copy_(torch.where(applied, counts_E, router.lagged_counts))
        if router.config.bias_gamma:
            error_E = counts_E.mean() - counts_E
            moved_E = router.expert_bias + router.config.bias_gamma * error_E.sign()
            moved_E -= moved_E.mean()
            router.expert_bias.copy_(torch.where(applied, moved_E, router.expert_bias))
