#!/usr/bin/env bash
# Starts a real Slurm that uses only this machine, runs a command under it, and removes this Slurm.
#
#   scripts/drills/slurm.sh --nodes 2 --cpus 2 -- bash -c 'sbatch --wait job.sh; cat slurm-*.out'
#
# --nodes N    number of virtual nodes n1 to nN, each with a slurmd (2)
# --cpus C     number of processors of each node, independent of the machine (2)
# --networks   give each node a separate network, address and process namespace; needs root
# --keep DIR   keep state, logs and slurm.conf in DIR
# The script needs slurmctld, slurmd, munged and the clients (scripts/drills/install_slurm.sh installs
# them), but no running services: it uses separate keys, ports and state. If it runs as root, each node
# has a host name that resolves. Exit status: that of the command; 69 if Slurm is missing or does not
# start. In the environment of the command, SLURM_CONF selects this Slurm, and SLURM_DRILL is the
# directory with the state, nI.pid and nI.log of the slurmd of each node nI, and slurmctld.log.
#
# With --networks, node nI has the address 10.77.0.I, and the command has 10.77.0.254. The command's
# network has an interface nI for the link to each node: `ip link set nI down` disconnects the node.
# nI.pid is then the ID of the first process of the node: SIGKILL to this process ends all processes of
# the node, as a loss of power does. An ended node starts again unless the file nI.off exists. An ended
# slurmd starts again unless the file nI.no-slurmd exists.
set -euo pipefail

die() {
    echo "slurm.sh: $1" >&2
    exit "${2:-2}"
}

nodes=2 cpus=2 keep='' networks='' given=("$@")
while [[ $# -gt 0 && $1 != -- ]]; do
    case $1 in
        --networks) networks=1; shift ;;
        --nodes | --cpus | --keep)
            [[ $# -ge 2 ]] || die "$1 needs a value"
            declare "${1#--}=$2"; shift 2 ;;
        *) die "unknown option $1; the command comes after --" ;;
    esac
done
[[ ${1:-} == -- && $# -gt 1 ]] || die "no command; give it after --"
shift
[[ $nodes =~ ^[1-9][0-9]*$ && $cpus =~ ^[1-9][0-9]*$ ]] ||
    die "--nodes $nodes and --cpus $cpus must be whole numbers above 0"
for program in slurmctld slurmd munged sbatch ${networks:+ip}; do
    command -v "$program" >/dev/null ||
        die "no $program on PATH (Debian has the daemons in /usr/sbin); run scripts/drills/install_slurm.sh" 69
done
await() { # PID: return the exit status of PID; a trap can interrupt `wait` before the process ends
    local status=0
    while kill -0 "$1" 2>/dev/null; do
        status=0
        wait "$1" || status=$?
    done
    return "$status"
}

separate=(unshare --mount --uts --pid --mount-proc --fork --kill-child ${networks:+--net})
if [[ $EUID == 0 && -z ${SLURM_DRILL_INSIDE:-} ]] && "${separate[@]}" true 2>/dev/null; then
    # Namespaces with a separate /etc/hosts, host names and processes. All processes end when this
    # shell ends, even by SIGKILL.
    SLURM_DRILL_INSIDE=1 setpriv --pdeathsig KILL "${separate[@]}" \
        "${BASH_SOURCE[0]}" "${given[@]}" <&0 &
    child=$!
    trap 'pkill -TERM --parent "$child" || true' INT TERM # unshare ignores both signals
    await "$child"
    exit
fi
inside=${SLURM_DRILL_INSIDE:-}
[[ -z $networks || -n $inside ]] ||
    die "--networks needs root and permission to create namespaces" 69
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
    [[ -z $networks ]] || pkill -KILL --parent $$ unshare || true # the nodes, with all processes
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

free_ports() { # COUNT: print free ports; if another process takes a port first, the daemon fails
    python3 - "$1" <<'PY'
import socket, sys
sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(server.getsockname()[1] for server in sockets))
PY
}

start() { # NAME COMMAND...: start a daemon as a job of this shell, with the log NAME.log and the ID in NAME.pid
    local name=$1
    shift
    "$@" >>"$base/$name.log" 2>&1 &
    daemons+=("$!")
    echo "$!" >"$base/$name.pid"
}

address() { # NUMBER: print the address of node NUMBER; 254 is the number of the command
    [[ -n $networks ]] && echo "10.77.0.$1" || echo 127.0.0.1
}

keep_node_on() { # NUMBER: run node NUMBER in a separate network; start the node again each time it ends
    local node=$1 pid
    while :; do
        while [[ -e $base/n$node.off ]]; do sleep 0.1; done
        unshare --net --uts --pid --mount-proc --fork --kill-child \
            bash -c "$node_program" - "n$node" "$(address "$node")" "$base" \
            "02:00:00:00:00:$(printf %02x "$node")" >>"$base/n$node.log" 2>&1 &
        pid=$!
        until [[ $(readlink "/proc/$pid/ns/net") != "$(readlink /proc/self/ns/net)" ]]; do
            sleep 0.01
        done
        ip link delete "n$node" 2>/dev/null || true # the link of the previous start
        ip link add "n$node" type veth peer name eth0 netns "$pid"
        ip link set "n$node" master bridge up
        echo "$pid" >"$base/n$node.pid"
        await "$pid" 2>/dev/null || true # bash prints a line about a killed process
    done
}

# Arguments: NAME ADDRESS DIRECTORY HARDWARE_ADDRESS. The first process of a node.
node_program='
hostname "$1"
ip link set lo up
until [[ -e /proc/sys/net/ipv4/conf/eth0 ]]; do sleep 0.02; done
ip link set eth0 address "$4" # the same address after each start, since other nodes store the address
ip link set eth0 up
ip address add "$2/24" dev eth0
while :; do
    slurmd -D -N "$1" -f "$3/slurm.conf" || true
    while [[ -e $3/$1.no-slurmd ]]; do sleep 0.1; done
    sleep 0.5
done
'

configure() {
    local host port ports
    host=$(hostname -s)
    read -ra ports <<<"$(free_ports $((nodes + 1)))"
    cat >"$base/slurm.conf" <<CONF
ClusterName=drill
SlurmctldHost=$host($(address 254))
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
            "NodeAddr=$(address "$node") Port=$port CPUs=$cpus State=UNKNOWN"
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
        if [[ -n $networks ]]; then
            keep_node_on "$node" &
            daemons+=("$!")
        elif [[ -n $inside ]]; then
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
    die "only $ready of $nodes nodes are ready after 30 s; see the logs above" 69
}

if [[ -n $inside ]]; then
    {
        cat /etc/hosts
        for ((node = 1; node <= nodes; node++)); do echo "$(address "$node") n$node"; done
    } >"$base/hosts"
    mount --bind "$base/hosts" /etc/hosts
fi
if [[ -n $networks ]]; then
    ip link set lo up
    ip link add bridge type bridge
    ip address add "$(address 254)/24" dev bridge
    ip link set bridge up
fi
export SLURM_CONF=$base/slurm.conf SLURM_DRILL=$base
configure
begin
"$@" <&0 & # in the background, so that this shell handles signals immediately
command=$!
await "$command"
