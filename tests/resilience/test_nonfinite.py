"""Tests of non-finite optimizer states. The error message names the state and the rank with this
state. No run loads a non-finite state."""

from __future__ import annotations

import json
import math
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from optimus.checkpoint import store
from optimus.cli import main as optimus
from optimus.distributed.world import start_world
from optimus.train import save as train_save
from tests.kit.faults.nonfinite import break_element, damage_state, poison
from tests.kit.runs.results import metrics_of
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import (
    local_batch,
    make_run,
    make_updater,
    printed_by,
    run_and_catch,
    train_on,
)

FAST = {"train__deterministic": False, "train__threads": 1}
BF16 = {"train__dtype": "bf16"}
AT_SAVE = {"checkpoint__interval": 3}
AT_NEXT_UPDATE = {"checkpoint__interval": 0}
ASYNC = AT_SAVE | {"checkpoint__async_save": True}


@pytest.mark.parametrize(
    ("settings", "state", "value"),
    [
        pytest.param(AT_SAVE, "exp_avg", math.nan, id="dp2"),
        pytest.param(
            AT_NEXT_UPDATE | BF16 | {"optim__sharding": "so"}, "master", math.nan, id="dp2-so-bf16"
        ),
        pytest.param(
            AT_NEXT_UPDATE | FAST | {"optim__sharding": "so"}, "exp_avg", math.nan, id="dp2-so-fast"
        ),
        pytest.param(
            AT_SAVE | BF16 | FAST | {"parallel__ep": 2, "optim__sharding": "epso"},
            "exp_avg_sq",
            math.inf,
            id="ep2-epso-bf16-fast",
        ),
        pytest.param(
            AT_NEXT_UPDATE | BF16 | {"parallel__pp": 2}, "exp_avg", math.nan, id="pp2-bf16"
        ),
        pytest.param(ASYNC | {"parallel__tp": 2}, "exp_avg_sq", math.inf, id="tp2-async"),
        pytest.param(
            AT_NEXT_UPDATE | FAST | {"train__dtype": "fp16", "optim__sharding": "so"},
            "exp_avg",
            math.nan,
            id="dp2-so-fp16",
        ),
        pytest.param(
            AT_SAVE | BF16 | {"optim__frozen": ["embed.weight"]}, "master", math.nan, id="frozen"
        ),
    ],
)
def test_a_damaged_state_is_named_with_its_rank(ranks, tiny_data, tmp_path, settings, state, value):
    """After update 2, an optimizer state of rank 1 gets a non-finite `value`. The run ends without
    a checkpoint."""
    tree = tiny_tree(tiny_data, tmp_path, train__max_steps=6, **settings)
    (_, first), (name, message) = ranks(
        2, damage_state, tree, 1, state, value, 2, start_world=False
    )
    assert first == message
    step = 3 if settings["checkpoint__interval"] else 4
    label = "parameter" if state == "master" and tree["train"]["dtype"] == "fp32" else state
    words = f"non-finite values on rank 1 ({socket.gethostname()}) at step {step}: "
    assert message.startswith(words) and f"{name} is {value} at element [" in message
    assert label in message and "suspect the device" in message
    assert "learning rate" not in message and "more rank" not in message
    (marker,) = (tmp_path / "log").glob("nonfinite-*")
    report = json.loads(marker.read_text())
    assert marker.name == "nonfinite-rank1.json" and report["host"] == socket.gethostname()
    assert (report["rank"], report["step"], report["state"], report["parameter"]) == (
        1,
        step,
        state,
        name,
    )
    assert report["what"] in message and str(report["element"]) in message
    assert store.newest_valid(tmp_path) is None
    steps = [line["step"] for line in metrics_of(tmp_path)]
    assert steps == [1, 2, 3] or (steps[:3] == [1, 2, 3] and "async_save" in tree["checkpoint"])


@pytest.mark.parametrize("settings", [{}, FAST | {"parallel__ep": 2}])
def test_a_gradient_that_is_finite_when_computed_again_points_to_the_hardware(
    ranks, tiny_data, tmp_path, settings
):
    tree = tiny_tree(tiny_data, tmp_path, **settings)
    errors = ranks(2, poison, tree, 1, "gradient once", "q_proj", 2, start_world=False)
    name, message = errors[1].split("|")
    assert message in errors[0] and "non-finite values on rank 1" in message
    text = f"the gradient of {name} is finite when computed again, which points to the hardware"
    assert text in message
    marker = json.loads((tmp_path / "log" / "nonfinite-rank1.json").read_text())
    assert (marker["layer"], marker["direction"]) == (name, "backward")
    assert marker["was_repeated"] is False and marker["microbatch"] is None
    assert marker["instances"] == [] and marker["layers"] == {}


