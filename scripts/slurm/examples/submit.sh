# shellcheck shell=bash
#
# Sourced by the examples. submit NODES ARGUMENTS...: submits pretrain_gpt.sbatch on nodes of eight GPUs. With
# --balance-dry-run among the arguments, it describes the job on this machine instead, without Slurm and without a GPU.
#
# The examples take further arguments of pretrain_gpt.py, which override theirs: examples/mixtral_8x7b.sh --lr 1e-4.

slurm=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

submit() {
    local nodes=$1 python
    shift
    if [[ " $* " == *" --balance-dry-run "* ]]; then
        cd "$slurm/../.." || exit
        python=${PYTHON:-.venv/bin/python}
        command -v "$python" >/dev/null || python=python3
        WORLD_SIZE=$((8 * nodes)) exec "$python" "${TRAIN_SCRIPT:-pretrain_gpt.py}" "$@"
    fi
    if [ -z "${DATA:-}" ] || [ -z "${TOKENIZER:-}" ]; then
        echo "$(basename "$0"): set DATA to a corpus that scripts/prepare_data.py wrote, without .bin, and TOKENIZER to a" \
            "folder with a Hugging Face tokenizer; only --balance-dry-run works without" >&2
        exit 1
    fi
    if ! command -v sbatch >/dev/null; then
        echo "$(basename "$0"): sbatch is not installed; submit where Slurm is, or add --balance-dry-run" >&2
        exit 1
    fi
    exec sbatch --nodes "$nodes" --ntasks-per-node 8 --gpus-per-node 8 --time 24:00:00 --job-name "$(basename "$0" .sh)" \
        "$slurm/pretrain_gpt.sbatch" "$@"
}

# The job's files, on storage that every node can access. RUN: the folder of checkpoints and the report.
run=${RUN:-runs/$(basename "$0" .sh)}
if [ -n "${DATA:-}" ]; then data=(--data-path "$DATA" --split "99,1,0"); else data=(--mock-data); fi

# What all of them share.
# shellcheck disable=SC2034 # the examples read it
common=(
    --transformer-impl transformer_engine --bf16 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    "${data[@]}" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "${TOKENIZER:-tokenizer}"
    --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1
    --eval-interval 1000 --eval-iters 20 --log-interval 10
    --save "$run/checkpoint" --save-interval 500 --ckpt-format torch_dist
    --balance-report "$run/report" --cluster h100-8x400g
)
