"""Tests of the check that a run fits before its ranks start."""

from __future__ import annotations

import json
import logging
import re
import shlex
from pathlib import Path

import pytest

from optimus.cli import main as optimus
from optimus.config import dump_toml, load_config, make_config
from optimus.config.machine import Machine
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Coordinate, Mesh, make_mesh
from optimus.errors import ConfigError
from optimus.planner import fit
from optimus.planner.fit import Capacity, check_fit, least_bytes, most_bytes, predicted_bytes
from optimus.planner.layouts import override
from optimus.planner.states import plan_ranks
from tests.kit.runs.tiny import tiny_tree

RUNS = Path(__file__).resolve().parents[2] / "configs" / "run"
EACH = Capacity(1 << 40, "a device")


def tiny(**settings):
    return make_config(tiny_tree("d", "r", train__fit_check="refuse", **settings))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("demo", ["parallel.pp=2"]),
        ("mula-7b-a1b", ["parallel.pp=4", "parallel.ep=4", "recompute.modules=['block']"]),
        ("mula-7b-a1b", ["parallel.dp=12", "optim.resident=cache", "optim.sharding=so"]),
        ("mula-20b-a2b", ["recompute.modules=[]", "parallel.ep_dispatch=alltoall"]),
    ],
)
def test_prediction_is_between_both_bounds(name, settings):
    config = load_config(RUNS / f"{name}.toml", settings)
    mesh = make_mesh(config.parallel, None)
    run = config, mesh, plan_batch(config.train, mesh.num_data_ranks).microbatches_per_rank
    first = Coordinate(0, 0, 0, 0)
    predicted = predicted_bytes(*run, EACH)
    assert least_bytes(*run, "device")(first) <= predicted <= most_bytes(*run)(first)


def test_lower_bound_adds_the_inputs_of_all_layers_in_progress():
    """With 8 microbatches on 2 pipeline ranks, the first rank keeps the inputs of its 2 layers for
    2 microbatches under 1f1b, and for all 8 microbatches under gpipe."""
    of_input = 32 * 32 * 4  # sequence, hidden size, bytes
    for schedule, kept in (("1f1b", 2), ("gpipe", 8)):
        layers = {"model__num_layers": 4, "parallel__stage_layers": [2, 2]}
        config = tiny(parallel__pp=2, parallel__schedule=schedule, **layers)
        mesh = Mesh(pp=2)
        ((_, states), _) = plan_ranks(config, mesh)
        bound = least_bytes(config, mesh, 8, "device")(Coordinate(0, 0, 0, 0))
        assert bound == states["total"] + kept * 2 * of_input


def test_no_state_need_be_on_the_device_if_placement_is_automatic():
    config = tiny(offload__mode="auto")
    states = sum(size for _, s in plan_ranks(tiny(), Mesh()) for size in [s["total"]])
    of_rank = Coordinate(0, 0, 0, 0)
    on_device = least_bytes(config, Mesh(), 8, "device")(of_rank)
    assert on_device == 2 * 32 * 32 * 4
    assert on_device < least_bytes(config, Mesh(), 8, "host")(of_rank) < states


