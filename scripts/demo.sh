#!/usr/bin/env bash
# Eight emulated ranks train a model with Mixtral's proportions whose layers, documents and experts are uneven: with each
# balancer alone, with all three, and with even work, the limit. Megatron-LM's trainer, messages and moves are real,
# computation waits for modelled time, at a pace that this machine can keep. Ends with a picture of what each balancer
# gains and of the pipeline before and after, and a sentence for each. About five minutes on two quiet cores.
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
code=0
"$python" -W ignore -m benchmarks.together --demo runs/demo "$@" || code=$?
[ "$code" != 3 ] || exit 1 # too busy, and it has said so
[ "$code" = 0 ] || fail "the demonstration stopped; its logs are in runs/demo"
"$python" -m balancing.report runs/demo/all/report --html runs/demo/report.html >/dev/null
echo
echo "Picture: runs/demo/together.png"
echo "Report:  runs/demo/report.html"
