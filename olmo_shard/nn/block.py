"""One block of the transformer.

Shape letters: B sequences, S positions, D model width.
"""

from itertools import chain

from torch import Tensor, nn

from olmo_shard.config import ModelConfig
from olmo_shard.config.model import ATTENTIONS
from olmo_shard.nn.attention import AttentionInputs
from olmo_shard.nn.families import class_at
from olmo_shard.nn.feed_forward import FeedForward
from olmo_shard.nn.layer_stats import LayerStats
from olmo_shard.nn.moe import MoE
from olmo_shard.nn.norm import RMSNorm
from olmo_shard.nn.readers import ParameterReaders


class Block(nn.Module):
    """Attention, then a dense or mixture-of-experts feed-forward, each with a residual.

    :param index: position of the block in the model, from 0.
    """

    # The sizes in the attention half never depend on the routing, so it compiles as one graph.
    # The routing decides all sizes of a MoE layer: compiled, the layer would be compiled again for
    # each batch, or break the graph in the middle of a block.
    compiled_methods = ("attend",)

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.post_norm = config.norm_position == "post"
        self.attention_norm = RMSNorm(config.d_model, config.norm_eps)
        self.attention = class_at(ATTENTIONS[config.attention])(config)
        self.feed_forward_norm = RMSNorm(config.d_model, config.norm_eps)
        self.feed_forward: nn.Module
        if config.is_moe_layer(index):
            self.feed_forward = MoE(config, index)
        else:
            assert config.ffn_hidden is not None
            self.feed_forward = FeedForward(config.d_model, config.ffn_hidden)

    def forward(
        self, x_BSD: Tensor, inputs: AttentionInputs, labelled_BS: Tensor
    ) -> tuple[Tensor, LayerStats]:
        """The residual stream after the block, and the block's statistics.

        :param labelled_BS: boolean: tokens that have a label.
        """
        # Pre-norm: x + f(norm(x)). Post-norm: x + norm(f(x)). In both, f reads or writes a norm.
        x_BSD = self.attend(x_BSD, inputs)
        y_BSD = x_BSD if self.post_norm else self.feed_forward_norm(x_BSD)
        stats: LayerStats = {}
        if isinstance(self.feed_forward, MoE):
            y_BSD, stats = self.feed_forward(y_BSD, labelled_BS)
        else:
            y_BSD = self.feed_forward(y_BSD)
        return x_BSD + (self.feed_forward_norm(y_BSD) if self.post_norm else y_BSD), stats

    def attend(self, x_BSD: Tensor, inputs: AttentionInputs) -> Tensor:
        """The attention half of the block, residual included."""
        if self.post_norm:
            return x_BSD + self.attention_norm(self.attention(x_BSD, inputs))
        return x_BSD + self.attention(self.attention_norm(x_BSD), inputs)

    def parameter_readers(self) -> ParameterReaders:
        """The block waits for its attention half: compiled code has no hooks inside."""
        half = chain(self.attention.parameters(), self.attention_norm.parameters())
        return [(self, half)]
