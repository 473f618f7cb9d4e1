#!/usr/bin/env bash
# Lints, type-checks and tests. Uses the first Python that has what the tests import, else .venv, which it makes if there is
# none. Checks and tests whose packages are missing (ruff, mypy, those of scripts/*.txt) are skipped, with a note.
#
#     scripts/test.sh                       what tells most, in ten minutes on two quiet cores
#     scripts/test.sh --all                 everything; a sample of the large families of combinations
#     scripts/test.sh --exhaustive          every combination
#     scripts/test.sh --all --sample 7      an eighth of those combinations as well, drawn by a seed, as CI does
#     scripts/test.sh --all --minutes 45    the second tier in an order that --sample draws, until the time is up
#     scripts/test.sh tests/layers -k move  arguments go to pytest, which then leaves out no test that --all runs
#     scripts/test.sh -n 0 --pdb            in one process, to debug
#     scripts/test.sh --fuzz 20 --seed 7    random command lines instead: each trains two steps or is refused in one line
#     scripts/test.sh --venv                use .venv, with all packages
#     scripts/test.sh --soak 300 --seed 7   long runs that are killed and resumed; nothing may leak
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test dev
install_apart transformer_engine
install_apart flash_attn
install_apart emerging_optimizers
install_apart megatron_bridge
install_apart verl
install_apart megatron_core
install_apart megatron_core_0_18
[ -z "${REAL_TRANSFORMER_ENGINE:-}" ] || install_apart torch_2_11
cd "$repository"

"$python" --version
"$python" -m pip list --disable-pip-version-check 2>/dev/null |
    grep -E '^(torch|megatron-core|numpy|pytest|ruff|mypy|transformer-engine|flash-attn) ' || true

if [ "${1:-}" = --fuzz ]; then
    exec "$python" -m tests.support.fuzz --runs "${@:2}"
elif [ "${1:-}" = --soak ]; then
    [[ "${2:-}" == [0-9]* ]] || set -- --soak 300 "${@:2}"
    exec "$python" -m tests.support.soak --steps "${@:2}"
elif [ $# = 0 ]; then
    set -- -m "not thorough"
elif [ "$1" = --all ]; then
    shift
fi

has() {
    "$python" -m "$1" --version >/dev/null 2>&1 || { echo "$1 is not installed: skipped" && false; }
}
if has ruff; then
    "$python" -m ruff check .
    "$python" -m ruff format --check .
fi
if has mypy; then "$python" -m mypy; fi
# Three workers for two cores, since ranks wait for each other and for what they start. All tests of a file run in one
# worker, which keeps reference runs.
exec "$python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
