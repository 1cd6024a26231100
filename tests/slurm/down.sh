#!/usr/bin/env bash
# Stop the cluster that up.sh started, and every job on it; exits 0 whatever is left of it.
#   down.sh <state folder>
set -u
state=$1
export SLURM_CONF="$state/slurm.conf"

running() { [[ -s $1 ]] && kill -0 "$(cat "$1")" 2> /dev/null; }

timeout 10 scancel --user=root 2> /dev/null
timeout 10 scontrol shutdown > /dev/null 2>&1
for _ in {1..50}; do
  running "$state/slurmd.pid" || running "$state/slurmctld.pid" || break
  sleep 0.2
done
for daemon in slurmd slurmctld munged; do
  running "$state/$daemon.pid" && kill "$(cat "$state/$daemon.pid")"
done
exit 0
