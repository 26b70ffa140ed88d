#!/usr/bin/env bash
# Train without a scheduler: on each of NODES hosts, where HEAD is the name of the first,
#     HEAD=first-host NODES=2 scripts/torchrun.sh configs/olmoe-1b-7b.yaml [train.steps=1000 ...]
# GPUS is the number of ranks per host. Two jobs with one HEAD need different numbers for PORT.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
: "${HEAD:?set it to the name of the first host}" "${NODES:?set it to the number of hosts}"
exec "$root/.venv/bin/torchrun" --nnodes "$NODES" --nproc-per-node "${GPUS:-8}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29400}" -m olmo_shard train "$@"
