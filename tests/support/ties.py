"""Near ties in routing: where two training runs may part although either is right.

The choice of experts is not continuous. Where the scores of the last expert chosen and of the first
one not chosen differ by no more than rounding, two layouts may send a token to different experts,
and from there on their losses differ by far more than rounding. So a test that compares two runs
to rounding uses a run without near ties, and asserts that there are none.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from olmo_shard.nn.router import Router

NEAR_TIE = 1e-6
"""Scores are below 1. Their rounding errors are some 1e-8 at the start of a run and grow as the
weights of two runs part.
"""


class Margins:
    """The smallest gap between a chosen and a refused expert's score, over all tokens so far."""

    def __init__(self) -> None:
        self.smallest = math.inf

    def note(self, router: nn.Module, _: object, routing: Any) -> None:
        if not isinstance(router, Router) or router.top_k == router.num_experts:
            return
        logits_TE = routing.logits_TE.detach()
        after = router.config.score_order == "after_topk"
        scores_TE = logits_TE if after else router._score(logits_TE)
        best_TE = torch.sort(scores_TE + router.expert_bias, dim=-1, descending=True).values
        gap_T = best_TE[:, router.top_k - 1] - best_TE[:, router.top_k]
        self.smallest = min(self.smallest, float(gap_T.min()))


@contextmanager
def watched_margins() -> Iterator[Margins]:
    """Watch the routers of all models that run inside, on this rank."""
    margins = Margins()
    handle = register_module_forward_hook(margins.note)
    try:
        yield margins
    finally:
        handle.remove()


def assert_no_near_tie(smallest: float) -> None:
    assert smallest > NEAR_TIE, f"a gap of {smallest:.1e} between scores: take another seed"
