#!/usr/bin/env bash
# Submits `optimus train` to Slurm, with several ranks on each node.
#
#   scripts/slurm/train.sh --nodes 4 --ranks 8 --gpus 8 --account PROJECT --time 4:00:00 -- \
#       configs/run/mula-7b-a1b.toml data.path=/data/mix train.run_dir=/runs/a parallel.ep=8
#
# --nodes N        nodes (1)
# --ranks R        ranks on each, one for each of its devices (1)
# --gpus G         devices to request on each node; every rank sees all and uses one of them
# --cpus C         cores that each rank is bound to; without it ranks are not bound
# --account, --partition, --time                     the options of sbatch
# --export NAMES   export these variables, such as A,B, and those a job needs (default: the whole environment)
# --dry-run        print the commands that submit and launch the job, and run neither
# --skip-data-check, --skip-run-dir-check            if this machine cannot read the data or the run directory
# The run is checked first as `optimus train --dry-run` does; a mistake ends with exit status 2.
# The arguments after -- are those of `optimus train`. Submit the same command again after a kill or
# the end of the time limit: it continues from the last checkpoint (train.deadline_s makes one before the limit).
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../jobs.sh" # also if called through a link

nodes=1 ranks=1 gpus='' cpus='' account='' partition='' time=1:00:00 export=''
read_options "nodes ranks gpus cpus account partition time export skip-data-check! skip-run-dir-check!" configuration "$@"
need_whole_numbers "--nodes, --ranks, --gpus and --cpus" "$nodes" "$ranks" "$gpus" "$cpus"
program=${OPTIMUS:-$root/.venv/bin/optimus}

# Unlike in data jobs, a rank needs all other ranks: an error of one rank ends all.
launch=(srun "--nodes=$nodes" "--ntasks=$((nodes * ranks))" "--ntasks-per-node=$ranks"
    --kill-on-bad-exit=1 --export=ALL) # the environment of the job, with all that sbatch passed
if [[ -n $cpus ]]; then
    launch+=("--cpus-per-task=$cpus" --cpu-bind=cores)
else
    launch+=(--cpu-bind=none)
fi
launch+=("$program" train "${command[@]}")
in_job run_ranks
check_run

submit=(sbatch --job-name=optimus --exclusive "--nodes=$nodes" "--ntasks-per-node=$ranks"
    "--time=$time" --no-requeue)
[[ -z $cpus ]] || submit+=("--cpus-per-task=$cpus")
[[ -z $gpus ]] || submit+=("--gpus-per-node=$gpus")
if [[ -n $export ]]; then
    read_exported "$export"
    submit+=("--export=$exported")
fi
[[ -z $account ]] || submit+=("--account=$account")
[[ -z $partition ]] || submit+=("--partition=$partition")
submit_job OPTIMUS "$program" --nodes "$nodes" --ranks "$ranks" ${cpus:+--cpus "$cpus"}
