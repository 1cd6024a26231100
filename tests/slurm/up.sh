#!/usr/bin/env bash
# A real SLURM of one node for tests: munged, slurmctld and slurmd as plain processes.
#   up.sh <state folder> && . <state folder>/env && sinfo
# Needs root and `apt-get install --no-install-recommends slurm-wlm munge`. No systemd, no cgroups, no job database:
# finished jobs stay listed in squeue instead. down.sh stops it.
# SLURM_TEST_GPUS=<n> adds n pretend GPUs: they are granted and counted, but nothing computes on them.
set -euo pipefail

state=$(mkdir -p "$1" && cd "$1" && pwd)
gpus=${SLURM_TEST_GPUS:-0}
node=$(hostname -s)
memory=$(awk '/^MemTotal/ { print int($2 / 1024 * 0.9) }' /proc/meminfo)
for program in munged slurmctld slurmd srun; do
  command -v "$program" > /dev/null || {
    echo "$program is missing; up.sh names the packages" >&2
    exit 3
  }
done
# Two free ports, so that neither another cluster nor another test is in the way.
read -r port_ctld port_node < <(
  python3 - << 'PYTHON'
import socket
pair = [socket.socket(), socket.socket()]
for each in pair:
    each.bind(("127.0.0.1", 0))
print(*(each.getsockname()[1] for each in pair))
PYTHON
)
mkdir -p "$state"/{bin,key,ctld,node}

# munge: a key and a socket of our own; --force because it dislikes parents that others may write.
(umask 077 && head -c 128 /dev/urandom > "$state/key/munge.key")
munged --force --key-file="$state/key/munge.key" --seed-file="$state/key/seed" --socket="$state/key/socket" \
  --pid-file="$state/munged.pid" --log-file="$state/munged.log"

gres_types="" gres_node=""
if ((gpus > 0)); then
  gres_types="GresTypes=gpu" gres_node="Gres=gpu:$gpus"
  for ((i = 0; i < gpus; i++)); do
    : > "$state/gpu$i"
    echo "NodeName=$node Name=gpu File=$state/gpu$i" >> "$state/gres.conf"
  done
fi

cat > "$state/slurm.conf" << CONF
ClusterName=test
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=$port_ctld
SlurmdPort=$port_node
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$state/key/socket
CredType=cred/munge
StateSaveLocation=$state/ctld
SlurmdSpoolDir=$state/node
SlurmctldPidFile=$state/slurmctld.pid
SlurmdPidFile=$state/slurmd.pid
SlurmctldLogFile=$state/slurmctld.log
SlurmdLogFile=$state/slurmd.log
# nothing that needs cgroups
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
# finished jobs stay in squeue for a day: there is no database to ask
MinJobAge=86400
# what the node can never grant fails at once instead of waiting for ever
EnforcePartLimits=ALL
# jobs share the node by cores and memory, and start at once
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
KillWait=2
ReturnToService=2
$gres_types
NodeName=$node NodeAddr=127.0.0.1 CPUs=$(getconf _NPROCESSORS_ONLN) RealMemory=$memory $gres_node State=UNKNOWN
PartitionName=main Nodes=$node Default=YES MaxTime=UNLIMITED State=UP
CONF

# The SLURM plugin of Snakemake starts srun inside a job without SLURM_CONF; this srun puts it back.
printf '#!/bin/sh\nexport SLURM_CONF="%s"\nexec "%s" "$@"\n' "$state/slurm.conf" "$(command -v srun)" > "$state/bin/srun"
chmod +x "$state/bin/srun"
printf 'export SLURM_CONF="%s" PATH="%s:$PATH"\n' "$state/slurm.conf" "$state/bin" > "$state/env"

export SLURM_CONF="$state/slurm.conf"
slurmctld
slurmd
for _ in {1..100}; do
  [[ $(sinfo --noheader --format=%T 2> /dev/null) == idle ]] && exit 0
  sleep 0.2
done
echo "SLURM did not start within 20 s:" >&2
tail -n 20 "$state"/*.log >&2
exit 1
