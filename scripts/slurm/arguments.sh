# Training arguments of pretrain_gpt.sbatch: refuses mistakes before the job waits in a queue, and adds what a requeued job
# needs. Sourced; uses say, die and job_field.
# shellcheck shell=bash disable=SC2034 # what is set here is read by pretrain_gpt.sbatch

# Options of sbatch that, written after the script's name, would silently become training arguments.
SBATCH_OPTIONS=" --nodes -N --ntasks -n --ntasks-per-node --gpus --gpus-per-node --gpus-per-task --gres --cpus-per-task -c \
--partition -p --account -A --time -t --qos -q --exclusive --mem --nodelist -w --job-name -J --signal --dependency "

check_arguments() {
    (($# > 0)) || die "no training arguments; give them after the script: sbatch --nodes 2 --ntasks-per-node 8 scripts/slurm/pretrain_gpt.sbatch --num-layers 24 ..."
    [[ $1 == -* ]] || die "the first argument '$1' is not an option; the training script is chosen with TRAIN_SCRIPT, its options follow directly"
    local argument
    for argument in "$@"; do
        [[ $SBATCH_OPTIONS != *" ${argument%%=*} "* ]] || die "$argument is an option of sbatch: put it before the script's name"
    done
}

# value_of NAME ARGUMENTS...: the last value of an option, given as "--name value" or "--name=value".
value_of() {
    local name=$1 value="" previous="" argument
    shift
    for argument in "$@"; do
        [[ $previous == "$name" ]] && value=$argument
        [[ $argument == "$name="* ]] && value=${argument#*=}
        previous=$argument
    done
    printf '%s' "$value"
}

has_flag() {
    local name=$1 argument
    shift
    for argument in "$@"; do [[ $argument == "$name" || $argument == "$name="* ]] && return 0; done
    return 1
}

# needs_one_queue ARGUMENTS...: whether Megatron requires CUDA_DEVICE_MAX_CONNECTIONS=1, as for tensor and context
# parallelism before Blackwell. Otherwise several queues to a GPU overlap transfers better; FSDP requires them.
needs_one_queue() {
    [[ " $* " != *fsdp* ]] && ! has_flag --overlap-moe-expert-parallel-comm "$@" || return 1
    local capability flag size
    capability=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -n 1)
    capability=${capability%%.*}
    [[ ! $capability =~ ^[0-9]+$ ]] || ((capability < 10)) || return 1
    ! has_flag --use-checkpoint-args "$@" || return 0 # the sizes are in the checkpoint
    for flag in --tensor-model-parallel-size --context-parallel-size; do
        size=$(value_of "$flag" "$@")
        [[ ! $size =~ ^[0-9]+$ ]] || ((size < 2)) || return 0
    done
    return 1
}

# last_checkpoint: the iteration of the last complete checkpoint in SAVE; Megatron writes this file last.
last_checkpoint() { cat "$SAVE/latest_checkpointed_iteration.txt" 2>/dev/null; }

# A requeued job runs the same command again. To continue, it loads from --save once there is a checkpoint; until then, the
# user's own --load is kept.
resume_arguments() {
    TRAIN_ARGUMENTS=("$@")
    SAVE=$(value_of --save "$@")
    FIRST_CHECKPOINT=""
    REQUEUE=1
    NO_REQUEUE_REASON=""
    if [[ -z $SAVE ]]; then
        REQUEUE=0
        NO_REQUEUE_REASON="without --save there is nothing to continue from"
    elif [[ $(job_field Requeue) == 0 ]]; then
        REQUEUE=0
        NO_REQUEUE_REASON="submitted with --no-requeue"
    fi
    if ((REQUEUE == 0)); then
        RESUME_NOTE="not requeued at the time limit: $NO_REQUEUE_REASON"
        return
    fi
    local flag
    for flag in --finetune --ckpt-step --no-load-optim; do
        ! has_flag "$flag" "$@" ||
            die "$flag would throw away progress at every requeue; start from other weights with --pretrained-checkpoint DIR, or submit with --no-requeue"
    done
    FIRST_CHECKPOINT=$(last_checkpoint)
    has_flag --exit-signal-handler "$@" || TRAIN_ARGUMENTS+=(--exit-signal-handler)
    if [[ -n $FIRST_CHECKPOINT || -z $(value_of --load "$@") ]]; then
        TRAIN_ARGUMENTS+=(--load "$SAVE")
    fi
    if [[ -n $FIRST_CHECKPOINT ]]; then
        RESUME_NOTE="continues from $SAVE, iteration $FIRST_CHECKPOINT; requeued at the time limit"
    else
        RESUME_NOTE="nothing in $SAVE yet; requeued at the time limit"
    fi
}
