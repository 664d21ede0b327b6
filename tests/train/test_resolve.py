from __future__ import annotations

import math
import os
import re

import numpy as np
import pytest

from data_prep.cli import main as optimus_data
from optimus.config import make_config
from optimus.data.dataset import TokenDataset
from optimus.distributed.agreement import RunEnded
from optimus.distributed.mesh import Mesh
from optimus.errors import CheckpointError, ConfigError, DataError, OptimusError, OutcomeKind
from optimus.launch.environment import read_launch_env
from optimus.train.loop import train
from optimus.train.resolve import network_warnings, resolve
from optimus.train.run_dir import RunDirectory
from tests.kit.runs.tiny import CONTEXT, DENSE, reshuffle, tiny_tree
from tests.train.test_run import train_on

MIX = [{"path": "/nowhere", "weight": 1}]


def resolved(data, run_dir, world_size=1, **overrides):
    config = make_config(tiny_tree(data, run_dir, **overrides))
    return resolve(config, world_size)


@pytest.mark.parametrize(
    "overrides, world_size, error, message",
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
            r"data.mix: the weights .* round the weights",
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
        ({"train__seq_len": 64}, 1, DataError, r"train.seq_len = 64, .* --context 32; set"),
        ({"model__vocab_size": 100}, 1, DataError, r"vocab_size = 100 is smaller .* at least 320"),
        ({}, 3, ConfigError, r"global_batch_tokens = 256 .*\(3 data ranks"),
        ({"parallel__dp": 2}, 1, ConfigError, r"parallel.dp = 2 needs a world of 2"),
        (
            {"parallel__sequence_parallel": True},
            1,
            ConfigError,
            r"= true .*tp = 1; set .*sequence_parallel = false",
        ),
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
def test_mistake_is_refused_in_a_line(tiny_data, tmp_path, overrides, world_size, error, message):
    with pytest.raises(error, match=message) as refused:
        resolved(tiny_data, tmp_path, world_size, **overrides)
    assert isinstance(refused.value, OptimusError) and refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "sizes, world_size, message",
    [
        ({"tp": 4}, 4, r"parallel.tp = 4 does not divide model.num_attention_heads = 2; .* is 2"),
        ({"ep": 3}, 3, r"parallel.ep = 3 does not divide model.num_experts = 4; .* 3 ranks is 1"),
        ({"ep": 3}, 6, r"parallel.ep = 3 does not divide model.num_experts = 4; .* 6 ranks is 2"),
        ({"pp": 4}, 4, r"= 4 stages, but model.num_layers = 2; .* at most 2 stages"),
        ({"pp": 2, "stage_layers": [1, 2]}, 2, r"stage_layers = \[1, 2\] must .*num_layers = 2"),
        ({"pp": 2, "virtual_stages": 2}, 2, r"virtual_stages = 2, but .* use .*'interleaved'"),
        ({"ep": 4, "dp": 4}, 16, r"global_batch_tokens = 256 .*\(16 data ranks .* multiple is 512"),
        ({"pp": 2, "tp": 2}, 6, r"2 \* 1 \* 2 = 4 does not divide .* of 6 ranks; .* such as 8"),
        ({"dp": 4, "tp": 2}, 4, r"parallel.dp = 4 needs a world of 8 ranks, but this run has 4"),
    ],
)
def test_impossible_layout_is_refused_on_all_ranks(tiny_data, tmp_path, sizes, world_size, message):
    layout = {f"parallel__{key}": value for key, value in sizes.items()}
    with pytest.raises(ConfigError, match=message) as refused:
        resolved(tiny_data, tmp_path, world_size, **layout)
    assert "\n" not in str(refused.value)


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
def test_nearest_size_of_a_message_starts(tiny_data, tmp_path, size, model, near):
    layout = {f"parallel__{axis}": n for axis, n in size.items()}
    settings = {f"model__{key}": value for key, value in model.items()} | layout
    settings["train__global_batch_tokens"] = 0
    world, axis = math.prod(size.values()), next(iter(size))
    with pytest.raises(ConfigError, match=f"the nearest .* {world} ranks is {near}"):
        resolved(tiny_data, tmp_path, world, **settings)
    settings[f"parallel__{axis}"] = near
    assert resolved(tiny_data, tmp_path, world, **settings).mesh.world_size == world


