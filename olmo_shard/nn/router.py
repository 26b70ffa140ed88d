"""The router: the experts that a token visits, their weights, and the losses that balance them.

Shape letters: B sequences, S positions, T = B x S tokens, D model width, E experts, K top-k, L MoE
layers, U groups of tokens that are balanced separately.

[Note: balance] The load-balancing loss of a layer is the Switch form E x sum_e f_e P_e. f_e is the
fraction of the T x K routes that expert e got, so f sums to 1. P_e is the mean probability of
expert e. At perfect balance the loss is 1.0 for every E and K. The loss is not linear in the batch,
so its scope is part of its definition:

- ``global``: f comes from the whole global batch of the previous step. The loss is then linear in
  the tokens of this step, so it is equal for every micro-batch size, number of ranks and EP degree.
  At step 1, f = 1/E, and the loss has no gradient.
- ``sequence``: f and P are computed within each sequence.
- ``micro_batch``: f and P are computed within the micro-batch, so the loss depends on how the batch
  is split.

Losses and loads count only tokens with a label. All losses are sums over tokens. The caller divides
them, like the cross-entropy, by the number of labelled tokens in the whole accumulation window.

[Note: another scoring] A scoring is one branch of ``_score`` and one name in ``RouterConfig``. The
balancing loss calls ``_score`` as well, and divides by the sum over the experts, so a scoring need
not sum to 1; it must not be negative.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from olmo_shard.config import ModelConfig
from olmo_shard.nn.layer_stats import LayerStats
from olmo_shard.nn.readers import ParameterReaders
from olmo_shard.nn.recompute import decide_once


class Routing(NamedTuple):
    """The routing decision of one layer."""

    topk_idx_TK: Tensor
    """int64: the distinct experts of each token, best first. Ties go to the lowest id."""
    topk_weights_TK: Tensor
    """FP32 weights of these experts' outputs."""
    logits_TE: Tensor
    """FP32 logits of all experts."""


