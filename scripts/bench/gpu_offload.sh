#!/usr/bin/env bash
# Compare offloading with other libraries on one GPU, in about ten minutes: first the tests that compare
# placements bit for bit, then GPT-2 of 1.5B to 8B parameters within limits of device memory.
#
#   scripts/bench/gpu_offload.sh [--out FILE] [--rehearse]
#
# The table is written to FILE (default: build/gpu_offload.md). --rehearse runs small models on the CPU. The
# variable PYTHON is the interpreter (default: .venv/bin/python if it exists, else python3).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out=build/gpu_offload.md options=()
while (($#)); do
  case $1 in
    --out) out=${2:?--out needs a file}; shift 2 ;;
    --rehearse) options+=(--rehearse); shift ;;
    *) echo "gpu_offload.sh: unknown argument $1; use --out or --rehearse" >&2; exit 2 ;;
  esac
done
[[ $out == /* ]] || out=$PWD/$out
cd "$root"
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export PYTHONPATH=$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$(dirname "$out")"
status=0
timeout --kill-after=10 120 "$PYTHON" -m pytest -q -k offload tests/train/test_gpu.py || status=$?
"$PYTHON" scripts/bench/offload_peers.py --budget 450 --out "$out" "${options[@]}"
exit "$status"
