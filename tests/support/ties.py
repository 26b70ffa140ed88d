"""Near ties in routing: two correct training runs may choose different experts.

The choice of experts is not continuous. If the scores of the last chosen expert and of the first
expert that is not chosen differ by no more than rounding, two layouts may send a token to different
experts. After that their losses differ by far more than rounding. So a test that compares two runs
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
"""Scores are below 1. Their rounding errors are about 1e-8 at the start of a run, and grow with the
difference between the weights of two runs.
"""


class Margins:
    """Smallest gap between the scores of a chosen and an unchosen expert, over all tokens."""

    def __init__(self) -> None:
        self.smallest = math.inf

    def note(self, router: nn.Module, _: object, routing: Any) -> None:
        """Forward hook of all modules: update the gap with a router's output."""
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
    """Measure the margins of all routers that run inside the context, on this rank."""
    margins = Margins()
    handle = register_module_forward_hook(margins.note)
    try:
        yield margins
    finally:
        handle.remove()


def assert_no_near_tie(smallest: float) -> None:
    """Fail if the smallest gap is within reach of rounding errors."""
    assert smallest > NEAR_TIE, f"a gap of {smallest:.1e} between scores: take another seed"
