#!/usr/bin/env bash
# Runs a script as in a container that has PyTorch but no network. Makes an environment with the packages of such a
# container, without megatron-balance and megatron-core, and runs the script in it with no package index to reach.
# megatron-core is a wheel in FOLDER, named by MEGATRON_CORE. Takes 6 GB in FOLDER, and needs a network the first time.
#
#     scripts/rehearse.sh FOLDER scripts/quickstart.sh
#     scripts/rehearse.sh FOLDER scripts/gpu_check.sh --rehearse    the acceptance, on the CPU device
#
# PYTHON names a Python 3.12; TORCH the release of PyTorch, 2.11.0 by default. REAL_TRANSFORMER_ENGINE names a folder with a
# build of Transformer Engine for that release, which the script then finds as in a container for GPUs.
set -euo pipefail
[ $# -ge 2 ] || { echo "rehearse.sh: name a folder, and a script to run there" >&2 && exit 2; }
folder=$1
shift
packages=(
    "torch==${TORCH:-2.11.0}" einops numpy psutil rich jinja2 pyyaml pytest pytest-xdist hypothesis scipy matplotlib
    tensorboard
)
if [ ! -e "$folder/ready" ]; then
    "${PYTHON:-python3.12}" -m venv --clear "$folder/environment"
    "$folder/environment/bin/pip" install --quiet "${packages[@]}"
    "$folder/environment/bin/pip" download --quiet --no-deps --only-binary :all: --dest "$folder" megatron-core==0.19.2
    mkdir -p "$folder/home"
    touch "$folder/ready"
fi
engine=${REAL_TRANSFORMER_ENGINE:+$(cd "$REAL_TRANSFORMER_ENGINE" && pwd)}
if [ -n "$engine" ] && [ ! -e "$folder/imports" ]; then
    grep -v '^transformer_engine==' "$(dirname "$0")/transformer_engine.txt" >"$folder/imports.txt"
    "$folder/environment/bin/pip" install --quiet --no-deps --requirement "$folder/imports.txt"
    mv "$folder/imports.txt" "$folder/imports"
fi
folder=$(cd "$folder" && pwd)
# PYTHON takes precedence over a .venv of the checkout.
exec env -i HOME="$folder/home" PATH="$folder/environment/bin:/usr/bin:/bin" PYTHON="$folder/environment/bin/python3" \
    MEGATRON_CORE="$folder" PIP_NO_INDEX=1 PIP_INDEX_URL=http://127.0.0.1:9/simple TERM="${TERM:-dumb}" \
    ${engine:+"PYTHONPATH=$engine"} "$@"
