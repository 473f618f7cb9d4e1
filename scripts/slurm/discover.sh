# What a job finds out before it starts ranks: the Python to use, the number of ranks per node, the address of the master.
# Sourced by pretrain_gpt.sbatch; uses say, die and REPOSITORY. Environment variables override what is found here.
# shellcheck shell=bash disable=SC2034 # what is set here is read by pretrain_gpt.sbatch

# find_program: PYTHON and TRAIN_SCRIPT, and CONTAINER (pyxis, apptainer, singularity or empty).
find_program() {
    TRAIN_SCRIPT=${TRAIN_SCRIPT:-$REPOSITORY/pretrain_gpt.py}
    [[ -f $TRAIN_SCRIPT ]] || die "no training script at $TRAIN_SCRIPT; set TRAIN_SCRIPT or run from a complete checkout"
    TRAIN_SCRIPT=$(cd "$(dirname "$TRAIN_SCRIPT")" && pwd)/$(basename "$TRAIN_SCRIPT")
    CONTAINER=""
    if [[ -n ${CONTAINER_IMAGE:-} ]]; then
        PYTHON=${PYTHON:-python3} # the image's own
        local runtime
        for runtime in apptainer singularity; do
            [[ -z $CONTAINER ]] && command -v "$runtime" >/dev/null && CONTAINER=$runtime
        done
        [[ $(srun --help 2>/dev/null) != *--container-image* ]] || CONTAINER=pyxis
        [[ -n $CONTAINER ]] || die "CONTAINER_IMAGE is set, but there is neither pyxis (srun --container-image) nor apptainer here"
        return
    fi
    if [[ -z ${PYTHON:-} ]]; then
        PYTHON=$REPOSITORY/.venv/bin/python
        [[ -x $PYTHON ]] || PYTHON=python3
    fi
    command -v "$PYTHON" >/dev/null || die "no Python at '$PYTHON'; set PYTHON or make the environment with scripts/quickstart.sh"
    "$PYTHON" -c 'import importlib.util, sys; sys.exit(sys.version_info < (3, 12) or not importlib.util.find_spec("torch"))' 2>/dev/null ||
        die "'$PYTHON' is older than 3.12 or has no torch; set PYTHON or make the environment with scripts/quickstart.sh"
}