class Router(nn.Module):
    """A linear gate, a scoring of its logits, and the choice of the top k experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.moe is not None
        self.config = config.moe.router
        self.num_experts, self.top_k = config.moe.num_experts, config.moe.top_k
        self.gate = nn.Linear(config.d_model, self.num_experts, bias=False)
        self.expert_bias: Tensor
        self.lagged_counts: Tensor
        self.register_buffer("expert_bias", torch.empty(self.num_experts, dtype=torch.float32))
        # Routes to each expert in the global batch of the previous step, for scope ``global``.
        self.register_buffer("lagged_counts", torch.empty(self.num_experts, dtype=torch.float32))

    def reset_buffers(self) -> None:
        """Set bias and lagged counts to zero."""
        self.expert_bias.zero_()
        self.lagged_counts.zero_()

    def forward(self, x_BSD: Tensor) -> Routing:
        """Route every token.

        :param x_BSD: hidden states in compute precision.
        """
        # Logits are FP32, also in bf16 runs: rounded logits would tie.
        logits_TE = F.linear(x_BSD.flatten(0, 1).float(), self.gate.weight.float())
        after = self.config.score_order == "after_topk"
        scores_TE = logits_TE if after else self._score(logits_TE)
        # The bias enters the choice of the experts, and not their weights.
        selection_TE = scores_TE.detach() + self.expert_bias

        def choose() -> Tensor:
            # In a stable sort ties go to the lowest id on every device. A full sort, unlike topk,
            # gives distinct ids for NaN, too.
            order_TE = torch.sort(selection_TE, dim=-1, descending=True, stable=True).indices
            return order_TE[:, : self.top_k].contiguous()

        topk_idx_TK = decide_once(choose)
        weights_TK = scores_TE.gather(1, topk_idx_TK)
        # ``after_topk`` scores the chosen logits alone, so a softmax sums to 1 over them.
        if after:
            weights_TK = self._score(weights_TK)
        if self.config.normalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True).clamp(min=1e-20)
        return Routing(topk_idx_TK, weights_TK * self.config.scale, logits_TE)

    def parameter_readers(self) -> ParameterReaders:
        """The router reads the gate's weight without calling the gate."""
        return [(self, self.parameters())]

    def _score(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1) if self.config.scoring == "softmax" else logits.sigmoid()

    def stats(self, routing: Routing, labelled_BS: Tensor) -> LayerStats:
        """Statistics of the layer's routing, summed over the tokens with a label.

        - ``lb_loss``: scalar, load-balancing loss x tokens, unweighted; zero if its weight is zero
        - ``router_z_loss``: scalar, sum of logsumexp(logits)^2, unweighted
        - ``counts_E``: FP32, routes to each expert, without gradient

        :param labelled_BS: boolean: tokens that have a label.
        """
        topk_idx_TK, _, logits_TE = routing
        labelled_T = labelled_BS.flatten()
        # ``where`` instead of a product: a NaN of a token without a label must not reach the loss.
        z_loss = torch.where(labelled_T, logits_TE.logsumexp(dim=-1).square(), 0).sum()
        counts_E = self._counts(topk_idx_TK, labelled_BS, groups=1)[0]
        lb_loss = torch.zeros_like(z_loss)
        if self.config.lb_loss_weight:
            probs_TE = self._score(logits_TE)
            probs_TE = probs_TE / probs_TE.sum(dim=-1, keepdim=True).clamp(min=1e-20)
            probs_TE = torch.where(labelled_T[:, None], probs_TE, 0)
            lb_loss = self._load_balancing_loss(probs_TE, topk_idx_TK, labelled_BS)
        return {"lb_loss": lb_loss, "router_z_loss": z_loss, "counts_E": counts_E}

    def _counts(self, topk_idx_TK: Tensor, labelled_BS: Tensor, groups: int) -> Tensor:
        """Routes of tokens with a label to each expert, FP32 [U, E]; no one-hot tensor is made."""
        labelled_TK = labelled_BS.reshape(-1, 1).expand_as(topk_idx_TK)
        counts_UE = torch.zeros(groups, self.num_experts, device=topk_idx_TK.device)
        experts = topk_idx_TK.reshape(groups, -1)
        return counts_UE.scatter_add_(1, experts, labelled_TK.reshape(groups, -1).float())

    def _load_balancing_loss(
        self, probs_TE: Tensor, topk_idx_TK: Tensor, labelled_BS: Tensor
    ) -> Tensor:
        """Load-balancing loss x tokens; see [Note: balance].

        :param probs_TE: FP32 probabilities, zero for tokens without a label.
        """
        scope = self.config.lb_loss_scope
        if scope == "global":
            # No step has run yet if the total is zero. ``where`` decides on the device.
            total = self.lagged_counts.sum()
            even = torch.full_like(self.lagged_counts, 1 / self.num_experts)
            f_E = torch.where(total > 0, self.lagged_counts / total.clamp(min=1), even)
            return self.num_experts * (probs_TE.sum(dim=0) * f_E).sum()
        # Both scopes below count f within groups: each sequence, or the whole micro-batch.
        groups = len(labelled_BS) if scope == "sequence" else 1
        probs_UE = rearrange(probs_TE, "(u t) e -> u t e", u=groups).sum(dim=1)
        counts_UE = self._counts(topk_idx_TK, labelled_BS, groups)
        f_UE = counts_UE / counts_UE.sum(dim=-1, keepdim=True).clamp(min=1)
        return self.num_experts * (probs_UE * f_UE).sum()


@torch.no_grad()
def update_after_step(routers: list[Router], counts_LE: Tensor, applied: Tensor) -> None:
    """Move the biases (loss-free balancing) and keep the counts for the next step.

    The bias moves by ``bias_gamma`` towards the mean load, and then its mean is subtracted (Wang et
    al., 2024, arXiv 2408.15664). The bias is equal on every rank, since the counts are. A skipped
    step changes nothing. With ``bias_gamma: 0`` the bias keeps every bit, since a user may have set
    the bias by hand.

    :param routers: the routers of all MoE layers, in layer order.
    :param counts_LE: routes to each expert in the whole global batch.
    :param applied: boolean scalar, false if the step was skipped.
    """
    for router, counts_E in zip(routers, counts_LE.float(), strict=True):
        router.lagged_counts.copy_(torch.where(applied, counts_E, router.lagged_counts))
        if router.config.bias_gamma:
            # Only the sign of the error counts, so one hot expert does not move the others more.
            error_E = counts_E.mean() - counts_E
            moved_E = router.expert_bias + router.config.bias_gamma * error_E.sign()
            moved_E -= moved_E.mean()
            router.expert_bias.copy_(torch.where(applied, moved_E, router.expert_bias))
