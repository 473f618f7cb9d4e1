#!/usr/bin/env bash
# From a fresh clone to a trained model: finds a Python or makes .venv, prepares a corpus, trains a small mixture-of-experts
# GPT on four processes with all three balancers, and reports what they gained. There are two pipeline stages; the two ranks
# of a stage share documents and experts. From iteration 30 on the first layers are frozen, so the first stage idles until
# layers move.
#
#     scripts/quickstart.sh            safe to run again: finished steps are skipped, training continues from its last checkpoint
#     scripts/quickstart.sh --again    train from the beginning
#     scripts/quickstart.sh --venv     use .venv, even if another Python has all packages
#
# Writes to runs/quickstart, and to .venv if it has to make one. Uses CUDA with four GPUs or more, otherwise the CPU.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case "$*" in
"" | --again) ;;
*)
    echo "quickstart.sh: unknown arguments '$*'; it takes --again, --venv or nothing" >&2
    exit 2
    ;;
esac

prepare_environment train "" # no extra
cd "$repository"

run=runs/quickstart
corpus=$run/data/functions
iterations=55

mkdir -p "$run" || fail "cannot write to $repository/$run"
[ "${1:-}" != --again ] || rm -rf "$run/checkpoint" "$run/report" "$run/report.html" "$run/tensorboard"

if [ -e "$corpus.bin" ] && [ -e "$corpus.idx" ]; then
    echo "Corpus: $corpus.bin and .idx exist"
else
    echo "Corpus: writing the functions of the Python standard library, a document each, to $corpus.bin and .idx"
    "$python" scripts/prepare_data.py --stdlib --functions --append-eod --overwrite --output-prefix "$corpus"
fi

# A model without its measurements gives no report, so it is trained again.
[ -e "$run/report/events.jsonl" ] || rm -rf "$run/checkpoint"
trained() {
    [ "$(cat "$run/checkpoint/latest_checkpointed_iteration.txt" 2>/dev/null)" = "$iterations" ]
}

if trained; then
    echo "Model: $run/checkpoint is trained already (to train again: scripts/quickstart.sh --again)"
else
    device=(--device auto --bf16)
    program=examples/dynamic_models/pretrain.py
    gpus=$("$python" -W ignore -c 'import torch; print(torch.cuda.device_count())')
    if [ "$gpus" -lt 4 ]; then
        device=(--device cpu)
        program=scripts/pretrain_paced.py # moved layers shorten its steps, although processes share cores
        [ "$gpus" = 0 ] || echo "$gpus GPU(s), but the four processes need one each: training on the CPU"
    fi
    echo "Model: training for $iterations iterations, about four minutes on two cores; log in $run/train.log"
    [ "$program" = examples/dynamic_models/pretrain.py ] ||
        echo "Paced: a layer takes 60 ms forward and 120 ms backward, as on a slow device for each process"

    # A mixture-of-experts GPT on two stages of two ranks. Later flags win.
    read -r -d "" -a model <examples/small_moe.flags || true
    balance=(
        --freeze-layers 3 --freeze-layers-start 30
        --balance-experts --balance-sequences
        --balance-layers --layer-balance-interval 10 --balance-report "$run/report"
    )
    data=(--data-path "$corpus" --num-workers 0)
    training=(
        --global-batch-size 4 --train-iters "$iterations"
        --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0.1 --adam-beta2 0.95
        --eval-interval 25 --eval-iters 2 --log-interval 5
        --save "$run/checkpoint" --load "$run/checkpoint" --save-interval 25 --ckpt-format torch_dist
        --tensorboard-dir "$run/tensorboard"
    )
    # The lines of Megatron's log to show; the file has all of them.
    essentials='
        s/^ *\[[^]]*\] *iteration +([0-9]+)\/ *([0-9]+) .*iteration \(ms\): ([0-9.]+) .*(lm loss: [^ ]+).*/iteration \1 of \2: \4, \3 ms/p
        s/^ *(validation loss at iteration [0-9]+) \| lm loss value: ([^ ]+).*/\1: \2/p
        /^> (device|patched|layers|sequences|experts|gained)|: error:|Error: /p'
    # One thread a process: the four share the cores.
    OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} CUDA_DEVICE_MAX_CONNECTIONS=1 \
        "$python" -m torch.distributed.run --standalone --nproc-per-node 4 \
        "$program" "${device[@]}" "${model[@]}" "${data[@]}" "${training[@]}" "${balance[@]}" 2>&1 |
        tee "$run/train.log" | sed -unE "$essentials" || fail "training stopped; its log is $run/train.log"
    trained || fail "training ended without its last checkpoint; its log is $run/train.log"
fi

"$python" -m balancing.report "$run/report" --html "$run/report.html" >"$run/report.txt"
echo
sed '/^(figures are of/,$d' "$run/report.txt"
echo
echo "Checkpoint:  $run/checkpoint"
echo "Report:      $run/report.html (tables: $run/report.txt)"
echo "Timeline:    $run/report/trace.json (open it in https://ui.perfetto.dev)"
echo "TensorBoard: $python -m tensorboard.main --logdir $run/tensorboard"
# What each balancer gained in this run, last on the screen.
sed -n '/what balancing gained/,/^ *$/p' "$run/report.txt"