# launch_options: SRUN_EXTRA (more options for srun) and LAUNCH (the command in front of the training script).
launch_options() {
    SRUN_EXTRA=()
    LAUNCH=("$PYTHON" -u)
    local program=${TRAIN_SCRIPT%/*} mounts
    mounts=$REPOSITORY:$REPOSITORY,$program:$program,$LOG_DIR:$LOG_DIR,$PWD:$PWD${CONTAINER_MOUNTS:+,$CONTAINER_MOUNTS}
    case $CONTAINER in
        pyxis) SRUN_EXTRA=(--container-image="$CONTAINER_IMAGE" --container-mounts="$mounts" --container-workdir="$PWD") ;;
        apptainer | singularity) LAUNCH=("$CONTAINER" exec --nv --bind "$mounts" --pwd "$PWD" "$CONTAINER_IMAGE" "$PYTHON" -u) ;;
    esac
    ((OVERCOMMIT == 0)) || SRUN_EXTRA+=(--overcommit)
}

# find_layout: one rank per requested task; else one per GPU; else one per node.
find_layout() {
    NODES=$SLURM_JOB_NUM_NODES
    local tasks=${SLURM_NTASKS:-} gpus=${SLURM_GPUS_ON_NODE:-0}
    if [[ -n ${SLURM_NTASKS_PER_NODE:-} ]]; then
        RANKS_PER_NODE=$SLURM_NTASKS_PER_NODE
        ((${tasks:-$((NODES * RANKS_PER_NODE))} == NODES * RANKS_PER_NODE)) ||
            die "$tasks tasks do not fill $NODES nodes with $RANKS_PER_NODE each; ask for --nodes and --ntasks-per-node alone"
    elif [[ -n $tasks ]]; then
        ((tasks % NODES == 0)) || die "$tasks tasks do not divide over $NODES nodes; ask for --nodes and --ntasks-per-node"
        RANKS_PER_NODE=$((tasks / NODES))
    elif ((gpus > 0)); then
        RANKS_PER_NODE=$gpus
    else
        RANKS_PER_NODE=1
        say "no tasks and no GPUs were asked for: one rank a node (sbatch --ntasks-per-node or --gpus-per-node changes it)"
    fi
    WORLD_SIZE=$((NODES * RANKS_PER_NODE))
    if ((gpus > 0 && RANKS_PER_NODE > gpus)); then
        die "$RANKS_PER_NODE ranks a node but $gpus GPUs: ask for --gpus-per-node $RANKS_PER_NODE or --ntasks-per-node $gpus"
    fi
    ((gpus <= RANKS_PER_NODE)) || say "warning: $((gpus - RANKS_PER_NODE)) of $gpus GPUs on each node stay idle (one rank uses one GPU)"

    # A step does not inherit sbatch's --cpus-per-task: without this a rank and its data loader would share one core.
    local cpus
    cpus=$(tr ',' '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-1}" | sed 's/(.*//' | sort -n | head -n 1)
    CPUS_PER_RANK=${SLURM_CPUS_PER_TASK:-$((cpus / RANKS_PER_NODE))}
    OVERCOMMIT=0
    if ((CPUS_PER_RANK < 1)); then
        CPUS_PER_RANK=1
        OVERCOMMIT=1
        say "warning: $RANKS_PER_NODE ranks share $cpus CPUs on a node; ask for --cpus-per-task"
    fi
}

# address_of NODE: a name or address at which other nodes reach NODE. The resolver need not know a node's name in Slurm
# (cloud nodes, several slurmd on one host), but it knows Slurm's NodeAddr.
address_of() {
    if getent ahosts "$1" >/dev/null; then
        printf '%s' "$1"
    else
        scontrol show node --oneliner "$1" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'
    fi
}

# port_is_free PORT: whether nothing listens there. This shell runs on the first node of the job, the master.
port_is_free() {
    local address
    for address in 127.0.0.1 "$MASTER_ADDR"; do
        ! timeout 5 bash -c ": <>/dev/tcp/$address/$1" 2>/dev/null || return 1
    done
}

# find_master: the first node, and a port computed from the job's number, so that jobs that share a node use different ports.
# Ports 10000 to 29999 are below those that Linux gives to clients. MASTER_PEER is the second node; the master uses it to
# find the interface for its traffic.
find_master() {
    local hosts candidate
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    ((${#hosts[@]} == NODES)) || die "scontrol names ${#hosts[@]} nodes in $SLURM_JOB_NODELIST, the job has $NODES"
    MASTER_ADDR=${MASTER_ADDR:-$(address_of "${hosts[0]}")}
    getent ahosts "$MASTER_ADDR" >/dev/null || die "the master '$MASTER_ADDR' cannot be resolved; set MASTER_ADDR to the address of ${hosts[0]}"
    MASTER_PEER=""
    ((NODES == 1)) || MASTER_PEER=$(address_of "${hosts[1]}")
    if [[ -n ${MASTER_PORT:-} ]]; then
        if [[ ! $MASTER_PORT =~ ^[1-9][0-9]{3,4}$ ]] || ((MASTER_PORT < 1024 || MASTER_PORT > 65535)); then
            die "MASTER_PORT=$MASTER_PORT is not a port between 1024 and 65535; leave it unset to have one chosen"
        fi
        port_is_free "$MASTER_PORT" || die "MASTER_PORT=$MASTER_PORT is in use on ${hosts[0]}; leave it unset to have one chosen"
        return
    fi
    for candidate in {0..19}; do
        MASTER_PORT=$((10000 + (SLURM_JOB_ID + candidate * 997) % 20000))
        port_is_free "$MASTER_PORT" && return
    done
    die "20 ports tried on ${hosts[0]}, the last $MASTER_PORT, all in use; set MASTER_PORT"
}

# seconds_left: until the time limit; an hour when the job has none.
seconds_left() {
    local end
    end=$(scontrol show job --oneliner "$SLURM_JOB_ID" | sed -n 's/.* EndTime=\([^ ]*\).*/\1/p')
    end=$(date -d "$end" +%s 2>/dev/null) || end=$(($(date +%s) + 3600))
    echo $((end - $(date +%s)))
}

# report_failure STATUS: prints which rank failed first, and the end of its log. FAILURE_CODE becomes that rank's exit code.
# srun's own status is the highest of all ranks, often that of a rank that srun killed.
report_failure() {
    FAILURE_CODE=$1
    if [[ -f $LOG_DIR/first_failure ]]; then
        local rank words
        read -r rank FAILURE_CODE words <"$LOG_DIR/first_failure"
        say "rank $rank failed first: $words; the other ranks were stopped. The end of $LOG_DIR/rank-$rank.log:"
        tail -n 25 "$LOG_DIR/rank-$rank.log" | sed "s/^/  rank $rank | /"
    else
        say "srun ended with $1 and no rank reported a failure: a node or Slurm itself ended the ranks, see srun's lines above"
    fi
}
