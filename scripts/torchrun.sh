#!/usr/bin/env bash
# On each of NODES hosts: HEAD=first-host NODES=2 scripts/torchrun.sh configs/olmoe-1b-7b.yaml
set -euo pipefail
exec .venv/bin/torchrun --nnodes "$NODES" --nproc-per-node "${GPUS:-8}" --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:29400" -m olmo_shard train "$@"
