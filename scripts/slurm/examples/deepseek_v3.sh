#!/usr/bin/env bash
# A model like DeepSeek-V3 on 128 nodes of eight GPUs: 61 layers in 16 stages (the first three layers are dense), 256 experts
# over the 64 ranks of eight nodes, multi-latent attention, and one layer of multi-token prediction, which stays on the last
# stage. Expert bias balances routing over many batches, but not within each batch, so hot experts get replicas. Dense
# layers, head and prediction make stages uneven, so layers move.
#
#     DATA=/shared/corpus TOKENIZER=/shared/tokenizer RUN=/shared/runs/v3 scripts/slurm/examples/deepseek_v3.sh
#     scripts/slurm/examples/deepseek_v3.sh --balance-dry-run
set -euo pipefail
# shellcheck source=scripts/slurm/examples/submit.sh
source "$(dirname "${BASH_SOURCE[0]}")/submit.sh"

submit 128 "${common[@]}" \
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 --vocab-size 129280 \
    --seq-length 4096 --max-position-embeddings 4096 \
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 \
    --v-head-dim 128 --rotary-scaling-factor 40 --mscale 1 --mscale-all-dim 1 --qk-layernorm \
    --num-experts 256 --moe-layer-freq "([0]*3+[1]*58)" --moe-ffn-hidden-size 2048 --moe-router-topk 8 \
    --moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid --moe-router-enable-expert-bias \
    --moe-router-bias-update-rate 1e-3 --moe-router-num-groups 8 --moe-router-group-topk 4 \
    --moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 \
    --moe-router-dtype fp32 --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type flex \
    --moe-flex-dispatcher-backend deepep \
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 \
    --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout "Ettt|(tttt|)*14ttmL" \
    --expert-model-parallel-size 64 --expert-tensor-parallel-size 1 \
    --recompute-granularity selective --recompute-modules mla_up_proj mlp moe layernorm \
    --micro-batch-size 1 --global-batch-size 8192 --train-iters 100000 --lr 2.2e-4 --min-lr 2.2e-5 \
    --balance-experts --balance-layers "$@"
