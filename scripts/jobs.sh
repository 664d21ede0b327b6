# Functions of the job scripts in slurm/ and pbs/, which source this file with `set -euo pipefail`. Each
# script sets a variable for each of its options, `submit` (the command that submits the job) and `launch` (the
# command that runs in the job). `read_options` sets `command` (the command after --). The scripts of
# `optimus train` set `options` to the names of their options.

unset CDPATH # with CDPATH, cd prints the directory and can change to another directory
me=$(basename "$0")
root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
this=$(cd "$(dirname "$0")" && pwd)/$me
dry='' inside='' command=() flags=()

refuse() {
    echo "$me: $*" >&2
    exit 2
}

# Arguments: "NAME ..." WHAT ARGUMENT... Parses the arguments: the options --NAME, --dry-run and --inside, and
# the command after --. Messages use the word WHAT for this command. An option that is listed as NAME! takes no
# value and is added to `flags`.
read_options() {
    local names=" $1 " what=$2 name
    shift 2
    while [[ $# -gt 0 && $1 != -- ]]; do
        case $1 in
            -h | --help) sed -n '2,/^set /s/^# \{0,1\}//p' "$0"; exit ;;
            --dry-run) dry=1; shift ;;
            --inside) inside=1; shift ;;
            *)
                name=${1#--}
                if [[ $1 == --* && $names == *" $name! "* ]]; then
                    flags+=("$1"); shift; continue
                fi
                [[ $1 == --* && $names == *" $name "* ]] ||
                    refuse "unknown option $1; the $what comes after --"
                [[ -n ${2:-} ]] || refuse "$1 needs a value"
                declare -g "${name//-/_}=$2"; shift 2 ;;
        esac
    done
    [[ ${1:-} == -- && $# -gt 1 ]] || refuse "no $what; give it after --"
    command=("${@:2}")
}

# Arguments: OPTIONS VALUE... Refuses a value that is not a whole number above 0. An empty value is accepted:
# it is the value of an option that is not set.
need_whole_numbers() {
    local number
    for number in "${@:2}"; do
        [[ -z $number || $number =~ ^[1-9][0-9]*$ ]] ||
            refuse "$1: '$number' is not a whole number above 0"
    done
}

# Variables that are exported to a job: paths of programs and libraries, variables that modules set, and
# settings of Optimus and of its libraries. Other variables are not exported, because they could contain
# secrets: PBS shows the variables of a job to every user who is permitted to query the job.
job_needs='PATH|LD_LIBRARY_PATH|LIBRARY_PATH|CPATH|PYTHON.*|VIRTUAL_ENV|CONDA_.*|LANG|LC_.*|TZ'
job_needs+='|XDG_CACHE_HOME|CC|CXX|CUDA_.*|NVIDIA_.*|OCL_.*|ZE_.*|ZES_.*|SYCL_.*|ONEAPI_.*|IGC_.*|Neo.*|MASTER_.*'
job_needs+='|LOADEDMODULES|_LMFILES_|MODULE.*|LMOD_.*|CMPLR_ROOT|MKLROOT|TBBROOT|CCL_.*|FI_.*|I_MPI_.*|MPI_.*'
job_needs+='|MPICH_.*|MPIR_.*|PALS_.*|UCX_.*|NCCL_.*|GLOO_.*|OMP_.*|KMP_.*|MKL_.*|DNNL_.*|MALLOC_.*|TORCH_.*|PYTORCH_.*'
job_needs+='|IPEX_.*|TOKENIZERS_PARALLELISM|OPTIMUS|OPTIMUS_.*'

# Argument: NAME,... Sets `exported` to these names and the names of the variables that match `job_needs`.
read_exported() {
    local name names=()
    IFS=, read -ra names <<<"$1"
    for name in ${names[@]+"${names[@]}"}; do
        [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] ||
            refuse "--export takes variable names separated by commas, not '$name'"
        [[ -v $name ]] ||
            refuse "--export $name: the variable $name is not set; set it, or remove it from --export"
        export "${name?}" # a shell variable that is not exported would not reach the job
    done
    while read -r name; do
        case $name in
            *SECRET* | *PASSW* | *CREDENTIAL* | *_TOKEN | *KEY | *_PAT) ;;
            *) [[ ! $name =~ ^($job_needs)$ ]] || names+=("$name") ;;
        esac
    done < <(compgen -e)
    exported=$(printf '%s\n' "${names[@]}" | sort -u | paste -sd, -)
}

