"""What the rest of the package uses of a model: parallel/, optim/ and train/ import no model class.

[Note: model protocol] A model family is one file with a subclass of ``LanguageModel``, and one line
of ``MODEL_FAMILIES`` in ``config/model.py``. Modules state the rest in their own classes:

| who uses it | what a module class declares |
|---|---|
| ``ddp``'s gather | ``parameter_readers()``: which module reads which parameter first |
| ``parallelize`` | ``compiled_methods``: methods that may be compiled, each as one graph |
| initial weights | ``starts_at_one``, ``residual_outputs``: names of special weights |
| MFU | ``flops_per_token()`` of attentions: products between positions |

Shape letters: B sequences, S positions, D model width, L layers.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from olmo_shard.config import ModelConfig
from olmo_shard.nn.init import initial_tensor
from olmo_shard.nn.layer_stats import LayerStats
from olmo_shard.nn.moe import MoE
from olmo_shard.nn.readers import ParameterReaders
from olmo_shard.nn.router import Router


class ModelOutput(NamedTuple):
    """Sums over the tokens of a micro-batch that have a label.

    The caller divides them by the number of such tokens in the whole accumulation window.
    """

    loss: Tensor
    """Scalar from which backward starts: cross-entropy plus all weighted auxiliary losses."""
    cross_entropy: Tensor
    """Scalar, without gradient."""
    logit_z_loss: Tensor
    """Scalar, unweighted, without gradient."""
    layers: LayerStats
    """Statistics of the layers, [L, ...] each, without gradient. See [Note: layer statistics]."""


class ParameterCounts(NamedTuple):
    """Numbers of parameters over all ranks."""

    total: int
    active: int
    """Parameters that one token uses: top_k routed experts per layer instead of all."""


class LanguageModel(nn.Module, ABC):
    """A causal language model; see [Note: model protocol].

    Subclasses build their modules in ``__init__(config)``.
    """

    config: ModelConfig
    blocks: nn.ModuleList
    """The blocks in order of forward: the units of recompute, and of FSDP's gathers."""
    entry_points: ClassVar[tuple[str, ...]] = ("hidden", "logits")
    """Methods besides ``forward`` that compute with the weights. Weights arrive before them, too.
    ``forward`` itself must not call them."""

    @abstractmethod
    def forward(
        self, tokens_BS: Tensor, labels_BS: Tensor, documents_BS: Tensor | None = None
    ) -> ModelOutput:
        """Losses and statistics of a micro-batch.

        :param tokens_BS: int64 token ids.
        :param labels_BS: int64 ids to predict; ``IGNORE_INDEX`` marks tokens without a label.
        :param documents_BS: number of each token's document. Tokens see only their own document;
            ``None`` means one document per sequence.
        """

    @abstractmethod
    def hidden(self, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """Hidden states after the last norm, [B, S, D], in compute precision."""

    @abstractmethod
    def logits(self, tokens_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        """FP32 logits [B, S, vocabulary]. Training never holds them."""

    @abstractmethod
    def parameter_readers(self) -> ParameterReaders:
        """The readers of the parameters that the model's own code reads; see [Note: readers]."""

    @abstractmethod
    def flops_per_token(self, sequence_length: int) -> float:
        """Forward and backward FLOPs per token, without any recompute.

        Valid for a model that holds all experts.

        :param sequence_length: in tokens.
        """

    def moe_layers(self) -> list[MoE]:
        """The mixture-of-experts layers, in layer order."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def routers(self) -> list[Router]:
        """The routers of the mixture-of-experts layers, in layer order."""
        return [layer.router for layer in self.moe_layers()]

    def parameter_counts(self) -> ParameterCounts:
        """Numbers of parameters. Valid for a model that holds all experts."""
        total = sum(parameter.numel() for parameter in self.parameters())
        # A token uses top_k of the experts of each layer, and all other parameters.
        unused = 0
        for layer in self.moe_layers():
            num_experts, top_k = layer.router.num_experts, layer.router.top_k
            numel = sum(parameter.numel() for parameter in layer.experts.parameters())
            unused += numel // num_experts * (num_experts - top_k)
        return ParameterCounts(total, total - unused)

    def initial_value(
        self, name: str, shape: torch.Size, seed: int, experts: range | None = None
    ) -> Tensor:
        """FP32 initial value of a parameter, on the CPU; see ``nn/init.py``."""
        return initial_tensor(self, self.config, name, shape, seed, experts)

    def place_buffers(self, device: torch.device) -> None:
        """Allocate the buffers on a device, with their initial values."""
        # Not recursive: the router's weights have their storage from ddp or fsdp already.
        for router in self.routers():
            router.to_empty(device=device, recurse=False)
            router.reset_buffers()
