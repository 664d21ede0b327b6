#!/usr/bin/env bash
# Submits `optimus train` to PBS with PALS, as on Aurora: a rank on each of a node's 12 tiles.
#
#   scripts/pbs/train.sh --nodes 256 --account PROJECT --queue prod --walltime 6:00:00 -- \
#       configs/run/mula-7b-a1b.toml data.path=/flare/P/mix train.run_dir=/flare/P/a parallel.ep=12
#
# --nodes N        nodes with ranks (1)
# --ranks R        ranks on each node, one for each of its devices (12 on Aurora)
# --machine NAME   machine (environment, binding, queues): a name in configs/machine, or a TOML file (aurora)
# --cpu-bind LIST  the option of mpiexec (the cores next to each tile of Aurora; more ranks: depth)
# --buffer-nodes K request K spare nodes for `optimus launch`, which replace failed nodes (0: only restarts)
# --chain M        with --buffer-nodes: continue in up to M further jobs, until the run is done or stops
# --after JOB      begin after the job JOB, and end at once if the run is done (for the jobs of a chain)
# --account, --queue, --walltime, --filesystems      the options of qsub (home:flare)
# --export NAMES   variables to export, such as A,B, in addition to those that a job needs (docs/launching.md)
# --dry-run        print the commands that submit and launch the job, but do not run them
# --skip-data-check, --skip-run-dir-check            if this machine cannot read the data or the run directory
# The run is checked first as `optimus train --dry-run` does; a mistake ends with exit status 2.
# The arguments after -- are those of `optimus train` (with --buffer-nodes, of `optimus launch`). After a kill or
# the end of the walltime, submit the same command again: the run continues from the last checkpoint. With
# --buffer-nodes, the run saves a checkpoint before the walltime ends; without --buffer-nodes, set
# train.deadline_s to save one. The script sets a variable of the machine's file only if the variable is not set
# yet. Run `module load frameworks` first.
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../jobs.sh" # also if called through a link

nodes=1 ranks='' machine=aurora cpu_bind='' buffer_nodes='' chain='' after=''
account='' queue='' walltime=1:00:00 filesystems='' export=''
options=(nodes ranks machine cpu-bind buffer-nodes chain after account queue walltime filesystems export)
read_options "${options[*]} skip-data-check! skip-run-dir-check!" configuration "$@"
need_whole_numbers "--nodes and --ranks" "$nodes" "$ranks"
check_supervision "--cpu-bind" "$cpu_bind" "cpu_bind in the file of --machine"
program=${OPTIMUS:-$root/.venv/bin/optimus}
need_program
limits=()
[[ -n $inside ]] || limits=(--queue "$queue" --walltime "$walltime" --chain "${chain:-0}")
settings=$("$program" machine "$machine" --nodes "$nodes" --buffer-nodes "${buffer_nodes:-0}" \
    --ranks-per-node "${ranks:-0}" ${limits[@]+"${limits[@]}"}) || exit
eval "$settings" # ranks, bind_option, machine_filesystems, tolerate and environment
filesystems=${filesystems:-$machine_filesystems}
[[ -z $cpu_bind ]] || bind_option=--cpu-bind=$cpu_bind

if [[ -n $buffer_nodes ]]; then
    set_supervised_launch mpiexec "${PBS_JOBID:-JOB_ID}" --machine "$machine"
    in_job run_supervisor
else
    # PALS does not always set the numbers of ranks, and only the first node of a job always has the list of nodes.
    environment+=("WORLD_SIZE=$((nodes * ranks))" "LOCAL_WORLD_SIZE=$ranks")
    launch=(env "${environment[@]}" mpiexec --envall --line-buffer -n "$((nodes * ranks))"
        --ppn "$ranks" --hostfile "${PBS_NODEFILE:-\$PBS_NODEFILE}" ${bind_option:+"$bind_option"}
        "$program" train "${command[@]}")
    in_job run_ranks
fi
check_run

set_qsub optimus "$((nodes + ${buffer_nodes:-0}))"
[[ -z $buffer_nodes || -z $tolerate ]] || submit+=(-W "tolerate_node_failures=$tolerate")
[[ -z $after ]] || submit+=(-W "depend=afterany:$after")
[[ -z $chain ]] || submit+=(-r n) # the next job continues the run, so PBS must not start this job again
submit_job OPTIMUS "$program"
