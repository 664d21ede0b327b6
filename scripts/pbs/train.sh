#!/usr/bin/env bash
# Submits `optimus train` to PBS with PALS, as on Aurora: a rank on each of a node's 12 tiles.
#
#   scripts/pbs/train.sh --nodes 256 --account PROJECT --queue prod --walltime 6:00:00 -- \
#       configs/run/mula-7b-a1b.toml data.path=/flare/P/mix train.run_dir=/flare/P/a parallel.ep=12
#
# --nodes N        nodes (1)
# --ranks R        ranks on each, one for each of its devices (12)
# --cpu-bind LIST  the option of mpiexec (the cores next to each tile of Aurora; more ranks: depth)
# --account, --queue, --walltime, --filesystems      the options of qsub (home:flare)
# --export NAMES   variables to export, such as A,B, as well as those a job needs (docs/launching.md)
# --dry-run        print the commands that submit and launch the job, and run neither
# --skip-data-check, --skip-run-dir-check            if this machine cannot read the data or the run directory
# The run is checked first as `optimus train --dry-run` does; a mistake ends with exit status 2.
# The arguments after -- are those of `optimus train`. Submit the same command again after a kill or
# the end of the walltime: it continues from the last checkpoint (train.deadline_s makes one before the end).
# The defaults of variables below apply only to unset variables. Run `module load frameworks` first.
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../jobs.sh" # also if called through a link

nodes=1 ranks=12 cpu_bind='' account='' queue='' walltime=1:00:00 filesystems=home:flare export=''
read_options "nodes ranks cpu-bind account queue walltime filesystems export skip-data-check! skip-run-dir-check!" configuration "$@"
need_whole_numbers "--nodes and --ranks" "$nodes" "$ranks"
case $queue in # the sizes that Aurora's queues accept
    debug) least=1 most=2 ;;
    debug-scaling) least=2 most=256 ;;
    prod) least=256 most=10624 ;;
    *) least=1 most=$nodes ;;
esac
((nodes >= least && nodes <= most)) ||
    refuse "--queue $queue takes $least to $most nodes, not --nodes $nodes"
program=${OPTIMUS:-$root/.venv/bin/optimus}

tiles=(4-7 8-11 12-15 16-19 20-23 24-27 56-59 60-63 64-67 68-71 72-75 76-79) # cores closest to each tile
if [[ -z $cpu_bind ]]; then
    cpu_bind=depth
    ((ranks > ${#tiles[@]})) || cpu_bind=list:$(IFS=: && echo "${tiles[*]:0:ranks}")
fi

environment=()
default() { # NAME VALUE: for the ranks, unless it is set already
    [[ -v $1 ]] || environment+=("$1=$2")
}
default ZE_FLAT_DEVICE_HIERARCHY FLAT # 12 tiles are 12 devices, one for each rank
default CCL_PROCESS_LAUNCHER pmix
default CCL_ATL_TRANSPORT mpi
default CCL_KVS_MODE mpi
default FI_MR_CACHE_MONITOR userfaultfd
environment+=(TMPDIR=/tmp) # PBS sets a long path, and paths of sockets must be short
if ((nodes >= 256)); then # as tested by the site to 1,024 nodes
    default CCL_KVS_CONNECTION_TIMEOUT 600
    default CCL_KVS_USE_MPI_RANKS 1
    default CCL_OP_SYNC 1
    default CCL_ATL_SYNC_COLL 1
    default CCL_ALLREDUCE_SCALEOUT 'direct:0-1048576;rabenseifner:1048577-max'
    default CCL_BCAST double_tree
    default FI_CXI_DEFAULT_CQ_SIZE 1048576 # against overflow of the Cassini event queue
    default FI_CXI_OFLOW_BUF_SIZE 8388608
    default FI_CXI_RX_MATCH_MODE hybrid
    default PALS_PING_PERIOD 240
    default PALS_RPC_TIMEOUT 240
fi
# PALS may not set the numbers of ranks, and only the first node of a job always has the list of nodes.
# On Aurora, hosts have other names in the high-speed network.
environment+=("WORLD_SIZE=$((nodes * ranks))" "LOCAL_WORLD_SIZE=$ranks")
first='1s/^\([^.]*\)\..*\(\.cm\.aurora\.alcf\.anl\.gov\)$/\1.hsn\2/;1q'
if [[ -v PBS_NODEFILE ]]; then
    default MASTER_ADDR "$(sed "$first" "$PBS_NODEFILE")"
else # a dry run prints the command; only the job knows the file
    default MASTER_ADDR "\$(sed '$first' \$PBS_NODEFILE)"
fi

launch=(env "${environment[@]}" mpiexec --envall --line-buffer -n "$((nodes * ranks))"
    --ppn "$ranks" --hostfile "${PBS_NODEFILE:-\$PBS_NODEFILE}" "--cpu-bind=$cpu_bind"
    "$program" train "${command[@]}")
in_job run_ranks
check_run

read_exported "$export"
submit=(qsub -v "$exported" -N optimus -k doe -j oe -l "walltime=$walltime" -l place=scatter
    -l "select=$nodes")
[[ -z $account ]] || submit+=(-A "$account")
[[ -z $queue ]] || submit+=(-q "$queue")
[[ -z $filesystems ]] || submit+=(-l "filesystems=$filesystems")
submit_job OPTIMUS "$program" --nodes "$nodes" --ranks "$ranks" --cpu-bind "$cpu_bind"
