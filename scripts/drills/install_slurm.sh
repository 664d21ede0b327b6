#!/usr/bin/env bash
# Installs Slurm on Debian or Ubuntu, for scripts/drills/slurm.sh and the tests that call it. The script does not
# configure the services of Slurm. Without root, the script uses sudo.
set -euo pipefail

packages=(slurmctld slurmd slurm-client munge iproute2 util-linux procps)
as_root=()
[[ $EUID == 0 ]] || as_root=(sudo)
command -v apt-get >/dev/null || {
    echo "install_slurm.sh: no apt-get; install Slurm 21.08 or later with the daemons slurmctld, slurmd and munged" >&2
    exit 69
}
"${as_root[@]}" apt-get update --quiet=2
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet=2 \
    --no-install-recommends "${packages[@]}"
PATH+=:/usr/sbin:/sbin slurmctld -V # where Debian has the daemons
