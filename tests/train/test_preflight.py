from __future__ import annotations

import math
import os
import re

import numpy as np
import pytest

from data_prep.cli import main as optimus_data
from optimus.config import make_config
from optimus.data.dataset import TokenDataset
from optimus.distributed.mesh import Mesh
from optimus.errors import CheckpointError, ConfigError, DataError, OptimusError
from optimus.launch.environment import read_launch_env
from optimus.train.loop import train
from optimus.train.preflight import doubts, preflight, with_start
from optimus.train.run_dir import RunDirectory
from tests.helpers.tiny import CONTEXT, DENSE, reshuffled, tiny_tree
from tests.train.test_run import train_on

MIX = [{"path": "/nowhere", "weight": 1}]


def check(data, run_dir, world_size=1, **overrides):
    config = make_config(tiny_tree(data, run_dir, **overrides))
    return with_start(config, preflight(config, world_size))


@pytest.mark.parametrize(
    "overrides, world_size, error, told",
    [
        ({"data__path": ""}, 1, ConfigError, r"data.path is missing"),
        ({"data__path": "/nowhere"}, 1, DataError, r"/nowhere"),
        ({"data__eval_path": "/nowhere"}, 1, DataError, r"/nowhere"),
        ({"data__mix": MIX}, 1, ConfigError, r"data.path = .* and data.mix are both given"),
        ({"data__path": "", "data__mix": MIX}, 1, DataError, r"/nowhere"),
        (
            {"data__path": "", "data__mix": [*MIX, {"path": "a", "weight": 1.2345678}]},
            1,
            ConfigError,
            r"data.mix: weights .* round them",
        ),
        ({"train__run_dir": ""}, 1, ConfigError, r"train.run_dir is missing"),
        (
            {"train__run_dir": "/proc/cpuinfo/x"},
            1,
            ConfigError,
            r"train.run_dir = '/proc/cpuinfo/x': /proc/cpuinfo is not a directory; choose another",
        ),
        (
            {"train__max_steps": 0, "optim__warmup_steps": 0},
            1,
            ConfigError,
            r"max_steps is missing",
        ),
        (
            {"train__seq_len": 0, "train__global_batch_tokens": 0},
            1,
            ConfigError,
            r"seq_len is missing",
        ),
        ({"train__seq_len": 64}, 1, DataError, r"train.seq_len = 64, .* context 32; set"),
        ({"model__vocab_size": 100}, 1, DataError, r"model.vocab_size = 100 is smaller .*\(320\)"),
        ({}, 3, ConfigError, r"global_batch_tokens = 256 .* 3 data ranks"),
        ({"parallel__dp": 2}, 1, ConfigError, r"parallel.dp = 2 needs a world of 2"),
        ({"parallel__sequence_parallel": True}, 1, ConfigError, r"= true .*tp = 1; leave it out"),
        ({"checkpoint__load": "/nowhere"}, 1, CheckpointError, r"/nowhere: no such checkpoint"),
        ({"checkpoint__load": "model@3"}, 1, CheckpointError, r"'model@3'"),
        (
            {"checkpoint__allow_change": ["optim.weight_decy"]},
            1,
            ConfigError,
            r"did you mean 'optim.weight_decay'",
        ),
        (DENSE | {"parallel__ep": 2}, 2, ConfigError, r"parallel.ep = 2, but .*num_experts = 0"),
        (
            {"parallel__tp": 4, "model__num_attention_heads": 4, "model__num_key_value_heads": 2},
            4,
            ConfigError,
            r"parallel.tp = 4 does not divide model.num_key_value_heads = 2",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_starts(
    tiny_data, tmp_path, overrides, world_size, error, told
):
    with pytest.raises(error, match=told) as refused:
        check(tiny_data, tmp_path, world_size, **overrides)
    assert isinstance(refused.value, OptimusError) and refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "sizes, world_size, told",
    [
        ({"tp": 4}, 4, r"parallel.tp = 4 does not divide model.num_attention_heads = 2; .* is 2"),
        ({"ep": 3}, 3, r"parallel.ep = 3 does not divide model.num_experts = 4; .* 3 ranks is 1"),
        ({"ep": 3}, 6, r"parallel.ep = 3 does not divide model.num_experts = 4; .* 6 ranks is 2"),
        ({"pp": 4}, 4, r"= 4 stages, but model.num_layers = 2; .* at most 2 stages"),
        ({"pp": 2, "stage_layers": [1, 2]}, 2, r"stage_layers = \[1, 2\] must .*num_layers = 2"),
        ({"pp": 2, "virtual_stages": 2}, 2, r"virtual_stages = 2: .* use .*'interleaved'"),
        ({"ep": 4, "dp": 4}, 16, r"global_batch_tokens = 256 .* 16 data ranks .* that is: 512"),
        ({"pp": 2, "tp": 2}, 6, r"2 \* 1 \* 2 = 4 does not divide the world of 6 ranks; start 8"),
        ({"dp": 4, "tp": 2}, 4, r"parallel.dp = 4 needs a world of 8 ranks, and this one has 4"),
    ],
)
def test_an_impossible_layout_is_one_line_that_all_ranks_share(
    tiny_data, tmp_path, sizes, world_size, told
):
    layout = {f"parallel__{key}": value for key, value in sizes.items()}
    with pytest.raises(ConfigError, match=told) as refused:
        check(tiny_data, tmp_path, world_size, **layout)
    assert refused.value.on_every_rank and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("size", "model", "near"),
    [
        ({"ep": 8}, {"num_experts": [8, 9]}, 1),
        ({"ep": 9}, {"num_experts": [8, 9]}, 1),
        ({"tp": 4}, {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}, 2),
        ({"tp": 3}, {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48}, 1),
        ({"tp": 4, "pp": 2}, {"num_attention_heads": 2, "num_layers": 2}, 2),
    ],
)
def test_the_nearest_size_is_one_that_starts(tiny_data, tmp_path, size, model, near):
    layout = {f"parallel__{axis}": n for axis, n in size.items()}
    settings = {f"model__{key}": value for key, value in model.items()} | layout
    settings["train__global_batch_tokens"] = 0
    world, axis = math.prod(size.values()), next(iter(size))
    with pytest.raises(ConfigError, match=f"the nearest .* {world} ranks is {near}"):
        check(tiny_data, tmp_path, world, **settings)
    settings[f"parallel__{axis}"] = near
    assert check(tiny_data, tmp_path, world, **settings).mesh.world_size == world


def test_axes_over_nodes_are_warned_of_with_their_cost():
    config = make_config(tiny_tree("d", "r", parallel__ep=4, parallel__tp=2))
    mesh = Mesh(dp=1, ep=4, tp=2)
    assert doubts(config, mesh, 8) == doubts(config, mesh, 16) == []
    (line,) = doubts(config, mesh, 4)
    # 4 ranks' rows of 32 tokens: 32 numbers, 2 weights and 2 choices each.
    size = 4 * 32 * (32 * 4 + 2 * (4 + 8)) / 1e6
    assert "parallel.ep = 4 reaches over nodes of 4" in line and f"{size:.1f} MB" in line
    tp, ep = doubts(config, mesh, 1)
    assert tp.startswith("parallel.tp = 2") and ep.startswith("parallel.ep = 4")
    assert f"sums {2 * 32 * 32 * 4 / 1e6:.1f} MB" in tp and "start several ranks a node" in tp
    assert "let ep * tp divide 4 to stay inside" in line


@pytest.fixture(scope="module")
def stopped_run(rank_pool, tiny_data, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("stopped")
    settings = {"train__max_steps": 4, "train__stop_at_step": 2, "checkpoint__model_interval": 2}
    tree = tiny_tree(tiny_data, run_dir, **settings)
    train_on(rank_pool.run, 1, tree)
    return run_dir


@pytest.mark.parametrize(
    "overrides, told",
    [
        ({"model__num_layers": 3}, r"model.num_layers = 3 \(checkpoint of step 2: 2\)"),
        ({"train__seed": 5}, r"train.seed = 5 .* checkpoint.allow_change=\[\"train.seed\"\]"),
        ({"optim__weight_decay": 0.2}, r"optim.weight_decay = 0.2"),
        (
            {"train__global_batch_tokens": 512},
            r"train.global_batch_tokens = 512 \(checkpoint of step 2: 256\).*_change=.\"train.glo",
        ),
        ({"train__dtype": "bf16"}, r"train.dtype = 'bf16'"),
        ({"train__threads": 2}, r"train.threads = 2"),
    ],
)
def test_a_resumed_run_keeps_what_is_frozen(tiny_data, stopped_run, overrides, told):
    with pytest.raises(CheckpointError, match=told):
        check(tiny_data, stopped_run, **{"train__max_steps": 4} | overrides)


def test_free_settings_may_change_and_are_listed(tiny_data, stopped_run):
    flight = check(
        tiny_data, stopped_run, train__max_steps=4, optim__lr=1e-3, data__path=str(tiny_data)
    )
    assert flight.start.step == 2
    assert any(text.startswith("optim.lr = 0.001") for text in flight.differences)


def test_another_learning_rate_after_a_resume_is_reported(tiny_data, stopped_run):
    """Stored are 4 steps, 3 of them warm-up: the next step, 3, is its last."""
    flight = check(tiny_data, stopped_run, train__max_steps=4, optim__warmup_steps=4)
    expected = "learning rate of step 3: 0.003 before, 0.00225 now; to keep it, set "
    assert expected + "optim.warmup_steps=3" in flight.differences
    flight = check(tiny_data, stopped_run, train__max_steps=40)
    assert not [line for line in flight.differences if line.startswith("learning rate")]


def test_a_batch_that_the_world_gave_is_named_by_its_setting(tiny_data, stopped_run):
    change = {"train__global_batch_tokens": 0, "train__max_steps": 4}
    with pytest.raises(CheckpointError, match=r"train.global_batch_tokens = 32 \(checkpoint"):
        check(tiny_data, stopped_run, **change)
    allow = {"checkpoint__allow_change": ["train.global_batch_tokens"]}
    flight = check(tiny_data, stopped_run, **change, **allow)
    (told,) = [one for one in flight.differences if one.startswith("train.")]
    assert told.startswith("train.global_batch_tokens = 32 ")
    assert told.endswith("instances 2 to 16 are read again")


@pytest.mark.parametrize("load", ["auto", "model@2"])
def test_instances_that_a_change_skips_are_told(tiny_data, stopped_run, tmp_path, load):
    change = {"train__global_batch_tokens": 16 * CONTEXT, "train__max_steps": 4}
    change |= {"checkpoint__load": load}
    change |= {"checkpoint__allow_change": ["train.global_batch_tokens", "data.identity"]}
    (told,) = _of_the_data(check(tiny_data, stopped_run, **change))
    assert told.endswith(f" (checkpoint of step 2: {8 * CONTEXT}); instances 16 to 32 are skipped")
    other = reshuffled(tiny_data, tmp_path / "other", "--seed", "8")
    change["train__global_batch_tokens"] = 8 * CONTEXT
    (told,) = _of_the_data(check(other, stopped_run, **change))
    assert told.startswith("data.identity = ") and told.endswith("; instances 0 to 16 are skipped")


def _of_the_data(flight):
    return [one for one in flight.differences if "; instances" in one]


def test_a_start_is_decided_once_the_directory_is_taken(tiny_data, tmp_path):
    """Another run that has it may seal a newer checkpoint until it lets go."""
    other, tree = RunDirectory(tmp_path), tiny_tree(tiny_data, tmp_path, checkpoint__load="model@3")
    with pytest.raises(ConfigError, match="in use by another run"):
        train(make_config(tree), read_launch_env({}))
    del other
    with pytest.raises(CheckpointError, match="'model@3'"):
        train(make_config(tree), read_launch_env({}))


def test_a_run_directory_is_made_by_the_run_alone(tiny_data, tmp_path):
    check(tiny_data, tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    RunDirectory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(ConfigError, match=r"train.run_dir = '/proc/x': .*; choose another"):
        RunDirectory("/proc/x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory(tiny_data, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="is not writable"):
        check(tiny_data, tmp_path)


def test_a_held_out_part_is_not_trained_on(tiny_data, tmp_path):
    again = reshuffled(tiny_data / "eval", tmp_path / "again")
    for path, own in ((tiny_data / "eval", f"give {tiny_data}, "), (again, "that it came with")):
        mix = [{"path": str(path), "weight": 1}]
        for key, data in (
            ("data.path", {"data__path": str(path)}),
            ("data.mix[0].path", {"data__path": "", "data__mix": mix}),
        ):
            with pytest.raises(DataError, match=re.escape(f"{key} = {path} is a held")) as refused:
                check(tiny_data, tmp_path / "run", **data)
            assert own in str(refused.value) and "\n" not in str(refused.value)
            assert refused.value.exit_code == 2
    assert check(tiny_data, tmp_path / "run", data__eval_path=str(again)).eval_dataset


def test_a_mix_is_evaluated_on_the_held_out_parts_mixed_alike(tiny_data, tmp_path):
    other = reshuffled(tiny_data, tmp_path / "other", "--seed", "8")
    parts = [TokenDataset(path / "eval") for path in (tiny_data, other)]

    def held_out(*paths, **overrides):
        mix = [{"path": str(path), "weight": 1 + i} for i, path in enumerate(paths)]
        flight = check("", tmp_path / "run", data__mix=mix, **overrides)
        return flight.eval_dataset

    mixed = held_out(tiny_data, other)
    size = parts[1].num_instances  # the second gives two of three
    assert mixed.num_instances == (size // 2) * 3 + (2 if size % 2 else 0)
    expected = [parts[1].read(0, 1), parts[0].read(0, 1), parts[1].read(1, 2)]
    assert np.array_equal(mixed.read(0, 3), np.concatenate(expected))
    few = tmp_path / "few"  # a blend has no held-out part of its own
    blend = ["blend", "--source", f"{tiny_data}=1", "--context", str(CONTEXT), "--out", str(few)]
    assert optimus_data([*blend, "--instances", "77", "--seed", "3", "--workers", "1"]) == 0
    assert held_out(tiny_data, few) is None
    own = held_out(tiny_data, few, data__eval_path=str(other / "eval"))
    assert own.identity == parts[1].identity
