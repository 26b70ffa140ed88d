"""``python -m olmo_shard`` runs the command line ``olmo-shard``."""

from olmo_shard.cli import main

main()
