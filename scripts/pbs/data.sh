#!/usr/bin/env bash
# Submits an `optimus-data` command to PBS (Aurora and alike), on nodes together or as a job array.
#
#   scripts/pbs/data.sh --nodes 4 --account PROJECT --queue debug-scaling --walltime 4:00:00 -- \
#       run --input '/flare/text/*.json.gz' --tokenizer tokenizer.json --context 4096 --out OUT
#
# --nodes N        one job of N nodes, a rank on each, all its cores as workers (1)
# --array N        instead: an array of N one-node jobs, which need not run at the same time
# --account, --queue, --walltime, --filesystems      as PBS has them
# --dry-run        print what would be submitted and launched, and do neither
# Submit the same again after a kill or the end of the walltime, with any N: it goes on.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
nodes='' array='' account='' queue='' walltime=1:00:00 filesystems='' dry='' inside=''
while [[ $# -gt 0 && $1 != -- ]]; do
    case $1 in
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
        --dry-run) dry=1; shift ;;
        --inside) inside=1; shift ;;
        --nodes | --array | --account | --queue | --walltime | --filesystems)
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
[[ $array != 1 ]] || array='' # PBS has no array of one job
program=${OPTIMUS_DATA:-$root/.venv/bin/optimus-data}
[[ -n $dry ]] || command -v "$program" >/dev/null ||
    { echo "data.sh: $program is no program; run scripts/setup.sh, or set OPTIMUS_DATA" >&2; exit 2; }

export TOKENIZERS_PARALLELISM=false # processes divide the work, threads would only get in their way
if [[ -n $array ]]; then # PBS does not tell an array's size
    launch=(env "OPTIMUS_ARRAY_SIZE=$array" "$program" "$@")
else # PALS may not set PMI_SIZE
    launch=(env "WORLD_SIZE=$nodes" mpiexec --envall --line-buffer -n "$nodes" --ppn 1
        --hostfile "${PBS_NODEFILE:-\$PBS_NODEFILE}" --cpu-bind none "$program" "$@")
fi
if [[ -n $inside ]]; then
    [[ -z $dry ]] || { printf '%q ' "${launch[@]}"; echo; exit; }
    exec "${launch[@]}"
fi

how=(--nodes "$nodes")
[[ -z $array ]] || how=(--array "$array")
submit=(qsub -V -N optimus-data -k doe -j oe -l "walltime=$walltime" -l place=scatter)
submit+=(-l "select=$([[ -n $array ]] && echo 1 || echo "$nodes")")
[[ -z $array ]] || submit+=(-J "0-$((array - 1))")
[[ -z $account ]] || submit+=(-A "$account")
[[ -z $queue ]] || submit+=(-q "$queue")
[[ -z $filesystems ]] || submit+=(-l "filesystems=$filesystems")
job=$(printf '%q ' cd "$PWD")
job+=$'\n'"export OPTIMUS_DATA=$(printf %q "$program")"
job+=$'\n'$(printf '%q ' exec "$root/scripts/pbs/data.sh" --inside "${how[@]}" -- "$@")
if [[ -n $dry ]]; then
    printf '%q ' "${submit[@]}"
    printf "<<'JOB'\n%s\nJOB\n# which launches\n" "$job"
    printf '%q ' "${launch[@]}"
    echo
else
    printf '#!/bin/bash\n%s\n' "$job" | "${submit[@]}"
fi
