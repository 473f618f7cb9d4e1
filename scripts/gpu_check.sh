#!/usr/bin/env bash
# Acceptance test on one or more NVIDIA GPUs, 12 minutes on one H100 with 16 cores. Parts are chosen by worth so that they
# fit; what only checks numbers runs side by side, costs run alone. Ranks share GPUs if there are fewer GPUs than ranks.
#
#     scripts/gpu_check.sh                  all parts; run it again for those that did not fit or that were stopped before
#     scripts/gpu_check.sh --minutes N      at most so many minutes
#     scripts/gpu_check.sh PART ...         these parts, even if they have run before
#     scripts/gpu_check.sh --out DIR        write figures, tables and output to DIR; runs/gpu_check by default
#     scripts/gpu_check.sh --dry-run        lists the parts, what each shows and its seconds; needs no GPU
#     scripts/gpu_check.sh --rehearse       on the CPU device, where an import takes as long as beside a GPU
#     scripts/gpu_check.sh --venv           use .venv, even if another Python has all packages
#
# NCCL_LIBRARY=FILE takes the place of torch's NCCL: ranks of 2.30 or newer that share a GPU talk at memory speed.
#
# Exit code 0 if all parts passed, 1 if one failed, 3 if none failed but not all ran, 2 if nothing can run.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

if [[ " $* " == *" --dry-run "* ]]; then
    # Any Python can list them, also one that could not run them.
    for python in "$repository/.venv/bin/python" ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3 python; do
        ! "$python" -c '' 2>/dev/null || break
    done
    cd "$repository"
    exec "$python" -m tests.gpu "$@"
fi

if [ -n "${NCCL_LIBRARY:-}" ]; then
    if [ ! -r "$NCCL_LIBRARY" ]; then
        echo "gpu_check.sh: NCCL_LIBRARY=$NCCL_LIBRARY cannot be read; name a file libnccl.so.2" >&2
        exit 2
    fi
    NCCL_LIBRARY=$(realpath "$NCCL_LIBRARY")
fi

# Checked before gigabytes are installed: no driver (of Linux, or of Windows under WSL), and no GPU that one lists.
if [[ " $* " != *" --rehearse "* ]] && [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ] &&
    ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "gpu_check.sh: no GPU: there is no NVIDIA driver here; --dry-run lists what would run" >&2
    exit 2
fi

prepare_environment gpu dev
# A folder given relative to where the script was started.
export GPU_CHECK_FROM=$PWD
cd "$repository"
[ -z "${NCCL_LIBRARY:-}" ] || export LD_PRELOAD="$NCCL_LIBRARY${LD_PRELOAD:+:$LD_PRELOAD}"
exec "$python" -m tests.gpu "$@"
