"""`optimus launch` in jobs of a real Slurm whose nodes have separate networks."""

from __future__ import annotations

import sys

import pytest

from tests.data_prep.test_slurm import needs_slurm, under_slurm
from tests.kit.ranks.processes import ROOT

NETWORKS = ("--networks", "--nodes", "5")


@needs_slurm
def test_run_survives_faults_of_slurm_nodes(tmp_path):
    """Run two cases of scripts/drills/failures.py on five nodes: a cut of the network, and
    cancelled job steps. The test takes 80 s, because each case starts and ends a job with five
    agents."""
    probe = under_slurm(tmp_path, "true", options=NETWORKS)
    if probe.returncode == 69:
        pytest.skip(probe.stderr.strip())
    drill = [sys.executable, str(ROOT / "scripts" / "drills" / "failures.py"), "--launcher", "srun"]
    cases = ["--case", "cut", "--case", "cancel-steps"]
    done = under_slurm(tmp_path, *drill, *cases, options=NETWORKS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 faults in 2 runs; 0 new runs are wrong" in done.stdout
