#!/usr/bin/env bash
# Submits an `optimus-data` command to PBS (as on Aurora), as one job of several nodes or as a job array.
#
#   scripts/pbs/data.sh --nodes 4 --account PROJECT --queue debug-scaling --walltime 4:00:00 -- \
#       run --input '/flare/text/*.json.gz' --tokenizer tokenizer.json --context 4096 --out OUT
#
# --nodes N        one job of N nodes, with one rank per node and a worker on each of its cores (1)
# --array N        instead: an array of N one-node jobs; submit it again if its jobs did not run simultaneously
# --account, --queue, --walltime, --filesystems      the options of qsub
# --export NAMES   variables to export, such as A,B, in addition to those that a job needs (docs/launching.md)
# --dry-run        print the commands that submit and launch the job, but do not run them
# After a kill or the end of the walltime, submit the same command again, with any N: the new job continues.
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../jobs.sh" # also if called through a link

nodes='' array='' account='' queue='' walltime=1:00:00 filesystems='' export=''
read_data_options "nodes array account queue walltime filesystems export" "$@"
[[ $array != 1 ]] || array='' # PBS has no array of one job
if [[ -n $array ]]; then # PBS does not provide the size of an array
    launch=(env "OPTIMUS_ARRAY_SIZE=$array" "$program" "${command[@]}")
    how=(--array "$array")
else # PALS does not always set PMI_SIZE
    launch=(env "WORLD_SIZE=$nodes" mpiexec --envall --line-buffer -n "$nodes" --ppn 1
        --hostfile "${PBS_NODEFILE:-\$PBS_NODEFILE}" --cpu-bind none "$program" "${command[@]}")
    how=(--nodes "$nodes")
fi
in_job exec "${launch[@]}"

set_qsub optimus-data "$([[ -n $array ]] && echo 1 || echo "$nodes")"
[[ -z $array ]] || submit+=(-J "0-$((array - 1))")
submit_job OPTIMUS_DATA "$program" "${how[@]}"
