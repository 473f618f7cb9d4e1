#!/usr/bin/env bash
# Plant faults in the wiring one at a time, in a copy of the tree, and see that the tests kill them. Takes an hour or so.
#
#     scripts/mutants.sh              all of them
#     scripts/mutants.sh relay.py     those whose file or name has this word
#     scripts/mutants.sh --list       what there is
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test dev
install_apart transformer_engine
install_apart emerging_optimizers
cd "$repository"

exec "$python" -m tests.mutants "$@"
