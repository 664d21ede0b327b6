#!/usr/bin/env bash
# Submits a job of a scaling study to PBS. `optimus study scaling --submit pbs` calls this script.
#
#   scripts/pbs/study.sh --nodes 64 --account PROJECT --queue debug-scaling --walltime 1:00:00 -- DIR/jobs/NAME.sh
#
# --nodes N        number of nodes (1)
# --account, --queue, --walltime, --filesystems      the options of qsub
# --export NAMES   variables to export, such as A,B, in addition to those that a job needs (docs/launching.md)
# --dry-run        print the commands that submit and launch the job, but do not run them
# The argument after -- is a job that `optimus study scaling` has written.
set -euo pipefail

source "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/../jobs.sh" # also if called through a link

nodes=1 account='' queue='' walltime=1:00:00 filesystems='' export=''
options=(nodes account queue walltime filesystems export)
read_options "${options[*]}" job "$@"
need_whole_numbers "--nodes" "$nodes"
program=${OPTIMUS:-$root/.venv/bin/optimus}
need_program
launch=(bash "${command[@]}")
in_job exec "${launch[@]}"

set_qsub optimus-study "$nodes"
submit_job OPTIMUS "$program"
