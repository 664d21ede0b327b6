#!/usr/bin/env bash
# Runs the whole test suite on the oldest stack that Optimus supports: torch 2.8 with
# intel-extension-for-pytorch 2.8 (its CPU build, the only one in the registry), in a separate
# environment. Needs 9 GB of disk space. The first run takes a few minutes to install packages.
#
#   VENV     directory of the environment (.venv-compat)
#   PYTHON   interpreter of the environment (python3.11)
#   TESTS    paths of tests, as for `make test`
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-$PWD/.venv-compat} TESTS=${TESTS:-}
stamp=$VENV/.optimus-compat
export PIP_DISABLE_PIP_VERSION_CHECK=1

wanted() {
    echo "checkout $PWD"
    cksum pyproject.toml constraints.txt scripts/test_compat.sh
}

if [ "$(wanted)" != "$(cat "$stamp" 2>/dev/null)" ]; then
    free=$(df -Pk "$(dirname "$VENV")" | awk 'NR == 2 { print int($4 / 1048576) }')
    if [ ! -d "$VENV" ] && [ "$free" -lt 9 ]; then
        echo "test-compat: $VENV needs 9 GB, but only $free GB are free; use another directory:" \
            "make test-compat VENV=/path" >&2
        exit 1
    fi
    rm -f "$stamp"
    "${PYTHON:-python3.11}" -m venv "$VENV"
    # The pinned versions of all packages except torch and its dependencies, whose older versions are tested.
    grep -v -E '^(torch|sympy|networkx|fsspec|mpmath|Jinja2|MarkupSafe)==' constraints.txt \
        >"$VENV/constraints.txt"
    "$VENV/bin/python" -m pip install -c "$VENV/constraints.txt" "setuptools>=77"
    "$VENV/bin/python" -m pip install -c "$VENV/constraints.txt" --no-build-isolation \
        -e ".[test,ipex]"
    wanted >"$stamp"
fi

"$VENV/bin/optimus" doctor
exec "$VENV/bin/python" -m pytest $TESTS
