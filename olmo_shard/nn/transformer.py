"""The decoder-only transformer, for one device: it knows nothing of ranks.

Shape letters: B sequences, S positions, T = B x S tokens, D model width, E experts, L MoE layers.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_shard.config import ModelConfig
from olmo_shard.data.labels import IGNORE_INDEX
from olmo_shard.nn.attention import Attention, AttentionInputs
from olmo_shard.nn.feed_forward import FeedForward
from olmo_shard.nn.losses import head_losses
from olmo_shard.nn.moe import MoE, MoEStats
from olmo_shard.nn.norm import RMSNorm
from olmo_shard.nn.rope import rope_table
from olmo_shard.nn.router import Router


class ModelOutput(NamedTuple):
    """Sums over the micro-batch's tokens that have a label; divide by the tokens of the window."""

    loss: Tensor
    """What backward starts from: cross-entropy and all weighted auxiliary losses."""
    cross_entropy: Tensor
    logit_z_loss: Tensor
    lb_loss_L: Tensor
    """Per MoE layer, unweighted."""
    router_z_loss_L: Tensor
    """Per MoE layer, unweighted."""
    counts_LE: Tensor
    """Routes to each expert of each MoE layer."""
    dropped_L: Tensor
    """Routes that capacity dropped, of tokens with a label."""
    rows_sent_L: Tensor
    """Rows that dispatch sent to other ranks."""
    rows_LW: Tensor
    """Rows that dispatch sent to each rank of the expert-parallel group."""


class Block(nn.Module):
    """Attention, then a dense or mixture-of-experts feed-forward."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.post_norm = config.norm_position == "post"
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward: nn.Module
        if config.is_moe_layer(index):
            self.feed_forward = MoE(config, index)
        else:
            assert config.ffn_hidden is not None
            self.feed_forward = FeedForward(config.d_model, config.ffn_hidden)

    def forward(
        self, x_BSD: Tensor, inputs: AttentionInputs, labelled_BS: Tensor
    ) -> tuple[Tensor, MoEStats | None]:
        x_BSD = self.attend(x_BSD, inputs)
        y_BSD = x_BSD if self.post_norm else self.feed_forward_norm(x_BSD)
        stats = None
        if isinstance(self.feed_forward, MoE):
            y_BSD, stats = self.feed_forward(y_BSD, labelled_BS)
        else:
            y_BSD = self.feed_forward(y_BSD)
        return x_BSD + (self.feed_forward_norm(y_BSD) if self.post_norm else y_BSD), stats

    def attend(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        """The attention half, residual included: its sizes never depend on the routing."""
        if self.post_norm:
            return x_BSD + self.attention_norm(self.attention(x_BSD, inputs))
        return x_BSD + self.attention(self.attention_norm(x_BSD), inputs)


class Transformer(nn.Module):
    """Build it under ``torch.device("meta")``; ``nn.init`` gives it weights."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        # Tied: one parameter, used twice, so that no second tensor can drift from it.
        self.lm_head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.d_model, config.vocab_size, bias=False)
        )

    def forward(
        self, tokens_BS: Tensor, labels_BS: Tensor, documents_BS: Tensor | None = None
    ) -> ModelOutput:
        """Losses of a micro-batch.

        :param tokens_BS: int64 ids.
        :param labels_BS: int64 ids to predict, ``IGNORE_INDEX`` where there is none.
        :param documents_BS: number of each token's document; tokens see only their own. Null: one
            document.
        """
        labelled_BS = labels_BS != IGNORE_INDEX
        h_BSD, stats = self._hidden(tokens_BS, labelled_BS, documents_BS)
        head = head_losses(
            h_BSD.flatten(0, 1),
            self._head_weight(),
            labels_BS.flatten(),
            z_loss_weight=self.config.z_loss_weight,
            chunk_tokens=self.config.loss_chunk_tokens,
        )
        return _output(self.config, head.objective, head.cross_entropy, head.z_loss, stats)

    def logits(self, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """FP32 logits [B, S, V], for inspection and tests (training never holds them)."""
        labelled_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
        h_BSD, _ = self._hidden(tokens_BS, labelled_BS, documents_BS)
        return F.linear(h_BSD, self._head_weight()).float()

    def routers(self) -> list[Router]:
        """The routers of the MoE layers, in layer order."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight

    def _hidden(
        self, tokens_BS: Tensor, labelled_BS: Tensor, documents_BS: Tensor | None
    ) -> tuple[Tensor, list[MoEStats]]:
        length, device = tokens_BS.shape[1], tokens_BS.device
        cos, sin = rope_table(length, self.config.head_width, self.config.rope_theta, device)
        inputs = AttentionInputs(cos, sin, _document_mask(documents_BS))
        x_BSD = self.embedding(tokens_BS)
        all_stats: list[MoEStats] = []
        for block in self.blocks:
            x_BSD, stats = block(x_BSD, inputs, labelled_BS)
            if stats is not None:
                all_stats.append(stats)
        return self.norm(x_BSD), all_stats


def _document_mask(documents_BS: Tensor | None) -> Tensor | None:
    if documents_BS is None:
        return None
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    return same_BSS.tril()[:, None]


def _output(
    config: ModelConfig,
    objective: Tensor,
    cross_entropy: Tensor,
    logit_z_loss: Tensor,
    stats: list[MoEStats],
) -> ModelOutput:
    """Add each layer's weighted auxiliary losses to the objective."""
    if not stats:
        none_L = objective.new_zeros(0)
        none_LX = objective.new_zeros(0, 0)
        return ModelOutput(
            objective,
            cross_entropy,
            logit_z_loss,
            lb_loss_L=none_L,
            router_z_loss_L=none_L,
            counts_LE=none_LX,
            dropped_L=none_L,
            rows_sent_L=none_L,
            rows_LW=none_LX,
        )
    assert config.moe is not None
    router = config.moe.router
    lb_loss_L = torch.stack([layer.router.lb_loss for layer in stats])
    z_loss_L = torch.stack([layer.router.z_loss for layer in stats])
    auxiliary = router.lb_loss_weight * lb_loss_L.sum() + router.z_loss_weight * z_loss_L.sum()
    return ModelOutput(
        objective + auxiliary,
        cross_entropy,
        logit_z_loss,
        lb_loss_L=lb_loss_L.detach(),
        router_z_loss_L=z_loss_L.detach(),
        counts_LE=torch.stack([layer.router.counts_E for layer in stats]).detach(),
        dropped_L=torch.stack([layer.dropped for layer in stats]),
        rows_sent_L=torch.stack([layer.rows_sent for layer in stats]),
        rows_LW=torch.stack([layer.rows_W for layer in stats]),
    )
