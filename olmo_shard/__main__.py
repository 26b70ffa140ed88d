"""``python -m olmo_shard`` is the same program as ``olmo-shard``."""

from olmo_shard.cli import main

main()
