#!/usr/bin/env bash
# Installs Slurm and munge from the distribution. tests/tools/test_slurm.py starts its own cluster with them on one machine.
# Configures and starts nothing. Needs root on a system with apt-get.
set -u -o pipefail

programs=(munged slurmctld slurmd sbatch srun scontrol)
export PATH=$PATH:/usr/sbin:/sbin

installed() {
    local program
    for program in "${programs[@]}"; do command -v "$program" >/dev/null || return 1; done
}

if installed; then
    echo "Slurm is installed: $(slurmd -V)"
    exit 0
fi
if ! command -v apt-get >/dev/null || ((EUID != 0)); then
    echo "install_slurm.sh: needs root and apt-get; elsewhere install slurmctld, slurmd, the Slurm clients and munge by hand" >&2
    exit 1
fi
log=$(mktemp)
trap 'rm -f "$log"' EXIT
# RUNLEVEL=1 keeps the packages from starting their services.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
if ! {
    timeout 300 apt-get -o DPkg::Lock::Timeout=120 update &&
        timeout 600 apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends slurm-wlm munge
} >"$log" 2>&1; then
    echo "install_slurm.sh: apt-get failed: $(grep -E '^(E|Err):' "$log" | head -n 1)" >&2
    exit 1
fi
installed || {
    echo "install_slurm.sh: the packages slurm-wlm and munge lack one of: ${programs[*]}" >&2
    exit 1
}
echo "Slurm is installed: $(slurmd -V)"
