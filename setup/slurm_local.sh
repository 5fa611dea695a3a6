#!/usr/bin/env bash
# A Slurm of one's own on this machine, for tests: munge, a controller and N virtual nodes.
#
#     ./setup/slurm_local.sh start N [DIR]     prints the line that makes Slurm's commands find it
#     ./setup/slurm_local.sh stop [DIR]        ends its jobs and daemons, and removes DIR
#
# Everything lives in DIR (default: lingua-slurm-UID in $TMPDIR or /tmp), on free ports. It needs
# Debian's packages slurm-wlm and munge, and installs nothing. Nodes are called n1, n2, ...; jobs of
# the partition urgent take the place of those of main, the default; a node that does not answer
# counts as dead after seconds. Each has four GPUs, in name: Slurm grants and binds them as it does
# those of real nodes, while behind each there is nothing (its device file is /dev/null).
set -euo pipefail

report() { printf 'setup/slurm_local.sh: %s\n' "$*" >&2; }

usage() {
    report "usage: ./setup/slurm_local.sh start N [DIR] | stop [DIR]"
    exit 2
}

free_ports() { # COUNT
    python3 -I -c '
import socket, sys
held = [socket.create_server(("127.0.0.1", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in held))' "$1"
}

configuration() { # prints slurm.conf
    local ports node host me
    read -r -a ports <<<"$(free_ports $((n + 1)))"
    host=$(hostname -s) me=$(id -un)
    cat <<END
$mark
ClusterName=lingua
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=${ports[0]}
# The port at which the ranks of a job meet is made from its number: another one in each cluster.
FirstJobId=${ports[0]}
SlurmUser=$me
SlurmdUser=$me
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until the credentials of its former start have expired.
AuthInfo=socket=$dir/munge.socket,cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=6
KillWait=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# As on many clusters: a job may come back only where it asks for it.
JobRequeue=0
MinJobAge=3600
END
    # More cores than the machine has: which job runs beside which is not for it to decide.
    for ((node = 1; node <= n; node++)); do
        echo "NodeName=n$node NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[node]} CPUs=8 RealMemory=65536 Gres=gpu:4"
    done
    echo "PartitionName=main Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime=20"
    echo "PartitionName=urgent Nodes=ALL MaxTime=60 PriorityTier=2 PreemptMode=off"
}

gpus() { # makes their device files, and prints gres.conf
    local gpu
    for gpu in 0 1 2 3; do
        ln -s /dev/null "$dir/gpu$gpu" # the number of its name is what CUDA_VISIBLE_DEVICES gets
    done
    echo "Name=gpu File=$dir/gpu[0-3]"
}

idle_nodes() { # a node is listed once for each partition
    sinfo --noheader --Node --format='%N %T' | sort -u | grep -c ' idle$' || true
}

start() {
    local command node deadline
    for command in munged slurmctld slurmd sbatch; do
        if ! command -v "$command" >/dev/null; then
            report "$command is not installed (Debian and Ubuntu: apt-get install slurm-wlm munge)"
            exit 2
        fi
    done
    if [[ -e $dir ]]; then
        report "$dir exists; ./setup/slurm_local.sh stop $dir ends a cluster that is there"
        exit 2
    fi
    mkdir -m 755 -- "$dir"
    trap 'code=$?; tail -n 5 "$dir"/*.log >&2 || true; stop; exit "$code"' ERR
    mkdir -- "$dir/state"
    configuration >"$SLURM_CONF"
    gpus >"$dir/gres.conf"
    (umask 077 && head -c 128 /dev/urandom >"$dir/munge.key")
    # --force: a private parent folder is no danger where all are one user
    munged --force --key-file="$dir/munge.key" --socket="$dir/munge.socket" \
        --pid-file="$dir/munged.pid" --log-file="$dir/munged.log" \
        --seed-file="$dir/munge.seed" 2>/dev/null
    slurmctld -f "$SLURM_CONF"
    for ((node = 1; node <= n; node++)); do
        slurmd -f "$SLURM_CONF" -N "n$node"
    done
    deadline=$((SECONDS + 30))
    until (($(idle_nodes) == n)); do
        if ((SECONDS > deadline)); then
            report "the nodes did not come up"
            false
        fi
        sleep 0.2
    done
    trap - ERR
    printf 'export SLURM_CONF=%q\n' "$SLURM_CONF"
}

# Processes of the cluster's jobs: those it gave a job id to, and what watches over them. A node
# whose daemon died could not end them.
job_processes() {
    local process
    for process in /proc/[0-9]*; do
        if grep -qzxF "SLURM_CONF=$SLURM_CONF" "$process/environ" 2>/dev/null &&
            { grep -qz '^SLURM_JOB_ID=' "$process/environ" ||
                grep -qx slurmstepd "$process/comm"; } 2>/dev/null; then
            echo "${process#/proc/}"
        fi
    done
}

stop() {
    local file deadline
    if [[ ! -e $SLURM_CONF ]] || [[ $(head -n 1 -- "$SLURM_CONF") != "$mark" ]]; then
        report "there is no cluster in $dir"
        return
    fi
    # Nodes first: nobody is left to start anything when the jobs' processes are looked for.
    local pids=()
    for file in "$dir"/slurmctld.pid "$dir"/slurmd.*.pid; do
        if [[ -s $file ]]; then pids+=("$(<"$file")"); fi
    done
    end "${pids[@]}"
    # shellcheck disable=SC2046
    end $(job_processes)
    if [[ -s $dir/munged.pid ]]; then end "$(<"$dir/munged.pid")"; fi
    rm -rf -- "$dir"
}

end() { # PID...: asks, then insists
    local signal pid deadline
    for signal in TERM KILL; do
        for pid in "$@"; do kill "-$signal" "$pid" 2>/dev/null || true; done
        deadline=$((SECONDS + 5))
        while ((SECONDS < deadline)) && alive "$@"; do sleep 0.1; done
    done
}

alive() {
    local pid
    for pid in "$@"; do
        # One that has ended may stay in the list for as long as nobody asks how it did.
        if grep -qv ') Z ' "/proc/$pid/stat" 2>/dev/null; then return 0; fi
    done
    return 1
}

mark="# A cluster of setup/slurm_local.sh"
what=${1:-}
case $what in
start)
    n=${2:-}
    [[ $n =~ ^[1-9][0-9]?$ ]] && (($# <= 3)) || usage
    dir=${3:-}
    ;;
stop)
    (($# <= 2)) || usage
    dir=${2:-}
    ;;
-h | --help)
    sed -n '2,/^set /s/^# \{0,1\}//p' -- "${BASH_SOURCE[0]}"
    exit
    ;;
*) usage ;;
esac
dir=$(realpath -m -- "${dir:-${TMPDIR:-/tmp}/lingua-slurm-$UID}")
if [[ ! $dir =~ ^[A-Za-z0-9._/-]{1,80}$ ]]; then
    report "DIR = $dir: must be at most 80 letters, digits, dots, dashes and slashes, for Slurm's sake"
    exit 2
fi
export SLURM_CONF="$dir/slurm.conf"
"$what"