class Waits(TorchDispatchMode):
    """Dispatch mode that counts the operations in which the host waits for a value of the
    device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function in WAITING
        return function(*args, **(kwargs or {}))


WAITING = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)


def count_waits(trees: list[dict]) -> list[tuple[int, int]]:
    """Run two updates with each configuration. Return, for each configuration, the number of chunks
    and the number of times that the host waits for the device in the second update."""
    counts, world = [], start_world(device="cpu")
    for tree in trees:
        setup = make_updater(tree, world)
        setup.updater.run(1, local_batch(setup.groups))
        with Waits() as waits:
            setup.updater.run(2, local_batch(setup.groups))
        counts.append((len(setup.states.chunks), waits.count))
    return counts


@pytest.mark.parametrize("settings", [FAST, FAST | {"optim__sharding": "so"}, BF16])
def test_check_of_gradients_waits_for_the_device_once(ranks, tmp_path, settings):
    """The number of times that the host waits for the device in an update must not depend on the
    number of chunks."""
    lengths = (100, 1 << 24)
    trees = [tiny_tree("d", tmp_path, **settings, optim__chunk_length=length) for length in lengths]
    for counts in ranks(2, count_waits, trees, start_world=False):
        (many, waits), (few, waits_of_few) = counts
        assert many > few and waits == waits_of_few


def test_a_second_moment_that_may_have_overflowed_advises_clipping(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path, checkpoint__interval=2, optim__clip_norm=0.0)
    ((name, message),) = ranks(
        1, damage_state, tree, 0, "exp_avg_sq", math.inf, 1, start_world=False
    )
    assert f"exp_avg_sq (second moment) of {name} is inf" in message
    assert "the square of a gradient overflowed" in message and "set optim.clip_norm" in message


def save_damaged(tree: dict) -> str:
    """Train without the check of states in a save. After update 4, a second moment on the last rank
    becomes infinite and is saved. On the last rank, return the name of the parameter with this
    moment. On other ranks, return ""."""
    run = make_run(tree)
    plain, name = run.update, ""
    train_save.refuse_bad_states = lambda *states: None

    def update(step: int) -> None:
        nonlocal name
        plain(step)
        if step == 4 and run.world.rank == run.world.size - 1:
            name = break_element(run, "exp_avg_sq", math.inf)

    run.update = update
    run.go()
    return name


def test_a_checkpoint_with_a_damaged_state_is_skipped(ranks, tiny_data, tmp_path):
    """The newest checkpoint has correct hashes but a non-finite state. The run must load the older
    checkpoint."""
    few = {"train__stop_at_step": 4, "checkpoint__interval": 2, "optim__sharding": "so"}
    *_, name = ranks(2, save_damaged, tiny_tree(tiny_data, tmp_path, **few), start_world=False)
    store.newest_valid(tmp_path).verify()
    damaged = store.full_path(tmp_path, 4)
    words = f"{damaged}: exp_avg_sq of {name} is inf at element "
    tree = tiny_tree(tiny_data, tmp_path, train__stop_at_step=5)
    printed = ranks(2, printed_by, tree, start_world=False)[0]
    assert f"skipping a damaged checkpoint: {words}" in printed
    assert f"starting at step 2 from {store.full_path(tmp_path, 2)}" in printed
    assert [line["step"] for line in metrics_of(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_damaged_checkpoint_that_is_loaded_by_path_is_refused(ranks, tiny_data, tmp_path):
    few = {"train__stop_at_step": 4, "checkpoint__interval": 4}
    (name,) = ranks(1, save_damaged, tiny_tree(tiny_data, tmp_path / "a", **few), start_world=False)
    path = store.full_path(tmp_path / "a", 4)
    tree = tiny_tree(tiny_data, tmp_path / "b", checkpoint__load=str(path))
    ((status, word),) = ranks(1, run_and_catch, tree, start_world=False)
    assert status == 2 and word.startswith(f"{path}: exp_avg_sq of {name} is inf at element ")


def test_weights_with_a_nan_are_refused(ranks, tiny_data, tmp_path):
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "run", train__stop_at_step=1))
    hf = tmp_path / "hf"
    assert optimus(["convert", "to-hf", str(tmp_path / "run"), str(hf)]) == 0
    weights = load_file(hf / "model.safetensors")
    weights["model.norm.weight"][5] = torch.nan
    save_file(weights, hf / "model.safetensors", metadata={"format": "pt"})
    tree = tiny_tree(tiny_data, tmp_path / "other", checkpoint__load=str(hf))
    said = ranks(2, run_and_catch, tree, start_world=False)
    line = f"{hf}: final_norm.weight is nan at element 5; use weights that are all finite"
    assert said == [(2, line)] * 2
