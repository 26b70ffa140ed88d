"""Section ``model``: the shape of the transformer."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from olmo_shard.config.base import Section

MODEL_FAMILIES = {"transformer": "olmo_shard.nn.transformer:Transformer"}
"""Import path of each model family's class. Paths, since the config imports no torch."""

ATTENTIONS = {"grouped_query": "olmo_shard.nn.attention:Attention"}
"""Import path of each attention's class."""


class RouterConfig(Section):
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """How FP32 logits become scores."""
    score_order: Literal["before_topk", "after_topk"] = "before_topk"
    """Score all experts and take the top k, or take the top k logits and score those alone."""
    normalize: bool = False
    """Divide the k weights of a token by their sum."""
    scale: float = Field(default=1.0, gt=0)
    """Factor on the weights, after normalisation."""
    lb_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss of each MoE layer, which is 1.0 at perfect balance."""
    lb_loss_scope: Literal["global", "sequence", "micro_batch"] = "global"
    """Over which tokens the expert fractions f are counted; ``micro_batch`` depends on the split.
    """
    z_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss, logsumexp(logits) squared, of each MoE layer."""
    bias_gamma: float = Field(default=0.0, ge=0)
    """Step of the loss-free balancing bias, added to the scores for selection only; 0 turns it off.
    """


class MoEConfig(Section):
    num_experts: int = Field(gt=0)
    """Routed experts of a layer, over all ranks."""
    top_k: int = Field(gt=0)
    """Experts that each token visits."""
    hidden: int = Field(gt=0)
    """Width of a routed expert's hidden layer."""
    num_shared_experts: int = Field(default=0, ge=0)
    """Experts that every token visits; they are computed as one wide feed-forward."""
    router: RouterConfig = RouterConfig()

    @model_validator(mode="after")
    def _top_k_fits(self) -> "MoEConfig":
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k = {self.top_k} of num_experts = {self.num_experts}: a token cannot visit "
                "more experts than there are; lower top_k or raise num_experts"
            )
        return self


class ModelConfig(Section):
    family: str = "transformer"
    """Kind of model: a name in ``MODEL_FAMILIES``."""
    vocab_size: int = Field(gt=1, le=2**32)
    """Rows of the embedding; must cover the ids of the data."""
    d_model: int = Field(gt=0)
    """Width of the residual stream."""
    n_layers: int = Field(gt=0)
    """Transformer blocks."""
    attention: str = "grouped_query"
    """Kind of attention: a name in ``ATTENTIONS``."""
    n_heads: int = Field(gt=0)
    """Query heads."""
    n_kv_heads: int | None = Field(default=None, gt=0)
    """Key and value heads; null means as many as query heads."""
    head_dim: int | None = Field(default=None, gt=0)
    """Width of a head; null means d_model / n_heads."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm on queries and keys: over each head, or over all heads at once."""
    norm_position: Literal["pre", "post"] = "pre"
    """x + f(norm(x)), or x + norm(f(x))."""
    norm_eps: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary frequencies."""
    ffn_hidden: int | None = Field(default=None, gt=0)
    """Hidden width of the dense feed-forwards; needed only where a block has one."""
    n_dense_layers: int = Field(default=0, ge=0)
    """The first blocks that keep a dense feed-forward in an MoE model."""
    tie_embeddings: bool = False
    """Use the embedding as output head."""
    moe: MoEConfig | None = None
    """Routed experts; null makes a dense model."""
    z_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the z-loss on the output logits."""
    loss_chunk_tokens: int = Field(default=1024, gt=0)
    """Tokens whose FP32 logits exist at one time."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""

    @field_validator("family", "attention")
    @classmethod
    def _is_registered(cls, name: str, info: ValidationInfo) -> str:
        known = MODEL_FAMILIES if info.field_name == "family" else ATTENTIONS
        if name not in known:
            raise ValueError(f"{name!r} is none of {', '.join(known)}")
        return name

    @property
    def kv_heads(self) -> int:
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        return self.head_dim or self.d_model // self.n_heads

    def is_moe_layer(self, index: int) -> bool:
        return self.moe is not None and index >= self.n_dense_layers

    @model_validator(mode="after")
    def _shapes_fit(self) -> "ModelConfig":
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"n_heads = {self.n_heads} is not a multiple of n_kv_heads = {self.kv_heads}"
            )
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"d_model = {self.d_model} is not a multiple of n_heads = {self.n_heads}; "
                "change one of them or set head_dim"
            )
        if self.head_width % 2:
            raise ValueError(f"head_dim = {self.head_width} must be even: RoPE rotates pairs")
        if self.n_dense_layers > self.n_layers:
            raise ValueError(
                f"n_dense_layers = {self.n_dense_layers} is more than n_layers = {self.n_layers}"
            )
        if self.moe is not None and self.n_dense_layers == self.n_layers:
            raise ValueError(
                f"n_dense_layers = {self.n_dense_layers} leaves no layer of n_layers = "
                f"{self.n_layers} for the moe section; lower it, or set moe to null"
            )
        if self.moe is None and self.n_dense_layers:
            raise ValueError(
                f"n_dense_layers = {self.n_dense_layers} has no meaning without a moe section"
            )
        if self.ffn_hidden is None and not self.is_moe_layer(0):
            raise ValueError("ffn_hidden is needed: the model has dense feed-forward layers")
        return self
