#!/usr/bin/env bash
# Run everything that needs a GPU, on one GPU, in less than ten minutes: build the CUDA kernels, test the
# kernels, run all GPU benchmarks, and write a page with the results, the versions and the date.
#
#   scripts/bench/gpu_all.sh [--out FOLDER] [--budget SECONDS] [--dry-run] [--rehearse]
#
# The output of each step (build, tests or benchmark) is written to FOLDER (default: build/gpu_all), where it
# replaces the output of an earlier run; other files are kept. The page is also written to
# docs/benchmarks/DEVICE.md. If a step fails, or if no time is left for a step, the page says so and the exit
# status is 1. --budget is the time for all steps (570 s). --dry-run prints the commands. --rehearse runs small
# versions of all steps on the CPU, and writes the page only to FOLDER. The variable PYTHON is the interpreter
# (default: .venv/bin/python if it exists, else python3).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out=build/gpu_all budget=570 dry_run=0 device=cuda
while (($#)); do
  case $1 in
    --out) out=${2:?--out needs a folder}; shift 2 ;;
    --budget) budget=${2:?--budget needs a number of seconds}; shift 2 ;;
    --dry-run) dry_run=1; shift ;;
    --rehearse) device=cpu; shift ;;
    *) echo "gpu_all.sh: unknown argument $1; use --out, --budget, --dry-run or --rehearse" >&2; exit 2 ;;
  esac
done
if ! [[ $budget =~ ^[1-9][0-9]*$ ]]; then
  echo "gpu_all.sh: --budget $budget must be a whole number of seconds above 0" >&2
  exit 2
fi
[[ $out == /* ]] || out=$PWD/$out
cd "$root"
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export PYTHONPATH=$root:$root/kernels${PYTHONPATH:+:$PYTHONPATH}
optimus=("$PYTHON" -m optimus.cli)

if ((!dry_run)); then
  mkdir -p "$out"
  rm -f "$out"/parts.tsv
  if ! "$PYTHON" -c 'import torch' 2>/dev/null; then
    echo "gpu_all.sh: $PYTHON has no torch; set PYTHON to another interpreter, or run make setup" >&2
    exit 2
  fi
  if [[ $device == cuda ]] &&
    ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "gpu_all.sh: the torch of $PYTHON finds no CUDA device; use --rehearse to run on the CPU" >&2
    exit 2
  fi
fi

failed=0
# part NAME LIMIT COMMAND...: runs COMMAND for at most LIMIT seconds, with standard output in NAME.json or
# NAME.log and standard error in NAME.err.log
part() {
  local name=$1 limit=$2 left start seconds status=0 file
  shift 2
  if ((dry_run)); then
    printf '%s (at most %s s):' "$name" "$limit"
    printf ' %q' "$@"
    printf '\n'
    return
  fi
  rm -f "$out/$name".{json,log,err.log}
  left=$((budget - SECONDS))
  ((limit < left)) || limit=$left
  if ((limit < 5)); then
    printf '%s\t%s\t%s\n' "$name" 0 'no time left' >>"$out/parts.tsv"
    failed=1
    return
  fi
  file=$out/$name.log
  [[ " $* " == *' --json '* ]] && file=$out/$name.json
  start=$SECONDS
  echo "$name ..." >&2
  timeout --kill-after=10 "$limit" "$@" >"$file" 2>"$out/$name.err.log" || status=$?
  seconds=$((SECONDS - start))
  case $status in
    0) printf '%s\t%s\t%s\n' "$name" "$seconds" 'done' >>"$out/parts.tsv" ;;
    124 | 137) printf '%s\t%s\t%s\n' "$name" "$seconds" "ended after $limit s" >>"$out/parts.tsv" ;;
    *) printf '%s\t%s\t%s\n' "$name" "$seconds" "failed with status $status" >>"$out/parts.tsv" ;;
  esac
  if ((status)); then
    failed=1
    tail -n 5 "$out/$name.err.log" "$file" >&2
  fi
}

# The tests run on several processes, because they wait mainly for interpreters and compilers to start.
workers=$(nproc)
((workers < 6)) || workers=6
tests=("$PYTHON" -m pytest -q -n "$workers" -k "not sycl" tests/kernels tests/model/test_moe.py
  tests/train/test_gpu.py)
moe=("$PYTHON" scripts/bench/moe.py --device "$device" --json)
pass=("$PYTHON" scripts/bench/moe_step.py --device "$device" --json)
if [[ $device == cuda ]]; then
  part build 180 "${optimus[@]}" kernels build cuda
  part tests 150 "${tests[@]}"
  part moe_7b 90 "${moe[@]}" --case mula-7b-a1b-bf16 --rounds 10
  part pass_7b 90 "${pass[@]}" --model configs/model/mula-7b-a1b.toml --layers 4 --batch 8 \
    --seq-len 2048 --rounds 10
  part step 60 "${optimus[@]}" bench step configs/run/demo.toml train.device=cuda \
    train.dtype=bf16 --steps 20 --json
  part step_1b 60 "${optimus[@]}" bench step configs/run/mula-1b.toml train.device=cuda \
    train.global_batch_tokens=65536 train.microbatch_size=8 --steps 10 --json
  part step_7b_2_layers 60 "${optimus[@]}" bench step configs/run/mula-7b-a1b.toml \
    model.num_layers=2 train.device=cuda train.global_batch_tokens=65536 train.microbatch_size=8 \
    --steps 10 --json
  part moe_7b_32k 60 "${moe[@]}" --case mula-7b-a1b-bf16 --tokens 32768 --rounds 10
  part moe_7b_8k 60 "${moe[@]}" --case mula-7b-a1b-bf16 --tokens 8192 --rounds 10
  part pass_demo 60 "${pass[@]}" --model configs/model/demo.toml --batch 64 --rounds 10
  part moe_larger 150 "${moe[@]}" --case mula-20b-a2b-bf16 --case mula-100b-a7b-bf16 \
    --case mula-220b-a10b-bf16 --rounds 5
else
  part build 120 "${optimus[@]}" kernels build cpu
  part tests 200 "${tests[@]}"
  part moe_small 150 "${moe[@]}" --case small-bf16 --tokens 128 --rounds 2 --threads 1
  part pass_demo 120 "${pass[@]}" --model configs/model/demo.toml --layers 1 --batch 1 --rounds 2
  part step 120 "${optimus[@]}" bench step configs/run/demo.toml train.device=cpu \
    train.global_batch_tokens=512 train.microbatch_size=2 --steps 4 --json
fi

table=("$PYTHON" scripts/bench/gpu_table.py "$out")
[[ $device == cuda ]] && table+=(--docs docs/benchmarks)
if ((dry_run)); then
  printf 'table:'
  printf ' %q' "${table[@]}"
  printf '\n'
  exit 0
fi
"${table[@]}"
echo "$SECONDS s in all" >&2
exit "$failed"
