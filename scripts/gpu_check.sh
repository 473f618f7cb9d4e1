#!/usr/bin/env bash
# The acceptance on real hardware, on a machine with one NVIDIA GPU or more: runs each part within its time limit, what is
# worth most first, and writes down what came of it. Ranks share a GPU where there are fewer GPUs than ranks.
#
#     scripts/gpu_check.sh                  all parts; started again after it was stopped, it goes on with the next part
#     scripts/gpu_check.sh PART ...         these parts, also where they have run before
#     scripts/gpu_check.sh --out DIR        where figures, tables and output of the parts go; runs/gpu_check by default
#     scripts/gpu_check.sh --dry-run        lists the parts, what each shows and its limit, anywhere
#     scripts/gpu_check.sh --venv           in .venv, also where the Python at hand has what is needed
#
# Exit code 0 when all parts passed, 1 when one failed, 3 when none failed but not all ran, 2 where nothing can run.
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

# Before gigabytes are installed: neither a GPU that the driver lists, nor a driver at all (of Linux, of Windows below).
if [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ] && ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "gpu_check.sh: no GPU: there is no NVIDIA driver here; --dry-run lists what would run" >&2
    exit 2
fi

prepare_environment gpu dev
# A folder given relative to where the script was started.
export GPU_CHECK_FROM=$PWD
cd "$repository"
exec "$python" -m tests.gpu "$@"
