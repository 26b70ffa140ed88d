"""The decoder-only transformer, written for one device: it contains no code about ranks.

Shape letters: B sequences, S positions, T = B x S tokens, D model width, V vocabulary, L layers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from olmo_shard.config import ModelConfig
from olmo_shard.data.labels import IGNORE_INDEX
from olmo_shard.nn.attention import AttentionInputs
from olmo_shard.nn.block import Block
from olmo_shard.nn.layer_stats import LayerStats, stack_layers
from olmo_shard.nn.losses import head_losses
from olmo_shard.nn.norm import RMSNorm
from olmo_shard.nn.protocol import LanguageModel, ModelOutput
from olmo_shard.nn.readers import ParameterReaders
from olmo_shard.nn.rope import rope_table


class Transformer(LanguageModel):
    """Embedding, blocks, norm and output head.

    ``nn.families.meta_model`` builds one without storage; ``parallelize`` draws its weights.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.blocks = nn.ModuleList(Block(config, index) for index in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        # A tied head is the embedding's own parameter, so no second tensor can drift from it.
        self.lm_head = (
            None
            if config.tie_embeddings
            else nn.Linear(config.d_model, config.vocab_size, bias=False)
        )

    def forward(
        self, tokens_BS: Tensor, labels_BS: Tensor, documents_BS: Tensor | None = None
    ) -> ModelOutput:
        """Losses and statistics of a micro-batch; see ``LanguageModel.forward``."""
        h_BSD, layers = self._trunk(tokens_BS, labels_BS != IGNORE_INDEX, documents_BS)
        head = head_losses(
            h_BSD.flatten(0, 1),
            self.head_weight(),
            labels_BS.flatten(),
            z_loss_weight=self.config.z_loss_weight,
            chunk_tokens=self.config.loss_chunk_tokens,
        )
        loss = head.objective
        if self.config.moe is not None:
            loss = loss + self._auxiliary_loss(layers)
        return ModelOutput(
            loss=loss,
            cross_entropy=head.cross_entropy,
            logit_z_loss=head.z_loss,
            # The gradients of the statistics have entered the loss above.
            layers={name: figure.detach() for name, figure in layers.items()},
        )

    def hidden(self, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """Hidden states after the last norm, [B, S, D], in compute precision."""
        labelled_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
        return self._trunk(tokens_BS, labelled_BS, documents_BS)[0]

    def logits(self, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """FP32 logits [B, S, V], for inspection and tests. Training never holds them."""
        labelled_BS = torch.ones_like(tokens_BS, dtype=torch.bool)
        h_BSD, _ = self._trunk(tokens_BS, labelled_BS, documents_BS)
        return F.linear(h_BSD, self.head_weight()).float()

    def head_weight(self) -> Tensor:
        """The weight of the output head, [V, D]."""
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight

    def parameter_readers(self) -> ParameterReaders:
        """The losses read the head after the last norm, so the norm waits for the head."""
        yield self.embedding, self.embedding.parameters()
        if self.lm_head is not None:
            yield self.norm, self.lm_head.parameters()

    def flops_per_token(self, sequence_length: int) -> float:
        """6 FLOPs per active parameter that multiplies, plus the attentions' own products.

        The head multiplies; the table of an untied embedding does not.
        """
        active = self.parameter_counts().active
        multiplying = active - (0 if self.lm_head is None else self.embedding.weight.numel())
        attentions = [block.attention for block in self.blocks if isinstance(block, Block)]
        return 6 * multiplying + sum(layer.flops_per_token(sequence_length) for layer in attentions)

    def _trunk(
        self, tokens_BS: Tensor, labelled_BS: Tensor, documents_BS: Tensor | None
    ) -> tuple[Tensor, LayerStats]:
        """Hidden states after the last norm, and the layers' statistics with their gradients."""
        # Tensors that all blocks share are made once per forward.
        length, device = tokens_BS.shape[1], tokens_BS.device
        cos, sin = rope_table(length, self.config.head_width, self.config.rope_theta, device)
        inputs = AttentionInputs(cos, sin, _document_mask(documents_BS))

        x_BSD = self.embedding(tokens_BS)
        stats: list[LayerStats] = []
        for block in self.blocks:
            x_BSD, block_stats = block(x_BSD, inputs, labelled_BS)
            stats.append(block_stats)
        return self.norm(x_BSD), stack_layers(stats)

    def _auxiliary_loss(self, layers: LayerStats) -> Tensor:
        """The routers' weighted losses, summed over the layers."""
        assert self.config.moe is not None
        router = self.config.moe.router
        lb_loss, z_loss = layers["lb_loss"].sum(), layers["router_z_loss"].sum()
        return router.lb_loss_weight * lb_loss + router.z_loss_weight * z_loss


def _document_mask(documents_BS: Tensor | None) -> Tensor | None:
    if documents_BS is None:
        return None
    # A query sees the keys of its own document, up to itself.
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    return same_BSS.tril()[:, None]
