#!/usr/bin/env bash
# Makes the virtual environment that the targets of `make` use. Changes nothing if the environment is up to date.
# Called by the Makefile; README ("Choosing torch") describes the variables.
#
#   VENV         directory of the environment
#   PYTHON       interpreter of the environment; empty: the first Python 3.11 or later on PATH
#   TORCH        pinned (install the version in constraints.txt) or installed (use the torch that the
#                interpreter already has)
#   TORCH_INDEX  package index with the wanted build of torch; empty: pip's default index. Torch and its
#                dependencies come only from TORCH_INDEX, all other packages from pip's default index.
set -euo pipefail
unset CDPATH # with CDPATH, cd prints the directory and can change to another directory
cd "$(dirname "$0")/.."

VENV=${VENV:-$PWD/.venv} PYTHON=${PYTHON:-} TORCH=${TORCH:-} TORCH_INDEX=${TORCH_INDEX:-}
stamp=$VENV/.optimus-setup
export PIP_DISABLE_PIP_VERSION_CHECK=1

die() {
    echo "set-up: $*" >&2
    exit 1
}

say() {
    echo "set-up: $*"
}

runs_and_is_new() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if runs_and_is_new "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    die "no Python 3.11 or later among: ${PYTHON:-python3.13 python3.12 python3.11 python3};" \
        "install Python 3.11 or later, or select an interpreter: make PYTHON=/path/to/python3 ..."
}

# Prints the torch, the checkout and the files from which the environment is made. If this text differs from
# that in `stamp`, the environment is out of date.
fingerprint() {
    echo "torch $TORCH ${TORCH_INDEX:-default-index}"
    echo "checkout $PWD"
    cksum pyproject.toml constraints.txt constraints-hashes.txt scripts/setup.sh
}

read_choice() {
    [ -f "$stamp" ] || return 0
    local recorded_torch recorded_index
    read -r _ recorded_torch recorded_index <"$stamp"
    [ "$recorded_index" != default-index ] || recorded_index=
    if [ "${TORCH:-$recorded_torch}" != "$recorded_torch" ] ||
        [ "${TORCH_INDEX:-$recorded_index}" != "$recorded_index" ]; then
        die "$VENV was made with TORCH=$recorded_torch from ${recorded_index:-the default index};" \
            "remove it ('make distclean'), or make another environment: make VENV=.venv-other ..."
    fi
    TORCH=$recorded_torch TORCH_INDEX=$recorded_index
}

make_venv() {
    if runs_and_is_new "$VENV/bin/python"; then
        return
    fi
    local python
    python=$(find_python)
    say "[1/3] virtual environment in $VENV with $("$python" -V)"
    local options=(--clear)
    [ "$TORCH" = pinned ] || options+=(--system-site-packages)
    "$python" -m venv "${options[@]}" "$VENV" ||
        die "'$python -m venv' failed; on Debian and Ubuntu install the package python3-venv"
}

# Returns true if constraints-hashes.txt applies: on Linux x86-64 with CPython 3.11, and with the pinned torch. On
# other platforms, only versions are pinned. Another torch can need other versions of packages that Optimus needs.
has_hashes() {
    [ "$TORCH" = pinned ] && [ "$("$VENV/bin/python" -c '
import platform as p
print(p.system(), p.machine(), p.python_implementation(), *p.python_version_tuple()[:2])
')" = "Linux x86_64 CPython 3 11" ]
}

install_torch() {
    if [ "$TORCH" = installed ]; then
        say "[2/3] using the torch that is already installed"
        local found
        found=$("$VENV/bin/python" -c 'import torch; print(torch.__version__)' 2>&1) ||
            die "TORCH=installed, but $VENV/bin/python cannot import torch (${found##*$'\n'});" \
                "load the module that provides torch, or install torch for this interpreter first"
        say "      torch ${found##*$'\n'}"
        "$VENV/bin/python" -m pip install "setuptools>=77"
        return
    fi
    say "[2/3] torch and its dependencies (200 MB to several GB, depending on the build; a few minutes)"
    if has_hashes; then # before torch, so that torch's dependencies are installed with checked hashes
        "$VENV/bin/python" -m pip install --require-hashes --no-deps -r constraints-hashes.txt
    else
        "$VENV/bin/python" -m pip install -c constraints.txt setuptools
    fi
    # This step has only one index: with two indexes, pip could take any package from either of them. TORCH_INDEX
    # does not need to contain the other pinned packages, because the next step installs them.
    if [ -n "$TORCH_INDEX" ]; then
        "$VENV/bin/python" -m pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
    else
        "$VENV/bin/python" -m pip install -c constraints.txt torch
    fi
}

# Without build isolation, the installed and pinned setuptools builds Optimus; pip fetches no other setuptools.
install_rest() {
    say "[3/3] the other dependencies and Optimus itself, editable"
    local pins=(-c constraints.txt)
    [ "$TORCH" = pinned ] || pins=()
    if has_hashes; then # all packages are installed; pip check fails if constraints-hashes.txt lacks one
        "$VENV/bin/python" -m pip install --no-deps --no-build-isolation -e ".[test]"
        "$VENV/bin/python" -m pip check
        return
    fi
    "$VENV/bin/python" -m pip install ${pins[@]+"${pins[@]}"} --no-build-isolation -e ".[test]"
}

case $TORCH in
    "" | pinned | installed) ;;
    *) die "TORCH=$TORCH is not valid; use TORCH=pinned or TORCH=installed" ;;
esac
read_choice
TORCH=${TORCH:-pinned}

up_to_date() {
    [ "$(fingerprint)" = "$(cat "$stamp" 2>/dev/null)" ]
}
up_to_date && exit 0

# If two `make` run at the same time, the second waits for the first, and then changes nothing.
mkdir -p "$(dirname "$VENV")"
if command -v flock >/dev/null; then
    exec 9>"$VENV.lock"
    flock 9
    up_to_date && exit 0
fi

start=$SECONDS
make_venv
rm -f "$stamp"
install_torch
install_rest
fingerprint >"$stamp"
say "done in $((SECONDS - start)) s"
