#!/usr/bin/env bash
# One rank of a job: takes its number from Slurm, prints where it runs, trains with its output in its own log, and reports a
# failure. Started by srun in pretrain_gpt.sbatch, once per rank: rank.sh COMMAND ARGUMENTS...
set -u

export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID NODE_RANK=$SLURM_NODEID
export WORLD_SIZE=$SLURM_NTASKS LOCAL_WORLD_SIZE=$RANKS_PER_NODE

# Megatron takes GPU number LOCAL_RANK. Where Slurm shows each rank its one GPU (--gpus-per-task), that is number 0.
visible=${CUDA_VISIBLE_DEVICES:-}
if [[ -n $visible && $visible != *,* ]] && ((LOCAL_WORLD_SIZE > 1)); then
    export LOCAL_RANK=0
fi

# shellcheck source-path=SCRIPTDIR source=affinity.sh
source "$(dirname "${BASH_SOURCE[0]}")/affinity.sh"
choose_interfaces
log=$LOG_DIR/rank-$RANK.log
run=$((${SLURM_RESTART_COUNT:-0} + 1))
{
    echo "=== job $SLURM_JOB_ID, run $run"
    affinity_line
} >>"$log" || {
    echo "rank $RANK on ${SLURMD_NODENAME:-$(hostname)}: cannot write $log; set LOG_DIR to a directory that every node can write" >&2
    exit 2
}
# The job's own log shows every rank of a small job and the first node of a large one.
((WORLD_SIZE > 64 && NODE_RANK > 0)) || tail -n 1 "$log"

# Slurm signals every process of a rank. This shell ignores SIGTERM; training writes a checkpoint when it gets the signal.
trap : TERM
exec 2>>"$log"
"$@" >>"$log"
code=$?
if ((code == 0 || code == 143)); then # 143: ended by Slurm's SIGTERM
    exit "$code"
fi
words="exit code $code"
if ((code > 128)); then
    words="killed by SIG$(kill -l "$code" 2>/dev/null || echo " $((code - 128))")"
    ((code != 137)) || words+=" (often out of host memory: sbatch --mem)"
fi
# noclobber: the first rank that fails writes the file.
(set -o noclobber && echo "$RANK $code on ${SLURMD_NODENAME:-$(hostname)}, $words" >"$LOG_DIR/first_failure") 2>/dev/null
echo "rank $RANK on ${SLURMD_NODENAME:-$(hostname)} failed: $words" | tee -a "$log"
exit "$code"
