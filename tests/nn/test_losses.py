"""Chunked cross-entropy against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from olmo_shard.data.labels import IGNORE_INDEX
from olmo_shard.nn.losses import head_losses
from tests.support.close import BARS, close, products


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
@pytest.mark.parametrize("z_weight", [0.0, 0.3])
def test_losses_and_gradients_equal_those_of_torch(chunk: int, z_weight: float) -> None:
    torch.manual_seed(0)
    h, w = torch.randn(23, 12, requires_grad=True), torch.randn(50, 12, requires_grad=True)
    labels = torch.randint(0, 50, (23,))
    labels[::5] = IGNORE_INDEX
    losses = head_losses(h, w, labels, z_loss_weight=z_weight, chunk_tokens=chunk)
    (losses.objective / 17).backward()

    h64, w64 = (t.detach().double().requires_grad_() for t in (h, w))
    logits = h64 @ w64.T
    cross_entropy = F.cross_entropy(logits, labels, reduction="sum")
    z_loss = (logits.logsumexp(dim=1).square() * (labels != IGNORE_INDEX)).sum()
    ((cross_entropy + z_weight * z_loss) / 17).backward()
    # A token's loss has the error of its logits; z-loss multiplies it by twice the logsumexp.
    labelled = (labels != IGNORE_INDEX)[:, None]
    logits_scale = products(h, w.T).amax(dim=1, keepdim=True) * labelled
    lse = logits.detach().logsumexp(dim=1, keepdim=True)
    z_slope = 2 * lse.abs()
    close(losses.cross_entropy, cross_entropy, scale=logits_scale.sum(), dtype=torch.float32)
    close(losses.z_loss, z_loss, scale=(logits_scale * z_slope).sum(), dtype=torch.float32)
    # A logit's gradient is probability times slope, less one for the label.
    probabilities = (logits.detach() - lse).exp() * (1 + z_weight * z_slope) * (1 + logits_scale)
    slopes = (probabilities + F.one_hot(labels.clamp(min=0), 50)) * labelled / 17
    close(h.grad, h64.grad, scale=products(slopes, w))
    close(w.grad, w64.grad, scale=products(slopes.T, h))


def test_no_labels_gives_zero_and_zero_gradients() -> None:
    h, w = torch.randn(4, 3, requires_grad=True), torch.randn(9, 3, requires_grad=True)
    losses = head_losses(h, w, torch.full((4,), IGNORE_INDEX), z_loss_weight=0.1, chunk_tokens=2)
    losses.objective.backward()
    assert losses.objective.item() == 0
    assert h.grad is not None
    assert w.grad is not None
    assert not h.grad.any()
    assert not w.grad.any()


def test_an_ignored_token_with_infinite_logits_spoils_nothing() -> None:
    h = torch.randn(4, 3)
    h[1] = float("inf")
    h.requires_grad_()
    labels = torch.tensor([1, IGNORE_INDEX, 2, 3])
    w = torch.rand(9, 3, requires_grad=True)
    losses = head_losses(h, w, labels, z_loss_weight=0.1, chunk_tokens=4)
    losses.objective.backward()
    assert torch.isfinite(losses.objective)
    assert h.grad is not None
    assert h.grad.isfinite().all()
    assert w.grad is not None
    assert w.grad.isfinite().all()


def test_the_scale_of_bf16_gradients_is_not_rounded() -> None:
    """1 / 130557 in bf16 is 0.39 % off. The roundings of the elements are half of that at most, and
    change a norm, a sum of squares, by less.
    """
    torch.manual_seed(0)
    h = torch.randn(64, 32).bfloat16().requires_grad_()
    w, labels = torch.randn(50, 32).bfloat16(), torch.randint(0, 50, (64,))
    sizes = []
    for scale in (1.0, 1 / 130557):
        losses = head_losses(h, w, labels, z_loss_weight=0.0, chunk_tokens=16)
        (gradient,) = torch.autograd.grad(losses.objective * scale, h)
        sizes.append(gradient.double().norm() / scale)
    assert abs(sizes[1] / sizes[0] - 1) <= BARS[torch.bfloat16].rounding / 2


def test_evaluation_keeps_no_gradients() -> None:
    h, w = torch.randn(4, 3), torch.randn(9, 3)
    with torch.no_grad():
        losses = head_losses(h, w, torch.arange(4), z_loss_weight=0.0, chunk_tokens=2)
    assert not losses.objective.requires_grad
