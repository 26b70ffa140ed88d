"""The model on one device: masking, padding, recompute, layouts of weights."""

import pytest
import torch
from torch import nn

from olmo_shard.config import ModelConfig
from olmo_shard.data.labels import IGNORE_INDEX
from olmo_shard.nn.flops import flops_per_token
from olmo_shard.nn.protocol import ModelOutput
from olmo_shard.nn.recompute import checkpointed, decide_once
from olmo_shard.nn.transformer import Transformer
from tests.support.close import close, same_figures
from tests.support.scales import logits_scale, moe_scale
from tests.support.tiny import (
    VOCAB,
    global_batch,
    meta_model,
    model_config,
    moe_layer,
)


def real_model(config: ModelConfig, seed: int = 3) -> Transformer:
    model = meta_model(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            experts = range(parameter.shape[0]) if ".experts." in name else None
            parameter.copy_(model.initial_value(name, parameter.shape, seed, experts))
    for router in model.routers():
        router.reset_buffers()
    return model


def test_a_masked_document_does_not_see_the_one_before_it() -> None:
    model = real_model(model_config())
    ids = torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 5 + [1] * 7])
    packed = model.logits(ids, documents)[0, 5:]
    alone = model.logits(ids[:, 5:])[0]
    close(packed, alone, scale=logits_scale(model))
    unmasked = model.logits(ids)[0, 5:]
    assert (unmasked - alone).abs().max() > 1e-2


def test_one_document_masked_equals_plain_causal() -> None:
    model = real_model(model_config())
    ids = torch.randint(0, VOCAB, (2, 12))
    masked = model.logits(ids, torch.zeros_like(ids))
    close(masked, model.logits(ids), scale=logits_scale(model))


def output_and_gradients(
    model: Transformer, tokens: torch.Tensor, labels: torch.Tensor
) -> tuple[ModelOutput, dict[str, torch.Tensor]]:
    output = model(tokens, labels)
    return output, dict(
        zip(
            (name for name, _ in model.named_parameters()),
            torch.autograd.grad(output.loss, list(model.parameters())),
            strict=True,
        )
    )


def test_padding_changes_nothing_that_is_trained_or_logged() -> None:
    tokens, labels = global_batch(0, ignored=False)
    padded_tokens = torch.cat([tokens, torch.zeros_like(tokens)], dim=1)
    padded_labels = torch.cat([labels, torch.full_like(labels, IGNORE_INDEX)], dim=1)
    model = real_model(model_config())
    plain, gradients = output_and_gradients(model, tokens, labels)
    padded, padded_gradients = output_and_gradients(model, padded_tokens, padded_labels)
    # A gradient is a sum over tokens, which cancels: its scale adds absolute values by sequence.
    # Each layer adds its own rounding, in forward and in backward.
    passes = 2 * model.config.n_layers
    scales = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    for sequence in zip(tokens[:, None], labels[:, None], strict=True):
        for name, gradient in output_and_gradients(model, *sequence)[1].items():
            scales[name] += gradient.abs()
    assert torch.equal(plain.layers["counts_E"], padded.layers["counts_E"])
    assert (plain.layers["counts_E"].sum(dim=1) == tokens.numel() * 2).all()
    for name in ("loss", "cross_entropy", "logit_z_loss"):
        same_figures(getattr(plain, name).tolist(), getattr(padded, name).tolist())
    assert plain.layers.keys() == padded.layers.keys()
    # Rows of tokens without a label travel, too: later tokens see them.
    for name in plain.layers.keys() - {"rows_sent", "rows_W"}:
        same_figures(plain.layers[name].tolist(), padded.layers[name].tolist())
    for name, gradient in gradients.items():
        close(padded_gradients[name], gradient, scale=passes * scales[name].max(), what=name)


@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
def test_loss_is_the_cross_entropy_of_the_logits(qk_norm: str) -> None:
    model = real_model(model_config(qk_norm=qk_norm))
    tokens, labels = global_batch(1, ignored=False)
    output = model(tokens, labels)
    logits = model.logits(tokens).flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    same_figures(output.cross_entropy.item(), expected.item())


def test_objective_adds_each_layers_weighted_losses() -> None:
    config = model_config()
    output = real_model(config)(*global_batch(1))
    assert config.moe is not None
    router = config.moe.router
    expected = (
        output.cross_entropy
        + config.z_loss_weight * output.logit_z_loss
        + router.lb_loss_weight * output.layers["lb_loss"].sum()
        + router.z_loss_weight * output.layers["router_z_loss"].sum()
    )
    close(output.loss, expected, scale=expected)  # a sum of positive terms
    assert output.layers["lb_loss"].shape == (2,)


