# Functions of the job scripts in slurm/ and pbs/, which source this file with `set -euo pipefail`. Each
# script has its options in variables of the same names, the command after -- in `command`, the command
# that submits the job in `submit`, and the command that runs in the job in `launch`.

unset CDPATH # with it, cd prints the directory and may change to another one
me=$(basename "$0")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
dry='' inside='' command=() flags=()

refuse() {
    echo "$me: $*" >&2
    exit 2
}

# "NAME ..." WHAT ARGUMENT...: reads the options of these names, --dry-run and --inside, and the
# command after --, which messages call a WHAT. An option NAME! takes no value and is added to `flags`.
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

# OPTIONS VALUE...: an empty value means that the option is not set.
need_whole_numbers() {
    local number
    for number in "${@:2}"; do
        [[ -z $number || $number =~ ^[1-9][0-9]*$ ]] ||
            refuse "$1 are whole numbers above 0"
    done
}

# Variables that a job takes from the environment of its submission: paths of programs and libraries,
# variables that modules set, and settings of Optimus and of the libraries it uses. Nothing else: PBS
# shows the variables of a job to every user that may query it, and a job needs no secrets.
job_needs='PATH|LD_LIBRARY_PATH|LIBRARY_PATH|CPATH|PYTHON.*|VIRTUAL_ENV|CONDA_.*|LANG|LC_.*|TZ'
job_needs+='|XDG_CACHE_HOME|CC|CXX|CUDA_.*|NVIDIA_.*|OCL_.*|ZE_.*|ZES_.*|SYCL_.*|ONEAPI_.*|IGC_.*|Neo.*|MASTER_.*'
job_needs+='|LOADEDMODULES|_LMFILES_|MODULE.*|LMOD_.*|CMPLR_ROOT|MKLROOT|TBBROOT|CCL_.*|FI_.*|I_MPI_.*|MPI_.*'
job_needs+='|MPICH_.*|MPIR_.*|PALS_.*|UCX_.*|NCCL_.*|GLOO_.*|OMP_.*|KMP_.*|MKL_.*|DNNL_.*|MALLOC_.*|TORCH_.*|PYTORCH_.*'
job_needs+='|IPEX_.*|TOKENIZERS_PARALLELISM|OPTIMUS|OPTIMUS_.*'

# NAME,...: sets `exported` to the names of the variables that a job takes: these and the needed ones.
read_exported() {
    local name names=()
    IFS=, read -ra names <<<"$1"
    for name in ${names[@]+"${names[@]}"}; do
        [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] ||
            refuse "--export takes names of variables with commas between, not '$name'"
        [[ -v $name ]] || refuse "--export $name: it is not set"
        export "${name?}" # a variable that is set but not exported would not reach the job
    done
    while read -r name; do
        case $name in
            *SECRET* | *PASSWORD* | *CREDENTIAL* | *_TOKEN | *_KEY) ;;
            *) [[ ! $name =~ ^($job_needs)$ ]] || names+=("$name") ;;
        esac
    done < <(compgen -e)
    exported=$(printf '%s\n' "${names[@]}" | sort -u | paste -sd, -)
}

# Reads the options of an `optimus-data` job: --nodes or --array, and the program.
read_data_options() {
    read_options "$1" command "${@:2}"
    [[ -z $nodes || -z $array ]] || refuse "give --nodes or --array, not both"
    need_whole_numbers "--nodes and --array" "$nodes" "$array"
    nodes=${nodes:-1}
    program=${OPTIMUS_DATA:-$root/.venv/bin/optimus-data}
    [[ -n $dry ]] || type -P "$program" >/dev/null ||
        refuse "$program is no program; run scripts/setup.sh, or set OPTIMUS_DATA"
    export TOKENIZERS_PARALLELISM=false # processes divide the work; more threads would compete for their cores
}

# Refuses a run as `optimus train` would, before its job waits in a queue; prints what it will do.
check_run() {
    type -P "$program" >/dev/null || refuse "$program is no program; run scripts/setup.sh, or set OPTIMUS"
    "$program" train "${command[@]}" --dry-run --nodes "$nodes" --nproc "$ranks" "${flags[@]}"
}

# WORD...: prints a line for the job's shell, the only one that has PBS_NODEFILE.
show() {
    local word
    for word in "$@"; do
        case $word in
            \$PBS_NODEFILE | MASTER_ADDR=\$*) printf '%s ' "$word" ;;
            *) printf '%q ' "$word" ;;
        esac
    done
    echo
}

# COMMAND...: runs the command if this is a job; returns otherwise.
in_job() {
    [[ -n $inside ]] || return 0
    [[ -z $dry ]] || { show "${launch[@]}"; exit; }
    "$@"
}

# Runs the ranks of one program and exits with their status.
run_ranks() {
    local status=0
    trap : TERM # the ranks receive it, too, save and end; this shell returns their status
    "${launch[@]}" || status=$?
    exit $((status > 128 ? 5 : status)) # a rank that a signal ended is lost
}

# VARIABLE PROGRAM OPTION...: submits a job that runs this script with --inside, these options, the same
# command and the program in the variable; a dry run prints the job and the command that it launches.
submit_job() {
    local job this
    this=$(cd "$(dirname "$0")" && pwd)/$me
    job="cd $(printf %q "$PWD")"$'\n'"export $1=$(printf %q "$2")"
    job+=$'\n'$(printf '%q ' exec "$this" --inside "${@:3}" -- "${command[@]}")
    if [[ -n $dry ]]; then
        printf '%q ' "${submit[@]}"
        printf "<<'JOB'\n%s\nJOB\n# which launches\n" "$job"
        show "${launch[@]}"
    else
        # Not through a pipe: with a command that does not read all of it, SIGPIPE would end this script
        # with status 141.
        "${submit[@]}" <<<$'#!/bin/bash\n'"$job"
    fi
}
