#!/usr/bin/env bash
# Runs a command under a real Slurm on this machine only, which is removed afterwards.
#
#   scripts/drills/slurm.sh --nodes 2 --cpus 2 -- bash -c 'sbatch --wait job.sh; cat slurm-*.out'
#
# --nodes N    number of virtual nodes n1 to nN, each with a slurmd (2)
# --cpus C     number of processors of each node, independent of the machine (2)
# --keep DIR   keep state, logs and slurm.conf in DIR
# It needs slurmctld, slurmd, munged and the clients (Debian: slurmctld slurmd slurm-client munge),
# but not their services: it uses separate keys, ports and state. As root, each node has a host name
# that resolves. Exit status: that of the command; 69 if Slurm is missing or does not start.
# For the command, SLURM_CONF selects this Slurm, and SLURM_DRILL is the directory of the state,
# with nI.pid and nI.log of each slurmd, and slurmctld.log.
set -euo pipefail

die() {
    echo "slurm.sh: $1" >&2
    exit "${2:-2}"
}

nodes=2 cpus=2 keep='' given=("$@")
while [[ $# -gt 0 && $1 != -- ]]; do
    case $1 in
        --nodes | --cpus | --keep)
            [[ $# -ge 2 ]] || die "$1 needs a value"
            declare "${1#--}=$2"; shift 2 ;;
        *) die "unknown option $1; the command comes after --" ;;
    esac
done
[[ ${1:-} == -- && $# -gt 1 ]] || die "no command; give it after --"
shift
[[ $nodes =~ ^[1-9][0-9]*$ && $cpus =~ ^[1-9][0-9]*$ ]] ||
    die "--nodes and --cpus are whole numbers above 0"
for program in slurmctld slurmd munged sbatch; do
    command -v "$program" >/dev/null || die "no $program on PATH (Debian has the daemons in /usr/sbin)" 69
done
await() { # PID: return its exit status; a trap may interrupt `wait` before the process ends
    local status=0
    while kill -0 "$1" 2>/dev/null; do
        status=0
        wait "$1" || status=$?
    done
    return "$status"
}

separate=(unshare --mount --uts --pid --mount-proc --fork --kill-child)
if [[ $EUID == 0 && -z ${SLURM_DRILL_INSIDE:-} ]] && "${separate[@]}" true 2>/dev/null; then
    # Namespaces with a separate /etc/hosts, host names and processes. All processes end with this
    # shell, also if it is killed.
    SLURM_DRILL_INSIDE=1 setpriv --pdeathsig KILL "${separate[@]}" \
        "${BASH_SOURCE[0]}" "${given[@]}" <&0 &
    child=$!
    trap 'pkill -TERM --parent "$child" || true' INT TERM # unshare ignores both signals
    await "$child"
    exit
fi
inside=${SLURM_DRILL_INSIDE:-}
unset SLURM_DRILL_INSIDE
for name in $(compgen -v SLURM || true); do unset "$name"; done # variables of an enclosing job

base=${keep:-$(mktemp -d /tmp/slurm-drill.XXXXXX)} # short, since a socket path has <= 107 bytes
mkdir -p "$base/state" "$base/spool"
base=$(realpath "$base")
chmod 755 "$base"
daemons=() command=''

stop() {
    local status=$? pid
    trap '' INT TERM
    [[ -z $command ]] || kill -TERM "$command" 2>/dev/null || true
    SLURM_CONF=$base/slurm.conf timeout 10 scancel --quiet --user "$(id -un)" 2>/dev/null || true
    for ((wait = 0; wait < 50; wait++)); do # jobs end before the daemons that end them
        [[ -n $(SLURM_CONF=$base/slurm.conf timeout 5 squeue --noheader 2>/dev/null) ]] || break
        sleep 0.1
    done
    for pid in "${daemons[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
    for pid in "${daemons[@]}"; do
        timeout 5 tail --pid="$pid" -f /dev/null || kill -KILL "$pid" 2>/dev/null || true
    done
    [[ -n $keep ]] || rm -rf "$base"
    exit "$status"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

free_ports() { # print free ports; if another process takes one, the daemon ends with an error
    python3 - "$1" <<'PY'
import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(server.getsockname()[1] for server in sockets))
PY
}

start() { # NAME COMMAND...: start a daemon in the foreground, with its log in NAME.log
    local name=$1
    shift
    "$@" >>"$base/$name.log" 2>&1 &
    daemons+=("$!")
    echo "$!" >"$base/$name.pid"
}

configure() {
    local host port ports
    host=$(hostname -s)
    read -ra ports <<<"$(free_ports $((nodes + 1)))"
    cat >"$base/slurm.conf" <<CONF
ClusterName=drill
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthInfo=socket=$base/munge.socket
StateSaveLocation=$base/state
SlurmdSpoolDir=$base/spool/%n
SlurmctldPidFile=$base/slurmctld.own.pid
SlurmdPidFile=$base/%n.own.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,sched_min_interval=100000
ReturnToService=2
SlurmdTimeout=10
KillWait=2
CompleteWait=0
MailProg=/bin/true
CONF
    for ((node = 1; node <= nodes; node++)); do
        port=${ports[node]}
        echo "NodeName=n$node NodeHostname=$([[ -n $inside ]] && echo "n$node" || echo "$host")" \
            "NodeAddr=127.0.0.1 Port=$port CPUs=$cpus State=UNKNOWN"
    done >>"$base/slurm.conf"
    echo "PartitionName=drill Nodes=ALL Default=YES MaxTime=INFINITE State=UP" >>"$base/slurm.conf"
}

begin() {
    local node ready=0
    dd if=/dev/urandom of="$base/munge.key" bs=128 count=1 status=none
    chmod 600 "$base/munge.key"
    start munged munged --foreground --force --key-file="$base/munge.key" \
        --socket="$base/munge.socket" --pid-file="$base/munged.own.pid" \
        --seed-file="$base/munge.seed" --log-file="$base/munge.log"
    for ((wait = 0; wait < 100; wait++)); do [[ -S $base/munge.socket ]] && break; sleep 0.05; done
    start slurmctld slurmctld -D -f "$base/slurm.conf"
    for ((node = 1; node <= nodes; node++)); do
        if [[ -n $inside ]]; then
            start "n$node" unshare --uts bash -c 'hostname "$1"; exec slurmd -D -N "$1" -f "$2"' \
                - "n$node" "$base/slurm.conf"
        else
            start "n$node" slurmd -D -N "n$node" -f "$base/slurm.conf"
        fi
    done
    for ((wait = 0; wait < 300; wait++)); do
        ready=$(sinfo --noheader --Node --states=idle --format=%N 2>/dev/null | wc -l) || true
        [[ $ready == "$nodes" ]] && return
        sleep 0.1
    done
    tail -n 20 "$base"/*.log >&2
    die "$ready of $nodes nodes came up in 30 s" 69
}

if [[ -n $inside ]]; then
    {
        cat /etc/hosts
        for ((node = 1; node <= nodes; node++)); do echo "127.0.0.1 n$node"; done
    } >"$base/hosts"
    mount --bind "$base/hosts" /etc/hosts
fi
export SLURM_CONF=$base/slurm.conf SLURM_DRILL=$base
configure
begin
"$@" <&0 & # in the background, so that this shell handles signals immediately
command=$!
await "$command"
