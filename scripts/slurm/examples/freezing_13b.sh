#!/usr/bin/env bash
# Continued training of a dense model of 13 billion parameters on 16 nodes of eight GPUs. Front layers are frozen one by one
# when they have stopped changing (Egeria). Frozen layers only run forward, so the first stages would idle: layers move to
# them. Once fewer stages are enough, the nodes of the others are returned to Slurm while training continues.
#
#     DATA=/shared/corpus TOKENIZER=/shared/tokenizer RUN=/shared/runs/13b scripts/slurm/examples/freezing_13b.sh
#     scripts/slurm/examples/freezing_13b.sh --balance-dry-run
set -euo pipefail
# shellcheck source=scripts/slurm/examples/submit.sh
source "$(dirname "${BASH_SOURCE[0]}")/submit.sh"
export TRAIN_SCRIPT=${TRAIN_SCRIPT:-$(cd "$slurm/../.." && pwd)/examples/dynamic_models/pretrain.py}

submit 16 "${common[@]}" \
    --num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40 --vocab-size 32000 \
    --seq-length 4096 --max-position-embeddings 4096 \
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8 \
    --micro-batch-size 1 --global-batch-size 512 --train-iters 30000 --lr 5e-5 --min-lr 5e-6 \
    --freeze-layers 24 --freeze-layers-start 1000 --freeze-layers-interval 200 --freeze-layers-policy plasticity \
    --balance-layers --layer-balance-interval 200 --repack-throughput-floor 0.95 \
    --balance-config "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/freezing_13b.yaml" "$@"
