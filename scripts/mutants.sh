#!/usr/bin/env bash
# Mutation tests: plants faults in the wiring one at a time, in a copy of the tree, and checks that the tests that each
# fault names fail. Takes about an hour.
#
#     scripts/mutants.sh              all faults
#     scripts/mutants.sh relay.py     faults whose file or name contains this word
#     scripts/mutants.sh --list       list the faults
set -euo pipefail
# shellcheck source=scripts/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare_environment test dev
install_apart transformer_engine
install_apart emerging_optimizers
cd "$repository"

exec "$python" -m tests.mutants "$@"
