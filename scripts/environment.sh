# shellcheck shell=bash
#
# Sourced by quickstart.sh and test.sh. Finds a Python, makes .venv and installs this package into it, each only when
# it is needed. Sets `python`, the interpreter of .venv.
#
# PYTHON=/path/to/python3.12 names an interpreter; otherwise PATH, pyenv and uv are searched.

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# The versions that megatron-core 0.19.2 has wheels for, best first.
python_versions=(3.12 3.13)
wanted="Python 3.12 or 3.13"

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

# prepare_environment EXTRA: makes .venv hold this package and what EXTRA, if it is not empty, adds to it.
prepare_environment() {
    local extra=$1 environment=$repository/.venv found key stamp quiet=()
    local unfinished=$environment/.installing
    python=$environment/bin/python

    # What an installation depends on. A checkout that moved needs another one: .venv holds its path.
    key=$(cd "$repository" && { pwd; cat setup.py pyproject.toml; grep '^__version__' balancing/__init__.py; } | cksum)
    stamp=$environment/.installed${extra:+-$extra}
    if [ ! -e "$unfinished" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && "$python" -c '' 2>/dev/null; then
        return
    fi

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
    # Ctrl-C ends pip, which then exits like any failed command; without the trap the mark would go with it.
    trap 'exit 130' INT
    if ! "$python" -m pip install "${quiet[@]}" --disable-pip-version-check --editable "$repository${extra:+[$extra]}"; then
        rm -f "$unfinished"
        fail "installing into .venv failed; pip's own message is above"
    fi
    trap - INT
    # An installation with an extra is one without it as well.
    echo "$key" | tee "$stamp" >"$environment/.installed"
    rm -f "$unfinished"
}

# install_apart NAME: makes .venv/NAME hold the packages that scripts/NAME.txt lists, their Python alone and nothing that
# they ask for. Megatron-LM takes other defaults where it can import these, so only the tests that need them look there;
# where they cannot be installed, these tests are skipped and say so.
install_apart() {
    local name=$1 folder=$repository/.venv/$1 list=$repository/scripts/$1.txt
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
