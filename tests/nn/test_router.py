"""The router: ties, NaN, options, losses with their constants, bias updates."""

import pytest
import torch

from olmo_shard.data.labels import IGNORE_INDEX
from olmo_shard.nn.layer_stats import LayerStats
from olmo_shard.nn.router import Router, Routing, update_after_step
from tests.support.close import close, products
from tests.support.tiny import model_config


def router(experts: int = 4, top_k: int = 2, width: int = 6, **options) -> Router:
    config = model_config(
        router={"lb_loss_weight": 1.0, **options},
        d_model=width,
        moe={"num_experts": experts, "top_k": top_k},
    )
    layer = Router(config)
    torch.manual_seed(0)
    torch.nn.init.normal_(layer.gate.weight)
    layer.reset_buffers()
    return layer


def route(layer: Router, x: torch.Tensor, labelled: torch.Tensor) -> tuple[Routing, LayerStats]:
    routing = layer(x)
    return routing, layer.stats(routing, labelled)


def everything(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool)


def test_ties_go_to_the_lowest_ids() -> None:
    layer = router(experts=6, top_k=3)
    torch.nn.init.zeros_(layer.gate.weight)
    x = torch.randn(2, 5, 6)
    routing = layer(x)
    assert routing.topk_idx_TK.tolist() == [[0, 1, 2]] * 10


def test_a_nan_token_still_gets_distinct_ids_in_range() -> None:
    layer = router(experts=6, top_k=4)
    x = torch.randn(1, 3, 6)
    x[0, 1] = float("nan")
    routing = layer(x)
    for ids in routing.topk_idx_TK.tolist():
        assert len(set(ids)) == 4
        assert all(0 <= each < 6 for each in ids)


def test_weights_by_option() -> None:
    x = torch.randn(1, 8, 6)
    plain = router()(x)
    layer = router()
    probs = torch.softmax(x[0] @ layer.gate.weight.T, dim=-1)
    # Weights lie between 0 and 1; they differ by the errors of their logits.
    scale = 1 + products(x[0], layer.gate.weight.T).max()
    close(plain.topk_weights_TK, probs.gather(1, plain.topk_idx_TK), scale=scale)
    normalized = router(normalize=True, scale=2.5)(x)
    close(normalized.topk_weights_TK.sum(dim=1), torch.full((8,), 2.5), scale=2.5)
    after = router(score_order="after_topk")(x)
    assert torch.equal(after.topk_idx_TK, plain.topk_idx_TK)
    close(after.topk_weights_TK, normalized.topk_weights_TK / 2.5, scale=scale)
    sigmoid = router(scoring="sigmoid")(x)
    logits = x[0] @ layer.gate.weight.T
    expected = logits.sigmoid().gather(1, sigmoid.topk_idx_TK)
    close(sigmoid.topk_weights_TK, expected, scale=scale)


def test_the_bias_moves_the_choice_and_not_the_weights() -> None:
    layer = router(experts=4, top_k=1)
    x = torch.randn(1, 8, 6)
    layer.expert_bias[2] = 10.0
    routing = layer(x)
    assert routing.topk_idx_TK.flatten().tolist() == [2] * 8
    probs = torch.softmax(x[0] @ layer.gate.weight.T, dim=-1)
    scale = 1 + products(x[0], layer.gate.weight.T).max()
    close(routing.topk_weights_TK[:, 0], probs[:, 2], scale=scale)


def test_logits_are_fp32_under_bf16() -> None:
    layer = router().bfloat16()
    x = torch.randn(1, 4, 6, dtype=torch.bfloat16)
    routing, stats = route(layer, x, everything(x))
    expected = torch.softmax(x[0].float() @ layer.gate.weight.float().T, dim=-1)
    assert routing.topk_weights_TK.dtype == torch.float32
    scale = 1 + products(x[0], layer.gate.weight.T).max()
    close(routing.topk_weights_TK, expected.gather(1, routing.topk_idx_TK), scale=scale)
    assert stats["router_z_loss"].dtype == torch.float32


@pytest.mark.parametrize("scope", ["global", "sequence", "micro_batch"])
def test_loss_is_one_a_token_at_perfect_balance(scope: str) -> None:
    """Each of 4 experts is chosen by a quarter of the tokens, with the same mean probability."""
    layer = router(experts=4, top_k=1, width=4, lb_loss_scope=scope)
    with torch.no_grad():
        layer.gate.weight.copy_(torch.eye(4) * 3)
    layer.lagged_counts.fill_(8)
    x = torch.eye(4).repeat(2, 1)[None].expand(2, 8, 4)
    _, stats = route(layer, x, everything(x))
    close(stats["lb_loss"], torch.tensor(16.0), scale=16.0)


@pytest.mark.parametrize("scope", ["global", "sequence", "micro_batch"])
def test_imbalance_raises_the_loss_for_either_favourite(scope: str) -> None:
    """All tokens on one expert: far above the balanced value, in every scope, for either expert."""
    for favourite in (0, 1):
        layer = router(experts=2, top_k=1, width=2, lb_loss_scope=scope)
        with torch.no_grad():
            layer.gate.weight.copy_(torch.eye(2) * 5)
        layer.lagged_counts[favourite] = 32
        x = torch.eye(2)[favourite].expand(2, 8, 2)
        _, stats = route(layer, x, everything(x))
        assert stats["lb_loss"].item() / 16 > 1.9


