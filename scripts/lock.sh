#!/usr/bin/env bash
# Writes constraints-hashes.txt: the packages of constraints.txt, each with the sha256 of the file that pip
# installs on Linux x86-64 with CPython 3.11. scripts/setup.sh checks these hashes on that platform; on other
# platforms, setup.sh pins only the versions. Torch is left out, because its file depends on the chosen build. The
# packages of the extra `sycl` are left out, too. Run this script after a change of constraints.txt.
set -euo pipefail
unset CDPATH
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}

wanted=$(mktemp)
trap 'rm -f "$wanted"' EXIT
grep -vE '^(#|torch==|intel-|tbb==|tcmlib==|umf==)' constraints.txt >"$wanted"
"$PYTHON" -m pip install --dry-run --ignore-installed --no-deps --quiet --report - -r "$wanted" |
    "$PYTHON" -c '
import json, platform, sys

here = f"{platform.system()} {platform.machine()} {sys.version_info[0]}.{sys.version_info[1]}"
assert here == "Linux x86_64 3.11", f"the hashes are for Linux x86_64 3.11, but this is {here}"
print("# Made by scripts/lock.sh from constraints.txt, for Linux on x86-64 with CPython 3.11.")
for package in json.load(sys.stdin)["install"]:
    name, version = (package["metadata"][key] for key in ("name", "version"))
    sha256 = package["download_info"]["archive_info"]["hashes"]["sha256"]
    print(f"{name}=={version} --hash=sha256:{sha256}")
' >constraints-hashes.txt
