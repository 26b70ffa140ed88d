"""The log says which numbers are FP32."""

from typing import Any

import pytest

from olmo_shard.config import ParallelConfig
from olmo_shard.train.precision import describe_precision

BF16 = {"compute_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "precision float32 throughout"),
        ({"mode": "fsdp", "ddp": {"grad_dtype": "bfloat16"}}, "precision float32 throughout"),
        (
            BF16,
            "bfloat16 weights and activations; gradients add up in float32 and travel in float32",
        ),
        (BF16 | {"ddp": {"wire_dtype": "bfloat16"}}, "add up in float32 and travel in bfloat16"),
        (BF16 | {"ddp": {"grad_dtype": "bfloat16"}}, "add up in bfloat16 and travel in bfloat16"),
        ({"ddp": {"wire_dtype": "bfloat16"}}, "precision float32 weights and activations"),
    ],
)
def test_the_line_names_the_types(fields: dict[str, Any], said: str) -> None:
    assert said in describe_precision(ParallelConfig.model_validate(fields))
