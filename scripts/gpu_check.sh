#!/usr/bin/env bash
# The acceptance on real hardware, on a machine with one NVIDIA GPU or more: makes .venv, runs each part within its time
# limit, prints a table and adds it to benchmarks/log. Ranks share a GPU where there are fewer GPUs than ranks.
#
#     scripts/gpu_check.sh              at most 25 minutes
#     scripts/gpu_check.sh --dry-run    lists the parts and their limits, anywhere
#
# Exit code 0 when all parts that ran passed, 2 where nothing can run. What the parts print is in runs/gpu_check.
set -euo pipefail

case "$*" in
"" | --dry-run) ;;
*)
    echo "gpu_check.sh: cannot make sense of '$*'; it takes --dry-run or nothing" >&2
    exit 2
    ;;
esac

# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$repository"

if [ "${1:-}" = --dry-run ]; then
    python=$repository/.venv/bin/python
    "$python" -c '' 2>/dev/null || python=$(find_python)
    exec "$python" -m tests.gpu --dry-run
fi

# Before gigabytes are installed: neither a GPU that the driver lists, nor a driver at all (of Linux, of Windows below).
if [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ] && ! nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    echo "gpu_check.sh: no GPU: there is no NVIDIA driver here; --dry-run lists what would run" >&2
    exit 2
fi

prepare_environment dev
exec "$python" -m tests.gpu
