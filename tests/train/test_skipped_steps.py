"""Tests of updates that a run skips because their data gives NaN. All steps keep their numbers and
their data."""

from __future__ import annotations

import math

import pytest
import torch

from optimus.cli import main as optimus
from optimus.config import dump_toml, make_config
from optimus.errors import ConfigError, OutcomeKind
from optimus.resilience.supervision.attempt import (
    SKIPPED_STEPS,
    encode_skipped_steps,
    read_skipped_steps,
)
from optimus.train.update import Updater
from tests.kit.faults.nonfinite import train_on_bad_instance
from tests.kit.runs.results import assert_same_run, metrics_of, weights_of
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import local_batch, make_updater

BAD_STEP = 3
INSTANCE = (BAD_STEP - 1) * 8 + 5
"""Number of the instance that gives NaN, in step 3. An update has 8 microbatches of one
instance."""
FAST = {"train__deterministic": False, "train__threads": 1}


def skipping_tree(data, run_dir, steps=(BAD_STEP,), **overrides) -> dict:
    """Create the run directory with a file that lists the updates to skip, `steps`. Return the
    configuration of the run."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / SKIPPED_STEPS).write_bytes(encode_skipped_steps(steps))
    few = {"train__max_steps": 5, "checkpoint__interval": 1}
    return tiny_tree(data, run_dir, **few, **overrides)


def train_bad(ranks, size: int, tree: dict) -> list[str]:
    """Train on `size` ranks with data that gives NaN in instance INSTANCE. Return the lines that
    rank 0 prints."""
    ended = ranks(size, train_on_bad_instance, tree, INSTANCE, start_world=False)
    assert [end.status for end in ended] == [0] * size, ended[0].message
    return ended[0].printed


def test_run_without_the_skip_ends_at_the_bad_data(ranks, tiny_data, tmp_path):
    tree = skipping_tree(tiny_data, tmp_path, steps=(BAD_STEP + 1,))
    (ended,) = ranks(1, train_on_bad_instance, tree, INSTANCE, start_world=False)
    assert ended.status == OutcomeKind.NONFINITE.exit_status and "at step 3" in ended.message


def test_skipped_update_changes_no_state_and_keeps_number_and_data(ranks, tiny_data, tmp_path):
    """The run is stopped after step 2, after the skipped step 3, and after step 4. The states after
    steps 2 and 3 must be equal, and step 4 must have its usual number and data."""
    states = {}
    for step in (2, 3, 4):
        tree = skipping_tree(tiny_data, tmp_path / "run", train__stop_at_step=step)
        printed = train_bad(ranks, 1, tree)
        states[step] = weights_of(tmp_path / "run")
        if step == 3:
            assert any("step 3/3  loss non-finite  update skipped  lr" in line for line in printed)
            assert any("updates that will be skipped: 3 (" in line for line in printed)
    for name, values in states[2].items():
        assert torch.equal(states[3][name], values), name
    assert any(not torch.equal(states[4][name], values) for name, values in states[3].items())
    lines = metrics_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line["tokens"] for line in lines] == [256, 512, 768, 1024]
    assert [line["loss"] is None for line in lines] == [False, False, True, False]
    assert [line["grad_norm"] is None for line in lines] == [False, False, True, False]


def test_skips_are_the_same_on_other_layouts_and_on_resume(ranks, tiny_data, tmp_path):
    """A run on one rank is the reference. The other runs stop before and after the skipped step,
    lose the last checkpoint, and are resumed by `optimus train` without a supervisor. The test
    takes some seconds for each of its seven starts."""
    train_bad(ranks, 1, skipping_tree(tiny_data, tmp_path / "whole"))
    for name in ("pp", "dp"):
        run_dir = tmp_path / name
        for stop in (2, 3, 0):
            layout = {"train__stop_at_step": stop, f"parallel__{name}": 2}
            printed = train_bad(ranks, 2, skipping_tree(tiny_data, run_dir, **layout))
            if stop == 3:
                (run_dir / "checkpoints/step-00000003/manifest.json").unlink()
        assert any("starting at step 2" in line for line in printed)
        assert_same_run(run_dir, tmp_path / "whole")


def skip_with_loss_scale(tree: dict) -> list[tuple[float, int, bool]]:
    """Run 3 updates. The second update is in the list of updates to skip. Return for each update:
    the loss scale, the number of updates skipped so far, and True if the update was skipped."""
    setup = make_updater(tree)
    updater = Updater(
        setup.config,
        setup.groups,
        setup.model,
        setup.states,
        setup.plan,
        setup.world.device,
        skipped_steps={2},
    )
    results = [updater.run(step, local_batch(setup.groups)) for step in (1, 2, 3)]
    return [(r.loss_scale, r.skipped_steps, math.isnan(r.grad_norm)) for r in results]


def test_skip_because_of_data_keeps_the_loss_scale(ranks):
    """If an update is skipped because of its data, the loss scale must not be halved. In this run,
    the loss scale is at its minimum, so an attempt to halve the scale would end the run."""
    half = {"train__dtype": "fp16", "optim__loss_scale": 4.0, "optim__min_loss_scale": 4.0}
    (results,) = ranks(1, skip_with_loss_scale, tiny_tree("d", "r", **half, **FAST))
    assert results == [(4.0, 0, False), (4.0, 1, True), (4.0, 1, False)]


DAMAGED = [
    "",
    "[3]",
    '{"steps": 3}',
    '{"steps": [3, 2]}',
    '{"steps": [3, 3]}',
    '{"steps": [0]}',
    '{"steps": [true]}',
    '{"steps": [3.0]}',
    '{"steps": ["3"]}',
    '{"steps": [3], "more": 1}',
    "[" * 100_000,
    '{"steps": [' + "9" * 5000 + "]}",
    "\xff",
]


@pytest.mark.parametrize("content", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_file_of_skipped_steps_is_refused(tmp_path, content):
    (tmp_path / SKIPPED_STEPS).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match="damaged: it must be .*; correct the file") as refused:
        read_skipped_steps(tmp_path)
    assert "\n" not in str(refused.value) and str(tmp_path / SKIPPED_STEPS) in str(refused.value)


def test_run_with_a_damaged_file_of_skipped_steps_starts_nothing(tiny_data, tmp_path, capsys):
    tree = skipping_tree(tiny_data, tmp_path / "run")
    (tmp_path / "run" / SKIPPED_STEPS).write_text("{}")
    config = tmp_path / "run.toml"
    config.write_text(dump_toml(make_config(tree)))
    for command in (["train", "--dry-run"], ["train"], ["launch", "--launcher", "local"]):
        assert optimus([command[0], str(config), *command[1:]]) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if "damaged" in x]
        assert f"{SKIPPED_STEPS}: damaged: it must be" in line
    assert not (tmp_path / "run/events.jsonl").exists()
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_steps_are_encoded_in_order(tmp_path):
    assert read_skipped_steps(tmp_path) == ()
    (tmp_path / SKIPPED_STEPS).write_bytes(encode_skipped_steps([9, 3, 9]))
    assert read_skipped_steps(tmp_path) == (3, 9)