# Arguments: NAME NODES. Sets `submit` to the command that submits a job NAME on NODES nodes to PBS.
set_qsub() {
    read_exported "$export"
    submit=(qsub -v "$exported" -N "$1" -k doe -j oe -l "walltime=$walltime" -l place=scatter -l "select=$2")
    [[ -z $account ]] || submit+=(-A "$account")
    [[ -z $queue ]] || submit+=(-q "$queue")
    [[ -z $filesystems ]] || submit+=(-l "filesystems=$filesystems")
}

# Arguments: NAME OPTION... Sets `submit` to the command that submits a job NAME to Slurm with these options.
set_sbatch() {
    submit=(sbatch "--job-name=$1" --exclusive "--time=$time" "${@:2}")
    if [[ -n $export ]]; then
        read_exported "$export"
        submit+=("--export=$exported")
    fi
    [[ -z $account ]] || submit+=("--account=$account")
    [[ -z $partition ]] || submit+=("--partition=$partition")
}

# Parses the options of an `optimus-data` job, and checks --nodes, --array and the program.
read_data_options() {
    read_options "$1" command "${@:2}"
    [[ -z $nodes || -z $array ]] || refuse "give --nodes or --array, not both"
    need_whole_numbers "--nodes and --array" "$nodes" "$array"
    nodes=${nodes:-1}
    program=${OPTIMUS_DATA:-$root/.venv/bin/optimus-data}
    [[ -n $dry ]] || type -P "$program" >/dev/null ||
        refuse "$program is no program; run scripts/setup.sh, or set OPTIMUS_DATA"
    export TOKENIZERS_PARALLELISM=false # each core has a worker process; threads would compete for the cores
}

need_program() {
    type -P "$program" >/dev/null || refuse "$program is no program; run scripts/setup.sh, or set OPTIMUS"
}

# Arguments: OPTION VALUE REPLACEMENT. Checks the options of a supervised run. Refuses OPTION if VALUE is not
# empty, because the option has no effect on a supervised run; the message proposes REPLACEMENT.
check_supervision() {
    [[ -z $buffer_nodes || $buffer_nodes =~ ^(0|[1-9][0-9]*)$ ]] ||
        refuse "--buffer-nodes $buffer_nodes is not a whole number; use 0 for a supervised run without buffer nodes"
    need_whole_numbers --chain "$chain"
    [[ -z $chain || -n $buffer_nodes ]] ||
        refuse "--chain $chain needs a supervised run; add --buffer-nodes K (0: without buffer nodes)"
    [[ -z $buffer_nodes || -z $2 ]] || refuse "$1 has no effect with --buffer-nodes; remove it, or use $3"
}

# Sets `given` to the options in `options` that have values.
collect_options() {
    local name variable
    given=()
    for name in "${options[@]}"; do
        variable=${name//-/_}
        [[ -z ${!variable} ]] || given+=("--$name" "${!variable}")
    done
}

# Arguments: LAUNCHER JOB OPTION... Sets `launch` to the command of a supervised run in the job JOB, and `check`
# to its dry run. The supervisor of the run submits the next job of a chain with this script, because the job can
# end at any time without running a further command.
set_supervised_launch() {
    local left=$((${chain:-0} - 1)) given
    launch=("$program" launch "${command[@]}" --launcher "$1" --nodes "$nodes" --buffer-nodes "$buffer_nodes"
        --ranks-per-node "$ranks" "${@:3}")
    check=("${launch[@]}" --dry-run)
    [[ -z $after ]] || launch+=(--unless-ended)
    if [[ -n $chain ]]; then
        local chain=$left after=$2
        ((left)) || chain=''
        collect_options
        launch+=(--next-job "$(printf '%q ' "$this" "${given[@]}" -- "${command[@]}")")
    fi
}

# Checks the run with the dry run of `optimus train` or `optimus launch`, before its job waits in a queue, and
# prints the summary of the dry run. With --after, the run has already been checked for an earlier job.
check_run() {
    [[ -z $after ]] || return 0
    need_program
    if [[ -z $buffer_nodes ]]; then
        "$program" train "${command[@]}" --dry-run --nodes "$nodes" --nproc "$ranks" \
            ${machine:+--machine "$machine"} "${flags[@]}"
    else
        "${check[@]}" "${flags[@]}" >&2
    fi
}

# Prints its arguments as a command line. $PBS_NODEFILE is not quoted: the job's shell must expand it.
show() {
    local word
    for word in "$@"; do
        case $word in
            \$PBS_NODEFILE) printf '%s ' "$word" ;;
            *) printf '%q ' "$word" ;;
        esac
    done
    echo
}

