#!/usr/bin/env bash
# Shows what each balancer gains on eight emulated ranks. The model has Mixtral's proportions; its layers, documents and
# experts are uneven. It runs with each balancer alone, with all three, and with even work, the limit. Megatron-LM's
# trainer, messages and moves are real. Computation is replaced by waiting for modelled time, slowed down so
# that this machine keeps up. Ends with a figure of the gains and of the pipeline before and after, and a sentence on
# each. Takes about five minutes on two idle cores.
#
#     scripts/demo.sh
#     scripts/demo.sh --short    two runs of short steps, for a first try
#     scripts/demo.sh --venv     use .venv, even if another Python has all packages
#
# Writes to runs/demo, and to .venv if it has to make one. Limits network bandwidth if run as root with iproute2.
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

case "$*" in
"" | --short) ;;
*)
    echo "demo.sh: unknown arguments '$*'; it takes --short, --venv or nothing" >&2
    exit 2
    ;;
esac

prepare_environment train "" # no extra
cd "$repository"

mkdir -p runs/demo || fail "cannot write to $repository/runs/demo"
rm -rf runs/demo/*
code=0
"$python" -W ignore -m benchmarks.together --demo runs/demo "$@" || code=$?
[ "$code" != 3 ] || exit 1 # the machine is too busy, as the demonstration has printed
[ "$code" = 0 ] || fail "the demonstration stopped; its logs are in runs/demo"
"$python" -m balancing.report runs/demo/all/report --html runs/demo/report.html >/dev/null
echo
echo "Picture: runs/demo/together.png"
echo "Report:  runs/demo/report.html"
