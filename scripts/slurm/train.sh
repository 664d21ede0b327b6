#!/usr/bin/env bash
# Submits `optimus train` to Slurm, some ranks on each of some nodes.
#
#   scripts/slurm/train.sh --nodes 4 --ranks 8 --gpus 8 --account PROJECT --time 4:00:00 -- \
#       configs/run/mula-7b-a1b.toml data.path=/data/mix train.run_dir=/runs/a parallel.ep=8
#
# --nodes N        nodes (1)
# --ranks R        ranks on each, one for each of its devices (1)
# --gpus G         devices asked of Slurm on each node; every rank sees all and takes its own
# --cpus C         cores of each rank, which it is bound to; without it none is bound
# --account, --partition, --time                     as Slurm has them
# --dry-run        print what would be submitted and launched, and do neither
# What comes after -- is what `optimus train` takes. Submit the same again after a kill or the end of
# the time limit: it goes on from the last checkpoint (train.deadline_s makes one before the limit).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
nodes=1 ranks=1 gpus='' cpus='' account='' partition='' time=1:00:00 dry='' inside=''
while [[ $# -gt 0 && $1 != -- ]]; do
    case $1 in
        -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
        --dry-run) dry=1; shift ;;
        --inside) inside=1; shift ;;
        --nodes | --ranks | --gpus | --cpus | --account | --partition | --time)
            [[ $# -ge 2 ]] || { echo "train.sh: $1 needs a value" >&2; exit 2; }
            declare "${1#--}=$2"; shift 2 ;;
        *) echo "train.sh: unknown option $1; the configuration comes after --" >&2; exit 2 ;;
    esac
done
[[ ${1:-} == -- && $# -gt 1 ]] ||
    { echo "train.sh: no configuration; give it after --" >&2; exit 2; }
shift
for number in "$nodes" "$ranks" "${gpus:-1}" "${cpus:-1}"; do
    [[ $number =~ ^[1-9][0-9]*$ ]] || { echo \
        "train.sh: --nodes, --ranks, --gpus and --cpus are whole numbers above 0" >&2; exit 2; }
done
program=${OPTIMUS:-$root/.venv/bin/optimus}

# Unlike data jobs, ranks cannot do without each other: the first that ends in error ends all.
launch=(srun "--nodes=$nodes" "--ntasks=$((nodes * ranks))" "--ntasks-per-node=$ranks"
    --kill-on-bad-exit=1)
if [[ -n $cpus ]]; then
    launch+=("--cpus-per-task=$cpus" --cpu-bind=cores)
else
    launch+=(--cpu-bind=none)
fi
launch+=("$program" train "$@")
if [[ -n $inside ]]; then
    [[ -z $dry ]] || { printf '%q ' "${launch[@]}"; echo; exit; }
    trap : TERM # it reaches the ranks, which save and end; this shell tells how
    status=0
    "${launch[@]}" || status=$?
    exit $((status > 128 ? 5 : status)) # a rank ended by a signal is a lost one
fi

submit=(sbatch --job-name=optimus --exclusive "--nodes=$nodes" "--ntasks-per-node=$ranks"
    "--time=$time" --no-requeue)
[[ -z $cpus ]] || submit+=("--cpus-per-task=$cpus")
[[ -z $gpus ]] || submit+=("--gpus-per-node=$gpus")
[[ -z $account ]] || submit+=("--account=$account")
[[ -z $partition ]] || submit+=("--partition=$partition")
job="export OPTIMUS=$(printf %q "$program")"
job+=$'\n'$(printf '%q ' exec "$root/scripts/slurm/train.sh" --inside --nodes "$nodes" \
    --ranks "$ranks" ${cpus:+--cpus "$cpus"} -- "$@")
if [[ -n $dry ]]; then
    printf '%q ' "${submit[@]}"
    printf "<<'JOB'\n%s\nJOB\n# which launches\n" "$job"
    printf '%q ' "${launch[@]}"
    echo
else
    printf '#!/bin/bash\n%s\n' "$job" | "${submit[@]}"
fi