# Inside the job, runs its arguments, a command that exits; a dry run prints `launch` instead. Outside of the
# job, returns.
in_job() {
    [[ -n $inside ]] || return 0
    [[ -z $dry ]] || { show "${launch[@]}"; exit; }
    "$@"
}

# Runs `launch`, the ranks of the job, and exits with a status of a rank. srun itself returns the highest status
# of all ranks. When a rank fails, srun ends the other ranks by SIGTERM; a rank whose Python has only just started
# then has status 143, which would hide the status of the failed rank. This function therefore reads the statuses
# that srun reports. It exits with 4 if a rank has status 4, else with 2 if a rank has status 2, else with the
# first reported status, since srun reports the failure before it ends other ranks.
run_ranks() {
    local line first='' statuses=' ' status=0
    local failure='^srun: error: [^ ]+: tasks? [^ ]+: (Exited with exit code ([0-9]+)|[A-Z][a-z ]+)'
    trap : TERM # the ranks also receive SIGTERM, save and end; this shell waits for their status
    shopt -s lastpipe # the loop runs in this shell
    exec 3>&1
    "${launch[@]}" 2>&1 >&3 3>&- | while IFS= read -r line || [[ -n $line ]]; do
        printf '%s\n' "$line" >&2 || true
        [[ $line =~ $failure ]] || continue
        first=${first:-${BASH_REMATCH[2]:-5}} # 5: a signal ended the rank
        statuses+="${BASH_REMATCH[2]:-5} "
    done || status=$?
    if [[ $status != 0 ]]; then
        case $statuses in
            *' 4 '*) status=4 ;;
            *' 2 '*) status=2 ;;
            *) status=${first:-$status} ;;
        esac
    fi
    exit $((status > 128 ? 5 : status)) # status 5, a lost rank, if a signal ended a rank
}

# Runs `launch`, the supervisor of the job, and exits with the supervisor's status. If a signal such as SIGKILL
# ends the supervisor, the ranks continue to train, and this function starts another supervisor.
run_supervisor() {
    local status signalled='' starts=0
    trap 'signalled=1' TERM # the supervisor also receives SIGTERM; the ranks save and end
    while ((starts += 1)); do
        status=0
        "${launch[@]}" || status=$?
        [[ $status -gt 128 && $status != 130 && $status != 143 && -z $signalled && $starts -lt 20 ]] || break
        echo "$me: the supervisor ended with status $status; starting another supervisor" >&2
        sleep 1
    done
    exit $((status > 128 ? 5 : status))
}

# Arguments: VARIABLE PROGRAM [OPTION...]. Submits a job that sets VARIABLE to PROGRAM and runs this script with
# --inside, the options (default: those in `options`) and the same command after --. A dry run prints the job and
# the command that the job launches.
submit_job() {
    local job given=("${@:3}")
    [[ $# -gt 2 ]] || collect_options
    job="cd $(printf %q "$PWD")"$'\n'"export $1=$(printf %q "$2")"
    job+=$'\n'$(printf '%q ' exec "$this" --inside "${given[@]}" -- "${command[@]}")
    if [[ -n $dry ]]; then
        printf '%q ' "${submit[@]}"
        printf "<<'JOB'\n%s\nJOB\n# which launches\n" "$job"
        show "${launch[@]}"
    else
        # No pipe: if the command does not read all input, SIGPIPE would end this script with status 141.
        "${submit[@]}" <<<$'#!/bin/bash\n'"$job"
    fi
}
