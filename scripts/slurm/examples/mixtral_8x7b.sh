#!/usr/bin/env bash
# A model like Mixtral 8x7B on 8 nodes of eight GPUs: four stages, each with two expert-parallel groups of eight ranks. The
# auxiliary loss is small, so routers may prefer experts, and hot experts get replicas. Documents are balanced over the
# context-parallel ranks, and layers move if stages are uneven.
#
#     DATA=/shared/corpus TOKENIZER=/shared/tokenizer RUN=/shared/runs/mixtral scripts/slurm/examples/mixtral_8x7b.sh
#     scripts/slurm/examples/mixtral_8x7b.sh --balance-dry-run
set -euo pipefail
# shellcheck source=scripts/slurm/examples/submit.sh
source "$(dirname "${BASH_SOURCE[0]}")/submit.sh"

submit 8 "${common[@]}" \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --rotary-base 1000000 --vocab-size 32000 \
    --seq-length 32768 --max-position-embeddings 32768 --dataloader-inter-document-masking \
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 14336 --moe-grouped-gemm \
    --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 \
    --moe-permute-fusion --moe-router-dtype fp32 \
    --pipeline-model-parallel-size 4 --context-parallel-size 2 --expert-model-parallel-size 8 \
    --recompute-granularity selective --recompute-modules moe layernorm \
    --micro-batch-size 1 --global-batch-size 256 --train-iters 50000 --lr 3e-4 --min-lr 3e-5 \
    --balance-experts --balance-sequences --balance-layers "$@"
