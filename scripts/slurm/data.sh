#!/usr/bin/env bash
# Submits an `optimus-data` command to Slurm, on nodes together or as a job array.
#
#   scripts/slurm/data.sh --nodes 4 --account PROJECT --partition cpu --time 4:00:00 -- \
#       run --input '/data/text/*.json.gz' --tokenizer tokenizer.json --context 4096 --out OUT
#
# --nodes N        one job of N nodes, a rank on each, all its cores as workers (1)
# --array N        instead: an array of N one-node jobs, which need not run at the same time
# --account, --partition, --time                     as Slurm has them
# --dry-run        print what would be submitted and launched, and do neither
# Submit the same again after a kill or the end of the time limit, with any N: it goes on.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
nodes='' array='' account='' partition='' time=1:00:00 dry='' inside=''
while [[ $# -gt 0 && $1 != -- ]]; do
    case $1 in
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
        --dry-run) dry=1; shift ;;
        --inside) inside=1; shift ;;
        --nodes | --array | --account | --partition | --time)
            [[ $# -ge 2 ]] || { echo "data.sh: $1 needs a value" >&2; exit 2; }
            declare "${1#--}=$2"; shift 2 ;;
        *) echo "data.sh: unknown option $1; the command comes after --" >&2; exit 2 ;;
    esac
done
[[ ${1:-} == -- && $# -gt 1 ]] || { echo "data.sh: no command; give it after --" >&2; exit 2; }
shift
[[ -z $nodes || -z $array ]] ||
    { echo "data.sh: give --nodes or --array, not both" >&2; exit 2; }
nodes=${nodes:-1}
[[ $nodes =~ ^[1-9][0-9]*$ && ${array:-1} =~ ^[1-9][0-9]*$ ]] ||
    { echo "data.sh: --nodes and --array are whole numbers above 0" >&2; exit 2; }
program=${OPTIMUS_DATA:-$root/.venv/bin/optimus-data}
[[ -n $dry ]] || command -v "$program" >/dev/null ||
    { echo "data.sh: $program is no program; run scripts/setup.sh, or set OPTIMUS_DATA" >&2; exit 2; }

export TOKENIZERS_PARALLELISM=false # processes divide the work, threads would only get in their way
if [[ -n $array ]]; then # rank and world from SLURM_ARRAY_TASK_ID and _COUNT
    launch=("$program" "$@")
else # a lost rank must not end the others: they take its work over
    launch=(srun "--nodes=$nodes" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0
        "$program" "$@")
fi
if [[ -n $inside ]]; then
    [[ -z $dry ]] || { printf '%q ' "${launch[@]}"; echo; exit; }
    exec "${launch[@]}"
fi

how=(--nodes "$nodes")
[[ -z $array ]] || how=(--array "$array")
submit=(sbatch --job-name=optimus-data --exclusive --ntasks-per-node=1 "--time=$time" --requeue)
if [[ -n $array ]]; then
    submit+=(--nodes=1 "--array=0-$((array - 1))")
else
    submit+=("--nodes=$nodes" --no-kill)
fi
[[ -z $account ]] || submit+=("--account=$account")
[[ -z $partition ]] || submit+=("--partition=$partition")
job="export OPTIMUS_DATA=$(printf %q "$program")"
job+=$'\n'$(printf '%q ' exec "$root/scripts/slurm/data.sh" --inside "${how[@]}" -- "$@")
if [[ -n $dry ]]; then
    printf '%q ' "${submit[@]}"
    printf "<<'JOB'\n%s\nJOB\n# which launches\n" "$job"
    printf '%q ' "${launch[@]}"
    echo
else
    printf '#!/bin/bash\n%s\n' "$job" | "${submit[@]}"
fi
