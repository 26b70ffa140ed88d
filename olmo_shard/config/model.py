"""Section ``model``: the shape of the transformer."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from olmo_shard.config.section import Section

MODEL_FAMILIES = {"transformer": "olmo_shard.nn.transformer:Transformer"}
"""Import path of each model family's class. Paths, since the config imports no torch."""

ATTENTIONS = {"grouped_query": "olmo_shard.nn.attention:Attention"}
"""Import path of each attention's class."""


class RouterConfig(Section):
    """How a MoE layer chooses and weights experts, and how it balances their load."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the FP32 router logits to scores: ``softmax`` over all experts, or ``sigmoid``
    of each logit.
    """
    score_order: Literal["before_topk", "after_topk"] = "before_topk"
    """``before_topk`` scores all experts and takes the top k scores. ``after_topk`` takes the top k
    logits and scores only those.
    """
    normalize: bool = False
    """If true, the k weights of a token are divided by their sum (``norm_topk_prob`` elsewhere)."""
    scale: float = Field(default=1.0, gt=0)
    """Factor on the weights, applied after normalisation."""
    lb_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss per MoE layer. The loss is 1.0 at perfect balance."""
    lb_loss_scope: Literal["global", "sequence", "micro_batch"] = "global"
    """Tokens over which the load-balancing loss counts the share of each expert. ``global``: the
    global batch of the previous step. ``sequence``: each sequence. ``micro_batch``: each
    micro-batch, so that the result depends on micro_batch_tokens.
    """
    z_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss, logsumexp(logits) squared, per MoE layer."""
    bias_gamma: float = Field(default=0.0, ge=0)
    """Amount by which each step moves the expert bias of loss-free balancing. The bias is added to
    the scores for the choice of experts only. 0 turns the bias off.
    """


class MoEConfig(Section):
    """The experts of the MoE layers."""

    num_experts: int = Field(gt=0)
    """Number of routed experts per layer, over all ranks."""
    top_k: int = Field(gt=0)
    """Number of routed experts per token."""
    hidden: int = Field(gt=0)
    """Hidden width of one routed expert."""
    num_shared_experts: int = Field(default=0, ge=0)
    """Number of experts that compute every token. They are computed as one feed-forward layer of
    num_shared_experts x hidden.
    """
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
    """The shape of a decoder-only transformer, dense or with routed experts."""

    family: str = "transformer"
    """Kind of model: a name in ``MODEL_FAMILIES``."""
    vocab_size: int = Field(gt=1, le=2**32)
    """Number of rows of the embedding. All ids of the data must be below it."""
    d_model: int = Field(gt=0)
    """Width of the residual stream."""
    n_layers: int = Field(gt=0)
    """Number of transformer blocks."""
    attention: str = "grouped_query"
    """Kind of attention: a name in ``ATTENTIONS``."""
    n_heads: int = Field(gt=0)
    """Number of query heads."""
    n_kv_heads: int | None = Field(default=None, gt=0)
    """Number of key and value heads. Null means as many as query heads."""
    head_dim: int | None = Field(default=None, gt=0)
    """Width of one head. Null means d_model / n_heads."""
    qk_norm: Literal["none", "head", "full"] = "none"
    """RMSNorm on queries and keys: ``head`` normalises each head, ``full`` all heads together."""
    norm_position: Literal["pre", "post"] = "pre"
    """Position of a block's norms: ``pre`` is x + f(norm(x)), ``post`` is x + norm(f(x))."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon of every RMSNorm, added to the mean square."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary frequencies."""
    ffn_hidden: int | None = Field(default=None, gt=0)
    """Hidden width of the dense feed-forward layers. Null is for models without such layers."""
    n_dense_layers: int = Field(default=0, ge=0)
    """Number of blocks, from the first on, that have a dense feed-forward layer in a MoE model."""
    tie_embeddings: bool = False
    """If true, the output head uses the weight of the embedding."""
    moe: MoEConfig | None = None
    """Routed experts. Null makes a dense model."""
    z_loss_weight: float = Field(default=0.0, ge=0)
    """Weight of the z-loss on the logits of the output head."""
    loss_chunk_tokens: int = Field(default=1024, gt=0)
    """Number of tokens whose FP32 logits are in memory at one time."""
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
        """Number of key and value heads."""
        return self.n_kv_heads or self.n_heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.d_model // self.n_heads

    def is_moe_layer(self, index: int) -> bool:
        """Return whether block ``index``, from 0, has routed experts."""
        return self.moe is not None and index >= self.n_dense_layers

    @model_validator(mode="after")
    def _heads_fit(self) -> "ModelConfig":
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
        return self

    @model_validator(mode="after")
    def _dense_layers_fit(self) -> "ModelConfig":
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
