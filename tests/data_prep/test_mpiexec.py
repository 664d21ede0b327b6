"""Tests with ranks that a real mpiexec starts. The tests are skipped if mpiexec is not
installed."""

from __future__ import annotations

import sys

import pytest

from tests.data_prep.corpus import run_arguments, tree
from tests.kit.ranks.processes import mpiexec, started


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_three_ranks_of_mpiexec_write_the_bytes_of_a_run(made, tmp_path, kind):
    out = tmp_path / "data"
    words = [sys.executable, "-m", "data_prep.cli", *run_arguments(made.text, made.tokenizer, out)]
    done = started([*mpiexec(kind, 3), *words])
    assert done.returncode == 0, done.stderr
    assert {f"[rank {rank} of 3]" for rank in range(3)} <= {
        line.partition("]")[0] + "]" for line in done.stderr.split("\n")
    }
    assert tree(out) == tree(made.data)
