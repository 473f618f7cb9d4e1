#!/usr/bin/env bash
# A dense model of 7 billion parameters with 128k tokens a sequence on 16 nodes of eight GPUs. Packed documents are books,
# code and web pages: most are short, a few as long as the sequence. Context-parallel ranks with equal tokens therefore have
# unequal attention, and sequences are balanced over the 8 ranks of a node. The head of 128k words makes the last of the two
# stages slower, so layers are balanced once.
#
#     DATA=/shared/corpus TOKENIZER=/shared/tokenizer RUN=/shared/runs/7b scripts/slurm/examples/dense_7b_long_context.sh
#     scripts/slurm/examples/dense_7b_long_context.sh --balance-dry-run
set -euo pipefail
# shellcheck source=scripts/slurm/examples/submit.sh
source "$(dirname "${BASH_SOURCE[0]}")/submit.sh"

submit 16 "${common[@]}" \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --rotary-base 8000000 --vocab-size 128256 \
    --seq-length 131072 --max-position-embeddings 131072 --dataloader-inter-document-masking \
    --pipeline-model-parallel-size 2 --context-parallel-size 8 \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
    --micro-batch-size 1 --global-batch-size 64 --train-iters 20000 --lr 2e-4 --min-lr 2e-5 \
    --balance-sequences --balance-layers-once "$@"
