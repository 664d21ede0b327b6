#!/usr/bin/env bash
# Makes the virtual environment that `make` works in, or finds it up to date and ends at once.
# Called by the Makefile; README ("Choosing torch") describes the variables.
#
#   VENV         directory of the environment
#   PYTHON       interpreter to build it with; empty: the first that runs and is new enough
#   TORCH        pinned (the version in constraints.txt) or installed (whatever is there already)
#   TORCH_INDEX  package index that holds the wanted build of torch; empty: pip's own. Torch and the
#                packages it needs come from there alone, everything else from pip's own index.
set -euo pipefail
unset CDPATH # with it, cd prints, and goes elsewhere
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
        "install one, or name it: make PYTHON=/path/to/python3 ..."
}

# What the environment was made from. Another content, place or torch makes it stale.
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
            "remove it ('make distclean') or give the other build its own place: make VENV=.venv-other ..."
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

# The hashes are those of one platform; elsewhere versions alone are pinned. Another torch may bring
# other versions of the packages that it shares with us.
has_hashes() {
    [ "$TORCH" = pinned ] && [ "$("$VENV/bin/python" -c '
import platform as p
print(p.system(), p.machine(), p.python_implementation(), *p.python_version_tuple()[:2])
')" = "Linux x86_64 CPython 3 11" ]
}

install_torch() {
    if [ "$TORCH" = installed ]; then
        say "[2/3] torch as installed"
        local found
        found=$("$VENV/bin/python" -c 'import torch; print(torch.__version__)' 2>&1) ||
            die "TORCH=installed, but $VENV/bin/python cannot import torch (${found##*$'\n'});" \
                "load the module that brings it, or install it there first"
        say "      torch ${found##*$'\n'}"
        "$VENV/bin/python" -m pip install "setuptools>=77"
        return
    fi
    say "[2/3] torch and what it needs (200 MB to several GB, by build; a few minutes)"
    if has_hashes; then # before torch, so that its step finds them and installs none unchecked
        "$VENV/bin/python" -m pip install --require-hashes --no-deps -r constraints-hashes.txt
    else
        "$VENV/bin/python" -m pip install -c constraints.txt setuptools
    fi
    # One index for this step: with two, either could serve any of the names. That index may lack the
    # other pins, which the next step installs.
    if [ -n "$TORCH_INDEX" ]; then
        "$VENV/bin/python" -m pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
    else
        "$VENV/bin/python" -m pip install -c constraints.txt torch
    fi
}

# No build isolation: the pinned setuptools is in place, and nothing unpinned is fetched to build with.
install_rest() {
    say "[3/3] the other dependencies and Optimus itself, editable"
    local pins=(-c constraints.txt)
    [ "$TORCH" = pinned ] || pins=()
    if has_hashes; then # nothing is left to fetch; pip check fails where a hash is missing
        "$VENV/bin/python" -m pip install --no-deps --no-build-isolation -e ".[test]"
        "$VENV/bin/python" -m pip check
        return
    fi
    "$VENV/bin/python" -m pip install ${pins[@]+"${pins[@]}"} --no-build-isolation -e ".[test]"
}

case $TORCH in
    "" | pinned | installed) ;;
    *) die "TORCH=$TORCH is neither 'pinned' nor 'installed'" ;;
esac
read_choice
TORCH=${TORCH:-pinned}

up_to_date() {
    [ "$(fingerprint)" = "$(cat "$stamp" 2>/dev/null)" ]
}
up_to_date && exit 0

# Two makes at once: the second waits for the first, then finds nothing to do.
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