def test_axes_across_nodes_give_a_warning_with_their_cost():
    config = make_config(tiny_tree("d", "r", parallel__ep=4, parallel__tp=2))
    mesh = Mesh(dp=1, ep=4, tp=2)

    def warnings(ranks_per_node):
        return network_warnings(config.model, config.train, mesh, ranks_per_node)

    assert warnings(8) == warnings(16) == []
    (line,) = warnings(4)
    # 4 ranks have 32 tokens each. A token has 32 fp32 numbers, and for each of its 2 experts a
    # weight of 4 bytes and an expert number of 8 bytes.
    size = 4 * 32 * (32 * 4 + 2 * (4 + 8)) / 1e6
    assert "parallel.ep = 4 spans several nodes of 4 ranks" in line and f"{size:.1f} MB" in line
    tp, ep = warnings(1)
    assert tp.startswith("parallel.tp = 2") and ep.startswith("parallel.ep = 4")
    assert f"sums {2 * 32 * 32 * 4 / 1e6:.1f} MB" in tp and "start several ranks a node" in tp
    assert "make ep * tp a divisor of 4 to avoid this" in line


@pytest.fixture(scope="module")
def stopped_run(rank_pool, tiny_data, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("stopped")
    settings = {"train__max_steps": 4, "train__stop_at_step": 2, "checkpoint__model_interval": 2}
    tree = tiny_tree(tiny_data, run_dir, **settings)
    train_on(rank_pool.run, 1, tree)
    return run_dir


@pytest.mark.parametrize(
    "overrides, message",
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
def test_resume_with_another_frozen_setting_is_refused(tiny_data, stopped_run, overrides, message):
    with pytest.raises(CheckpointError, match=message):
        resolved(tiny_data, stopped_run, **{"train__max_steps": 4} | overrides)


def test_resume_lists_changed_free_settings(tiny_data, stopped_run):
    plan = resolved(
        tiny_data, stopped_run, train__max_steps=4, optim__lr=1e-3, data__path=str(tiny_data)
    )
    assert plan.start.step == 2
    assert any(text.startswith("optim.lr = 0.001") for text in plan.changes)


def test_resume_with_another_learning_rate_is_reported(tiny_data, stopped_run):
    """A longer warm-up changes the learning rate of the next step, step 3. A larger number of steps
    changes the rate only from step 4 on."""
    plan = resolved(tiny_data, stopped_run, train__max_steps=4, optim__warmup_steps=4)
    expected = "learning rate of step 3: 0.003 before, 0.00225 now; to keep the old rate, set "
    assert expected + "optim.warmup_steps=3" in plan.changes
    plan = resolved(tiny_data, stopped_run, train__max_steps=40)
    expected = "learning rate of step 4: 0.0003 before, 0.00299514 now; to keep the old rate, set "
    assert expected + "optim.decay_steps=4" in plan.changes


def test_batch_that_follows_from_the_world_is_named_by_its_setting(tiny_data, stopped_run):
    change = {"train__global_batch_tokens": 0, "train__max_steps": 4}
    with pytest.raises(CheckpointError, match=r"train.global_batch_tokens = 32 \(checkpoint"):
        resolved(tiny_data, stopped_run, **change)
    allow = {"checkpoint__allow_change": ["train.global_batch_tokens"]}
    plan = resolved(tiny_data, stopped_run, **change, **allow)
    (line,) = [line for line in plan.changes if line.startswith("train.")]
    assert line.startswith("train.global_batch_tokens = 32 ")
    assert line.endswith("instances 2 to 16 are read again")


@pytest.mark.parametrize("load", ["auto", "model@2"])
def test_instances_that_a_change_skips_are_reported(tiny_data, stopped_run, tmp_path, load):
    change = {"train__global_batch_tokens": 16 * CONTEXT, "train__max_steps": 4}
    change |= {"checkpoint__load": load}
    change |= {"checkpoint__allow_change": ["train.global_batch_tokens", "data.identity"]}
    (line,) = _data_changes(resolved(tiny_data, stopped_run, **change))
    assert line.endswith(f" (checkpoint of step 2: {8 * CONTEXT}); instances 16 to 32 are skipped")
    other = reshuffle(tiny_data, tmp_path / "other", "--seed", "8")
    change["train__global_batch_tokens"] = 8 * CONTEXT
    (line,) = _data_changes(resolved(other, stopped_run, **change))
    assert line.startswith("data.identity = ") and line.endswith("; instances 0 to 16 are skipped")


def _data_changes(plan):
    return [line for line in plan.changes if "; instances" in line]


def test_start_is_resolved_after_the_run_directory_is_locked(tiny_data, tmp_path):
    """The checkpoint `model@3` does not exist. While another run has the lock, the error must
    report the lock. Without another run, the error must report `model@3`."""
    other, tree = RunDirectory(tmp_path), tiny_tree(tiny_data, tmp_path, checkpoint__load="model@3")
    with pytest.raises(RunEnded, match="in use by another run") as ended:
        train(make_config(tree), read_launch_env({}))
    assert ended.value.outcome.kind is OutcomeKind.USAGE
    del other
    with pytest.raises(RunEnded, match="'model@3'") as ended:
        train(make_config(tree), read_launch_env({}))
    assert ended.value.outcome.kind is OutcomeKind.USAGE


def test_resolving_creates_no_run_directory(tiny_data, tmp_path):
    resolved(tiny_data, tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
    RunDirectory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    with pytest.raises(ConfigError, match=r"train.run_dir = '/proc/x': .*; choose another"):
        RunDirectory("/proc/x")


def test_run_directory_that_cannot_be_created_is_refused(tiny_data, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match=f"{name} is not a directory; choose another"):
            resolved(tiny_data, tmp_path / name / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may access all directories")
def test_link_to_a_directory_without_access_is_refused(tiny_data, tmp_path):
    (tmp_path / "closed" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "closed" / "inner")
    (tmp_path / "closed").chmod(0)
    with pytest.raises(ConfigError, match="link is not a directory; choose another"):
        resolved(tiny_data, tmp_path / "link" / "run")
    (tmp_path / "closed").chmod(0o700)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_run_directory_is_refused(tiny_data, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="is not writable"):
        resolved(tiny_data, tmp_path)


def test_training_on_evaluation_data_is_refused(tiny_data, tmp_path):
    again = reshuffle(tiny_data / "eval", tmp_path / "again")
    for path, advice in ((tiny_data / "eval", f" to {tiny_data}, "), (again, "that contains it")):
        mix = [{"path": str(path), "weight": 1}]
        for key, data in (
            ("data.path", {"data__path": str(path)}),
            ("data.mix[0].path", {"data__path": "", "data__mix": mix}),
        ):
            with pytest.raises(
                DataError, match=re.escape(f"{key} = {path} is the held")
            ) as refused:
                resolved(tiny_data, tmp_path / "run", **data)
            assert advice in str(refused.value) and "\n" not in str(refused.value)
            assert refused.value.exit_code == 2
    assert resolved(tiny_data, tmp_path / "run", data__eval_path=str(again)).data.held_out


def test_mix_is_evaluated_on_mixed_evaluation_data(tiny_data, tmp_path):
    other = reshuffle(tiny_data, tmp_path / "other", "--seed", "8")
    eval_sets = [TokenDataset(path / "eval") for path in (tiny_data, other)]

    def evaluation_data(*paths, **overrides):
        mix = [{"path": str(path), "weight": 1 + i} for i, path in enumerate(paths)]
        plan = resolved("", tmp_path / "run", data__mix=mix, **overrides)
        return plan.data.held_out

    mixed = evaluation_data(tiny_data, other)
    size = eval_sets[1].num_instances  # two of three instances are from the second set
    assert mixed.num_instances == (size // 2) * 3 + (2 if size % 2 else 0)
    expected = [
        eval_sets[1].read(0, 1),
        eval_sets[0].read(0, 1),
        eval_sets[1].read(1, 2),
    ]
    assert np.array_equal(mixed.read(0, 3), np.concatenate(expected))
    few = tmp_path / "few"  # a blend without held-out data
    blend = ["blend", "--source", f"{tiny_data}=1", "--context", str(CONTEXT), "--out", str(few)]
    assert optimus_data([*blend, "--instances", "77", "--seed", "3", "--workers", "1"]) == 0
    assert evaluation_data(tiny_data, few) is None
    explicit = evaluation_data(tiny_data, few, data__eval_path=str(other / "eval"))
    assert explicit.identity == eval_sets[1].identity
