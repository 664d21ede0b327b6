#!/usr/bin/env bash
# Submits an `optimus-data` command to Slurm, as one job of several nodes or as a job array.
#
#   scripts/slurm/data.sh --nodes 4 --account PROJECT --partition cpu --time 4:00:00 -- \
#       run --input '/data/text/*.json.gz' --tokenizer tokenizer.json --context 4096 --out OUT
#
# --nodes N        one job of N nodes, with one rank per node and a worker on each of its cores (1)
# --array N        instead: an array of N one-node jobs; submit it again if its jobs did not run simultaneously
# --account, --partition, --time                     the options of sbatch
# --export NAMES   export only these variables, such as A,B, and those that a job needs (default: all variables)
# --dry-run        print the commands that submit and launch the job, but do not run them
# After a kill or the end of the time limit, submit the same command again, with any N: the new job continues.
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../jobs.sh" # also if called through a link

nodes='' array='' account='' partition='' time=1:00:00 export=''
read_data_options "nodes array account partition time export" "$@"
if [[ -n $array ]]; then # rank and world from SLURM_ARRAY_TASK_ID and _COUNT
    launch=("$program" "${command[@]}")
    how=(--array "$array")
    request=(--nodes=1 "--array=0-$((array - 1))")
else # a lost rank must not end the other ranks, which complete their shares of the data
    launch=(srun "--nodes=$nodes" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0
        --export=ALL "$program" "${command[@]}")
    how=(--nodes "$nodes")
    request=("--nodes=$nodes" --no-kill)
fi
in_job exec "${launch[@]}"

set_sbatch optimus-data --requeue --ntasks-per-node=1 "${request[@]}"
submit_job OPTIMUS_DATA "$program" "${how[@]}"
