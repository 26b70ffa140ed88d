"""What a limit on the routes of an expert means for dispatch.

Each rank of tokens decides for itself which routes stay, so the decision does not depend on where
experts live. It does depend on the micro-batch, by definition.
"""

from olmo_shard.kernels.capacity import keep_within_capacity, most_routes

__all__ = ["keep_within_capacity", "most_rows"]


def most_rows(
    num_tokens: int, top_k: int, num_experts: int, num_ranks: int, factor: float | None
) -> int:
    """Rows that a rank sends to another one at most.

    :param num_tokens: tokens of a rank's micro-batch at most.
    """
    if factor is None:
        return num_tokens
    capacity = most_routes(num_tokens, top_k, num_experts, factor)
    return min(num_tokens, capacity * (num_experts // num_ranks))
