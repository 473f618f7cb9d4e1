# shellcheck shell=bash
#
# Sourced by the other scripts of this folder. Finds a Python that has what a script needs, and makes .venv only if there
# is none. Sets `python`, the interpreter, and `repository`. Removes --venv from the script's arguments: with it, .venv is
# used, and made or updated first. With --help, prints the script's first comment and exits.
#
# PYTHON=/path/to/python3.12 names an interpreter. MEGATRON_CORE=PATH names a wheel or a folder of megatron-core.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The versions that megatron-core 0.19.2 has wheels for, best first.
python_versions=(3.12 3.13)
wanted="Python 3.12 or 3.13"

venv_only=
for argument in "$@"; do
    shift
    if [ "$argument" = --help ] || [ "$argument" = -h ]; then
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" # the script's first comment
        exit 0
    fi
    if [ "$argument" = --venv ]; then venv_only=yes; else set -- "$@" "$argument"; fi
done

[ -z "${MEGATRON_CORE:-}" ] || [[ $MEGATRON_CORE == /* ]] || export MEGATRON_CORE="$PWD/$MEGATRON_CORE"

fail() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# Whether $1 runs, is Python $2 and can make a virtual environment. The shims of pyenv exist for every version it has
# installed but run only for the selected ones, so an interpreter counts only once it has been run.
is_python() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$2" \
        >/dev/null 2>&1
}

supported() {
    local version
    for version in "${python_versions[@]}"; do
        is_python "$1" "$version" && return
    done
    return 1
}

# Prints the path of a suitable interpreter.
find_python() {
    local version candidate
    if [ -n "${PYTHON:-}" ]; then
        supported "$PYTHON" && command -v "$PYTHON" && return
        fail "PYTHON=$PYTHON is not $wanted with the venv module; unset it or name another"
    fi
    for version in "${python_versions[@]}"; do
        for candidate in \
            "python$version" python3 python \
            "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$version".*/bin/python \
            "$(uv python find --no-project --system "$version" 2>/dev/null || true)"; do
            if [ -n "$candidate" ] && is_python "$candidate" "$version"; then
                command -v "$candidate"
                return
            fi
        done
    done
    fail "no $wanted with the venv module on PATH, in pyenv or in uv; install one, for example with" \
        "'uv python install 3.12', 'pyenv install 3.12' or 'apt-get install python3.12-venv'"
}

# ask_doctor PYTHON NEED: prints the doctor's two lines: an interpreter and a folder of megatron-core.
ask_doctor() {
    (cd "$repository" && "$1" -m balancing.doctor --need "$2")
}

# find_complete NEED EXTRA: prints the doctor's lines for the first Python that has what NEED (train, test or gpu) asks for.
# Candidates: the one that PYTHON names, else those of an active environment, of .venv, and on PATH. Fails if none has it,
# and then prints what the first suitable candidate lacks.
find_complete() {
    local candidate candidates=() lacks=
    if [ -n "${PYTHON:-}" ]; then
        candidates=("$PYTHON")
    else
        [ -z "${VIRTUAL_ENV:-}" ] || candidates=("$VIRTUAL_ENV/bin/python")
        ! is_current "$2" || candidates+=("$repository/.venv/bin/python")
        candidates+=("${python_versions[@]/#/python}" python3)
    fi
    for candidate in "${candidates[@]}"; do
        candidate=$(type -P "$candidate") || continue
        [[ $candidate == /* ]] || candidate=$PWD/$candidate
        ask_doctor "$candidate" "$1" 2>/dev/null && return
        if [ -z "$lacks" ] && { [ -n "${PYTHON:-}" ] || supported "$candidate"; }; then
            lacks=$(ask_doctor "$candidate" "$1" 2>&1 || true)
        fi
    done
    echo "${lacks##*balancing.doctor: error: }"
    return 1
}

# prepare_environment NEED EXTRA: sets `python` to an interpreter that has what NEED asks for: one found by find_complete,
# else that of .venv, after installing this package into it, with its extra EXTRA unless that is empty.
prepare_environment() {
    local need=$1 extra=$2 answer="" core
    [ -z "${PYTHON:-}" ] || type -P "$PYTHON" >/dev/null ||
        fail "PYTHON=$PYTHON is not $wanted with the venv module; unset it or name another"
    if [ -z "$venv_only" ] && answer=$(find_complete "$need" "$extra"); then
        python=${answer%%$'\n'*}
        [ "$python" = "$repository/.venv/bin/python" ] || echo "Python: $python has what is needed"
    else
        [ -z "$answer" ] || echo "$answer"
        make_environment "$extra"
        answer=$(ask_doctor "$python" "$need") || exit 1
    fi
    # Programs that a script starts find the checkout and megatron-core even if these are not installed.
    core=${answer#"$python"}
    PYTHONPATH=${core:+${core#$'\n'}:}$repository${PYTHONPATH:+:$PYTHONPATH}
    export PYTHONPATH
    unset MEGATRON_CORE
}

# What an installation depends on. A checkout that was moved needs a new one, since .venv holds its path.
installation_key() {
    (cd "$repository" && { pwd; cat setup.py pyproject.toml; grep '^__version__' balancing/__init__.py; } | cksum)
}

# is_current EXTRA: whether .venv holds this package and EXTRA.
is_current() {
    local environment=$repository/.venv
    [ ! -e "$environment/.installing" ] && "$environment/bin/python" -c '' 2>/dev/null &&
        [ "$(cat "$environment/.installed${1:+-$1}" 2>/dev/null)" = "$(installation_key)" ]
}

# make_environment EXTRA: installs this package and EXTRA into .venv, and sets `python` to its interpreter.
make_environment() {
    local extra=$1 environment=$repository/.venv found quiet=()
    local unfinished=$environment/.installing
    python=$environment/bin/python
    ! is_current "$extra" || return 0

    if [ -e "$unfinished" ]; then
        echo "The last installation did not finish; starting it again"
        rm -rf "$environment"
    elif [ -e "$environment" ] && ! "$python" -c '' 2>/dev/null; then
        echo "The Python that .venv was made with is gone; making .venv again"
        rm -rf "$environment"
    fi
    if [ ! -e "$environment" ]; then
        found=$(find_python) || exit 1
        echo "Making .venv with $found ($("$found" --version))"
        { mkdir "$environment" && touch "$unfinished"; } || fail "cannot write to $repository"
        "$found" -m venv "$environment" || fail "'$found -m venv .venv' failed"
    fi
    supported "$python" || fail ".venv holds $("$python" --version), not $wanted; remove .venv"

    touch "$unfinished"
    [ -t 1 ] || quiet=(--quiet)
    echo "Installing megatron-balance${extra:+[$extra]} into .venv (PyTorch alone is several GB)"
    # Ctrl-C ends pip, which then exits like any failed command; without the trap, $unfinished would be removed as well.
    trap 'exit 130' INT
    if ! "$python" -m pip install "${quiet[@]}" --disable-pip-version-check --editable "$repository${extra:+[$extra]}"; then
        rm -f "$unfinished"
        fail "installing into .venv failed; pip's own message is above"
    fi
    trap - INT
    # An installation with an extra is one without it as well.
    installation_key | tee "$environment/.installed${extra:+-$extra}" >"$environment/.installed"
    rm -f "$unfinished"
}

# install_apart NAME: installs the packages that scripts/NAME.txt lists into .venv/NAME, without kernels and dependencies.
# Megatron-LM's defaults change if it can import these packages, so only the tests that need them look there. If they
# cannot be installed, these tests are skipped and say so.
install_apart() {
    local name=$1 folder=$repository/.venv/$1 list=$repository/scripts/$1.txt
    [ "$python" = "$repository/.venv/bin/python" ] || return 0 # never install into another Python
    if [ "$(cat "$folder/.installed" 2>/dev/null)" = "$(cat "$list")" ]; then
        return
    fi
    echo "Installing scripts/$name.txt into .venv/$name"
    rm -rf "$folder"
    trap 'exit 130' INT
    if FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE "$python" -m pip install --quiet --disable-pip-version-check --retries 1 \
        --no-deps --no-build-isolation --target "$folder" --requirement "$list"; then
        mkdir -p "$folder"
        cp "$list" "$folder/.installed"
    else
        rm -rf "$folder"
        echo "scripts/$name.txt cannot be installed; the tests that need it will be skipped" >&2
    fi
    trap - INT
}
