#!/usr/bin/env bash
# Sixteen emulated ranks train a model whose layers, documents and experts are uneven, while the three balancers switch on
# one after another. Megatron-LM's trainer, messages and moves are real, computation waits for modelled time. Shows the time
# of each step, and ends with a picture of it and of the pipeline before and after. Five minutes are expected on two quiet
# cores; on busy ones the host's own work hides the gains.
#
#     scripts/demo.sh
#     scripts/demo.sh --short    two runs of short steps, to try it
#     scripts/demo.sh --venv     in .venv, also where the Python at hand has what is needed
#
# Everything it writes is in runs/demo, and in .venv where that is made. The network cards are limited where it runs as root with iproute2.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case "$*" in
"" | --short) ;;
*)
    echo "demo.sh: cannot make sense of '$*'; it takes --short, --venv or nothing" >&2
    exit 2
    ;;
esac

prepare_environment train "" # no extra
cd "$repository"

mkdir -p runs/demo || fail "cannot write to $repository/runs/demo"
rm -rf runs/demo/*
"$python" -W ignore -m benchmarks.together --demo runs/demo "$@" || fail "the demonstration stopped; its logs are in runs/demo"
"$python" -m balancing.report runs/demo/all/report --html runs/demo/report.html
echo
echo "Picture: runs/demo/together.png"
echo "Report:  runs/demo/report.html"
