"""The registry of update rules: one line per rule."""

from olmo_shard.optim.adamw import AdamW
from olmo_shard.optim.sgd import SGD
from olmo_shard.optim.update_rule import UpdateRule

RULES: dict[str, type[UpdateRule]] = {
    "adamw": AdamW,
    "sgd": SGD,
}
"""Update rules by ``optim.name``."""