def test_run_is_refused_only_if_the_lower_bound_exceeds_the_memory(caplog, monkeypatch):
    config = tiny()
    least = least_bytes(config, Mesh(), 8, "device")(Coordinate(0, 0, 0, 0))
    with pytest.raises(ConfigError) as error:
        check_fit(config, Mesh(), 8, Capacity(least - 1000, "the device"))
    assert f"needs at least {least:,} bytes of memory, 1,000 bytes more" in str(error.value)
    assert "\n" not in str(error.value) and not caplog.records
    check_fit(config, Mesh(), 8, Capacity(least, "the device"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "predicted" in record.getMessage()
    caplog.clear()
    # If the memory is far from the limit, the check profiles no model.
    monkeypatch.setattr(fit, "predicted_bytes", None)
    check_fit(config, Mesh(), 8, EACH)
    assert not caplog.records


def test_check_can_warn_or_be_off(caplog):
    tree = tiny_tree("d", "r", train__fit_check="warn")
    check_fit(make_config(tree), Mesh(), 8, Capacity(1, "the device"))
    (record,) = caplog.records
    assert "cannot fit" in record.getMessage()
    caplog.clear()
    check_fit(make_config(tiny_tree("d", "r")), Mesh(), 8, Capacity(1, "the device"))
    assert not caplog.records


def test_ranks_of_a_node_share_the_memory_of_the_host():
    """A run fits if the ranks of each node fit into the host memory of the node. The node with the
    first pipeline ranks needs the most memory, because these ranks keep the most inputs."""
    config, mesh = tiny(parallel__pp=4, model__num_layers=4), Mesh(pp=4)
    bound = least_bytes(config, mesh, 8, "host")
    ranks = [bound(Coordinate(pp, 0, 0, 0)) for pp in range(4)]
    node = max(ranks[0] + ranks[1], ranks[2] + ranks[3])
    check_fit(config, mesh, 8, Capacity(node, "this machine", 2, "host"))
    with pytest.raises(ConfigError, match=r"2 ranks need at least .* 1 byte more than this"):
        check_fit(config, mesh, 8, Capacity(node - 1, "this machine", 2, "host"))
    # The last node can have fewer ranks.
    check_fit(config, mesh, 8, Capacity(sum(ranks[:3]), "this machine", 3, "host"))


def test_host_memory_is_the_limit_of_the_control_group(monkeypatch):
    monkeypatch.setattr(fit, "usable_memory", lambda: 12345)
    assert fit.capacity_of_host(4) == Capacity(12345, "this machine", 4, "host")


def test_ranks_on_a_cpu_share_the_memory_of_the_machine_file():
    """In a machine file that was measured on a CPU with 8 ranks, `memory_bytes` is an eighth of the
    memory of the node."""
    size = {"value": 1000, "source": "a test", "date": "2026-11"}
    tree = {"ranks_per_node": 8, "device": {"name": "d", "memory_bytes": size, "threads": 1}}
    on_cpu = fit.capacity_of(Machine.model_validate(tree), 2)
    assert on_cpu == Capacity(8000, "a node with the device 'd'", 2, "host")
    del tree["device"]["threads"]
    on_device = fit.capacity_of(Machine.model_validate(tree), 2)
    assert on_device == Capacity(1000, "the device 'd'", 1, "device")


def write_machine(folder: Path, memory: int) -> Path:
    """Write the file of a machine whose nodes have 4 devices with `memory` bytes each. Return the
    path of the file."""
    path = folder / "m.toml"
    size = f"memory_bytes = {{ value = {memory}, source = 'a test', date = '2026-11' }}"
    path.write_text(f"ranks_per_node = 4\n[device]\nname = 'small'\n{size}\n")
    return path


def test_plan_that_does_not_fit_names_the_nearest_layouts_that_do(tmp_path, capsys):
    """The error proposes layouts. By a separate plan, each of them fits. If a change of one setting
    is enough, each proposed layout differs from the refused layout in only one setting."""
    machine = write_machine(tmp_path, 750_000)
    config = tmp_path / "c.toml"
    config.write_text(dump_toml(tiny(optim__chunk_length=5000, train__deterministic=False)))
    words = ["plan", str(config), "--machine", str(machine), "--nodes", "1"]
    assert optimus([*words, "--json"]) == 2
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    nearest = result["nearest"]
    assert f"{result['missing']['device']:,} bytes more than its device has" in printed.err
    assert [len(layout["changes"]) for layout in nearest] == [1, 1, 1]
    assert "bytes more than its device has; the nearest layouts that fit on 1 node: " in printed.err
    for layout in nearest:
        assert layout["bytes"] <= 750_000
        command = shlex.split(layout["command"])
        overrides = [f"{key}={override(value)}" for key, value in layout["changes"].items()]
        assert command == ["optimus", *words, "--json", *overrides]
        assert layout["command"] in printed.err
    assert optimus(command[1:]) == 0


def test_plan_suggests_offloading_if_few_layouts_fit_without_it(tmp_path, capsys):
    """On a single rank, no layout fits without offloading, so the only proposed change is
    offload.mode = "auto"."""
    machine = write_machine(tmp_path, 600_000)
    links = "[links]\nto_device = 1e10\nto_host = 1e10\nflops = 1e12\nmemory = 1e11\n"
    text = machine.read_text().replace("[device]", f"{links}[device]")
    machine.write_text(text.replace("ranks_per_node = 4", "ranks_per_node = 1"))
    config = tmp_path / "c.toml"
    settings = {"train__deterministic": False, "recompute__modules": ["block"]}
    config.write_text(dump_toml(tiny(optim__chunk_length=2000, **settings)))
    words = ["plan", str(config), "--machine", str(machine), "--nodes", "1"]
    assert optimus([*words, "--json"]) == 2
    (offloaded,) = json.loads(capsys.readouterr().out)["nearest"]
    assert offloaded["changes"] == {"offload.mode": "auto"}
    assert 0 < offloaded["bytes"] <= 600_000
    assert optimus([*words, "offload.mode=auto"]) == 0


def test_plan_of_a_replica_names_a_command_that_fits(tmp_path, capsys):
    """Without --nodes, the plan is for one replica, which does not fit. With sharded optimizer
    states, the run fits on the 4 ranks of a node. Without sharding, it fits only if settings are
    changed. The proposed command contains `--nodes 1` only if the command without `--nodes` would
    plan another layout."""
    machine = write_machine(tmp_path, 750_000)
    config = tmp_path / "c.toml"
    config.write_text(dump_toml(tiny(optim__chunk_length=5000, train__deterministic=False)))
    words = ["plan", str(config), "--machine", str(machine)]

    def suggestions(*settings):
        assert optimus([*words, *settings]) == 2
        error = capsys.readouterr().err
        (text,) = re.findall("layouts that fit on 1 node: (.*)", error)
        assert error.count("\n") == 1
        commands = [shlex.split(command)[1:] for command in text.split(", or ")]
        assert all(command[: len(words)] == words for command in commands)
        return [command[len(words) :] for command in commands], commands[0]

    added, command = suggestions("optim.sharding=so")
    assert added == [["optim.sharding=so", "--nodes", "1"]] and optimus(command) == 0
    added, command = suggestions("parallel.dp=1", "optim.sharding=so")
    assert added == [["optim.sharding=so", "parallel.dp=4"]] and optimus(command) == 0
    added, command = suggestions()
    assert all(each[-2:] == ["--nodes", "1"] for each in added) and optimus(command) == 0
    added, command = suggestions("train.global_batch_tokens=32")  # a single data rank
    assert not any("--nodes" in each for each in added) and optimus(command) == 0


def test_suggested_layouts_reset_settings_without_meaning(tmp_path, capsys):
    machine = write_machine(tmp_path, 650_000)
    config = tmp_path / "c.toml"
    config.write_text(dump_toml(tiny(model__num_layers=4, train__deterministic=False)))
    words = ["plan", str(config), "--machine", str(machine), "--nodes", "1"]
    words += ["parallel.pp=2", "parallel.stage_layers=[1,3]"]
    assert optimus(words) == 2
    (text,) = re.findall("layouts that fit on 1 node: (.*)", capsys.readouterr().err)
    for command in text.split(", or "):
        assert command.count("stage_layers") == 1 and optimus(shlex.split(command)[1:]) == 0
