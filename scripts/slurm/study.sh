#!/usr/bin/env bash
# Submits a job of a scaling study to Slurm. `optimus study scaling --submit slurm` calls this script.
#
#   scripts/slurm/study.sh --nodes 4 --ranks 8 --gpus 8 --account PROJECT --time 1:00:00 -- DIR/jobs/NAME.sh
#
# --nodes N        number of nodes (1)
# --ranks R        ranks on each node, one for each of its devices (1)
# --gpus G         devices to request on each node
# --account, --partition, --time                     the options of sbatch
# --export NAMES   export only these variables, such as A,B, and those that a job needs (default: all variables)
# --dry-run        print the commands that submit and launch the job, but do not run them
# The argument after -- is a job that `optimus study scaling` has written.
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../jobs.sh" # also if called through a link

nodes=1 ranks=1 gpus='' account='' partition='' time=1:00:00 export=''
options=(nodes ranks gpus account partition time export)
read_options "${options[*]}" job "$@"
need_whole_numbers "--nodes, --ranks and --gpus" "$nodes" "$ranks" "$gpus"
program=${OPTIMUS:-$root/.venv/bin/optimus}
need_program
launch=(bash "${command[@]}")
in_job exec "${launch[@]}"

set_sbatch optimus-study --parsable --no-requeue "--nodes=$nodes" "--ntasks-per-node=$ranks"
[[ -z $gpus ]] || submit+=("--gpus-per-node=$gpus")
submit_job OPTIMUS "$program"