def test_opposite_imbalances_of_two_layers_do_not_cancel() -> None:
    """Layer 1 sends all tokens to expert 0, layer 2 to expert 1: each counts for itself."""
    router = {"lb_loss_weight": 1.0, "lb_loss_scope": "sequence", "z_loss_weight": 0.0}
    config = model_config(
        router=router, n_layers=2, n_dense_layers=0, moe={"num_experts": 2, "top_k": 1}
    )
    model = real_model(config)
    for index in range(2):
        moe_layer(model, index).router.expert_bias[index] = 100.0
    tokens, labels = global_batch(0, ignored=False)
    output = model(tokens, labels)
    assert output.layers["counts_E"].tolist() == [[tokens.numel(), 0], [0, tokens.numel()]]
    # f is 1 for the favourite, so the loss is E x P of the favourite.
    probabilities = output.layers["lb_loss"] / tokens.numel() / 2
    assert (probabilities > 0.3).all()
    extra = output.loss - output.cross_entropy - config.z_loss_weight * output.logit_z_loss
    close(extra, output.layers["lb_loss"].sum(), scale=output.loss)


def test_all_experts_with_equal_weights_is_the_dense_sum() -> None:
    """A zero gate gives each expert weight 1/E: the layer is the mean of all experts."""
    config = model_config(moe={"num_experts": 8, "top_k": 8, "num_shared_experts": 0})
    model = real_model(config)
    moe = moe_layer(model, 1)
    nn.init.zeros_(moe.router.gate.weight)
    x = torch.randn(2, 5, config.d_model)
    found, _ = moe(x, torch.ones(2, 5, dtype=torch.bool))
    expected = torch.zeros_like(x)
    for expert in range(8):
        gate, up = (x @ moe.experts.w_gate_up[expert].T).chunk(2, dim=-1)
        hidden = nn.functional.silu(gate) * up
        expected += hidden @ moe.experts.w_down[expert].T / 8
    scale = moe_scale(moe, x.flatten(0, 1), torch.arange(8).expand(10, 8))
    close(found, expected, scale=scale.view(x.shape))


def test_one_expert_trains() -> None:
    model = real_model(
        model_config(n_dense_layers=0, n_layers=1, moe={"num_experts": 1, "top_k": 1})
    )
    model(*global_batch(0)).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_initial_weights_depend_on_seed_name_and_expert_alone() -> None:
    config = model_config()
    model = meta_model(config)
    shape = torch.Size([8, 40, 36])
    whole = model.initial_value("blocks.1.feed_forward.experts.w_gate_up", shape, 5, range(8))
    part = model.initial_value(
        "blocks.1.feed_forward.experts.w_gate_up", torch.Size([3, 40, 36]), 5, range(2, 5)
    )
    assert torch.equal(part, whole[2:5])
    assert not torch.equal(whole[0], whole[1])
    other = model.initial_value("blocks.2.feed_forward.experts.w_gate_up", shape, 5, range(8))
    assert not torch.equal(whole, other)
    assert whole.std().item() == pytest.approx(config.init_std, rel=0.05)
    residual = model.initial_value("blocks.1.attention.wo.weight", torch.Size([90, 90]), 5)
    assert residual.std().item() == pytest.approx(config.init_std / 6**0.5, rel=0.05)


def test_a_recompute_replays_the_choice_of_the_forward() -> None:
    choices = iter(range(100))

    def block(x: torch.Tensor) -> torch.Tensor:
        choice = decide_once(lambda: torch.tensor(next(choices)))
        seen.append(int(choice))
        return (x * x.detach()).sin() * (choice + 1)

    seen: list[int] = []
    run = checkpointed(block)
    first = torch.ones(3, requires_grad=True)
    second = torch.ones(3, requires_grad=True)
    outputs = [run(first), run(second)]
    outputs[1].sum().backward()
    outputs[0].sum().backward()
    assert seen == [0, 1, 1, 0]
    assert second.grad is not None
    assert torch.equal(second.grad, torch.full((3,), 1.0).cos() * 2)


def test_tied_embeddings_are_one_parameter_with_the_sum_of_both_gradients() -> None:
    model = real_model(model_config(tie_embeddings=True))
    names = [name for name, _ in model.named_parameters()]
    assert "embedding.weight" in names
    assert not any("lm_head" in name for name in names)
    model(*global_batch(0, ignored=False)).loss.backward()
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert (gradient.abs().sum(dim=1) > 0).all(), "the head's gradient reaches every row"


def test_flops_formula_on_a_worked_example() -> None:
    """6 x (attention 4x4x4 + SwiGLU 3x4x8 + norms 12 + head 10x4) + 6 x 1 layer x S x 4."""
    config = ModelConfig(vocab_size=10, d_model=4, n_layers=1, n_heads=2, ffn_hidden=8)
    assert flops_per_token(config, sequence_length=3) == 6 * (64 + 96 + 12 + 40) + 6 * 3 * 4
