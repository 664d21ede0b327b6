#!/usr/bin/env bash
# Submits `optimus train` to Slurm, with several ranks on each node.
#
#   scripts/slurm/train.sh --nodes 4 --ranks 8 --gpus 8 --account PROJECT --time 4:00:00 -- \
#       configs/run/mula-7b-a1b.toml data.path=/data/mix train.run_dir=/runs/a parallel.ep=8
#
# --nodes N        nodes with ranks (1)
# --ranks R        ranks on each node, one for each of its devices (1)
# --gpus G         devices to request on each node; each rank uses one device, but all devices are visible to it
# --cpus C         number of cores to which each rank is bound; without --cpus, ranks are not bound
# --buffer-nodes K request K spare nodes for `optimus launch`, which replace failed nodes (0: only restarts)
# --chain M        with --buffer-nodes: continue in up to M further jobs, until the run is done or stops
# --after JOB      begin after the job JOB, and end at once if the run is done (for the jobs of a chain)
# --account, --partition, --time                     the options of sbatch
# --export NAMES   export only these variables, such as A,B, and those that a job needs (default: all variables)
# --dry-run        print the commands that submit and launch the job, but do not run them
# --skip-data-check, --skip-run-dir-check            if this machine cannot read the data or the run directory
# The run is checked first as `optimus train --dry-run` does; a mistake ends with exit status 2.
# The arguments after -- are those of `optimus train` (with --buffer-nodes, of `optimus launch`). After a kill or
# the end of the time limit, submit the same command again: the run continues from the last checkpoint. With
# --buffer-nodes, the run saves a checkpoint before the time limit; without --buffer-nodes, set
# train.deadline_s to save one.
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../jobs.sh" # also if called through a link

nodes=1 ranks=1 gpus='' cpus='' buffer_nodes='' chain='' after='' account='' partition='' time=1:00:00 export=''
options=(nodes ranks gpus cpus buffer-nodes chain after account partition time export)
read_options "${options[*]} skip-data-check! skip-run-dir-check!" configuration "$@"
need_whole_numbers "--nodes, --ranks, --gpus and --cpus" "$nodes" "$ranks" "$gpus" "$cpus"
check_supervision "--cpus" "$cpus" "train.threads"
program=${OPTIMUS:-$root/.venv/bin/optimus}

if [[ -n $buffer_nodes ]]; then
    set_supervised_launch srun "${SLURM_JOB_ID:-JOB_ID}"
    in_job run_supervisor
else
    # Unlike in data jobs, each rank needs all other ranks, so an error of one rank ends all ranks.
    launch=(srun "--nodes=$nodes" "--ntasks=$((nodes * ranks))" "--ntasks-per-node=$ranks"
        --kill-on-bad-exit=1 --export=ALL) # the environment of the job, with all that sbatch passed
    if [[ -n $cpus ]]; then
        launch+=("--cpus-per-task=$cpus" --cpu-bind=cores)
    else
        launch+=(--cpu-bind=none)
    fi
    launch+=("$program" train "${command[@]}")
    in_job run_ranks
fi
check_run

set_sbatch optimus --no-requeue "--nodes=$((nodes + ${buffer_nodes:-0}))" "--ntasks-per-node=$ranks"
[[ -z $buffer_nodes ]] || submit+=(--no-kill) # a lost node does not end the job
[[ -z $after ]] || submit+=(--parsable "--dependency=afterany:$after")
[[ -z $cpus ]] || submit+=("--cpus-per-task=$cpus")
[[ -z $gpus ]] || submit+=("--gpus-per-node=$gpus")
submit_job OPTIMUS "$program"