def test_global_scope_has_no_gradient_at_step_one() -> None:
    layer = router()
    x = torch.randn(1, 8, 6)
    _, stats = route(layer, x, everything(x))
    stats["lb_loss"].backward()
    close(stats["lb_loss"], torch.tensor(8.0), scale=8.0)
    # The terms of the gradient cancel: probability times 1, less probability times their sum, 1.
    terms_TE = 2 * layer(x).logits_TE.softmax(dim=-1)
    scale = products(terms_TE.T, x[0])
    close(layer.gate.weight.grad, torch.zeros(4, 6), scale=scale)


@pytest.mark.parametrize("scope", ["global", "sequence", "micro_batch"])
def test_padding_changes_no_loss_gradient_or_load(scope: str) -> None:
    x = torch.randn(2, 6, 6)
    padded = torch.cat([x, torch.randn(2, 6, 6) * 5], dim=1)
    labelled = torch.cat([everything(x), torch.zeros(2, 6, dtype=torch.bool)], dim=1)
    found = []
    for tokens, mask in ((x, everything(x)), (padded, labelled)):
        layer = router(lb_loss_scope=scope)
        layer.lagged_counts.copy_(torch.tensor([1.0, 2, 3, 4]))
        _, stats = route(layer, tokens, mask)
        (stats["lb_loss"] + stats["router_z_loss"]).backward()
        found.append((stats, layer.gate.weight.grad))
    (alone, gradient), (with_padding, padded_gradient) = found
    logits_TE = layer(x).logits_TE
    terms_TE = 1 + 2 * logits_TE.abs()  # of either loss, times at most 4 for the load of an expert
    close(with_padding["lb_loss"], alone["lb_loss"], scale=alone["lb_loss"])
    close(with_padding["router_z_loss"], alone["router_z_loss"], scale=terms_TE.square().sum())
    close(padded_gradient, gradient, scale=4 * products(terms_TE.T, x.flatten(0, 1)))
    assert torch.equal(with_padding["counts_E"], alone["counts_E"])
    assert alone["counts_E"].sum() == 12 * 2


def test_scores_that_all_vanish_make_no_nan() -> None:
    layer = router(scoring="sigmoid")
    torch.nn.init.constant_(layer.gate.weight, -40.0)
    x = torch.ones(1, 4, 6)
    x[0, 3] = float("nan")
    labelled = torch.tensor([[True, True, True, False]])
    routing, stats = route(layer, x, labelled)
    assert stats["lb_loss"].isfinite()
    assert stats["router_z_loss"].isfinite()
    assert routing.topk_weights_TK[:3].isfinite().all()


def test_z_loss_is_the_squared_logsumexp() -> None:
    layer = router()
    x = torch.randn(1, 5, 6)
    _, stats = route(layer, x, everything(x))
    expected = torch.logsumexp(x[0] @ layer.gate.weight.T, dim=-1).square().sum()
    logits_scale = products(x[0], layer.gate.weight.T).amax(dim=1)
    close(stats["router_z_loss"], expected, scale=(2 * logits_scale.square()).sum())


def test_update_moves_the_bias_towards_the_mean_and_keeps_its_mean_zero() -> None:
    layer = router(bias_gamma=0.1)
    update_after_step([layer], torch.tensor([[10, 0, 2, 4]]), torch.tensor(True))
    # error signs -, +, +, 0: the mean of (-.1, .1, .1, 0) is 0.025
    close(layer.expert_bias, torch.tensor([-0.125, 0.075, 0.075, -0.025]), scale=0.1)
    assert layer.lagged_counts.tolist() == [10, 0, 2, 4]


def test_a_skipped_step_moves_neither_bias_nor_counts() -> None:
    layer = router(bias_gamma=0.1)
    update_after_step([layer], torch.tensor([[10, 0, 2, 4]]), torch.tensor(False))
    assert layer.expert_bias.tolist() == [0.0] * 4
    assert layer.lagged_counts.tolist() == [0.0] * 4


def test_a_bias_set_by_hand_keeps_its_bits_without_loss_free_balancing() -> None:
    """Its mean is 2: with a gamma of 0 nothing may take the mean off."""
    layer = router(bias_gamma=0.0)
    layer.expert_bias.copy_(torch.tensor([5.0, 1.0, 1.0, 1.0]))
    update_after_step([layer], torch.tensor([[10, 0, 2, 4]]), torch.tensor(True))
    assert layer.expert_bias.tolist() == [5.0, 1.0, 1.0, 1.0]
    assert layer.lagged_counts.tolist() == [10, 0, 2, 4]


def test_ignore_index_is_what_torch_uses() -> None:
    assert torch.nn.CrossEntropyLoss().ignore_index == IGNORE_INDEX
