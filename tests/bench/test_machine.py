"""Tests of the command `optimus bench machine`: the machine file that the command writes, the
constants fitted to the rates of matrix products, and mistakes of users."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from optimus.bench import machine as bench
from optimus.bench import network, rank_timer
from optimus.bench.machine import Shape, fit_products, format_machine, write_machine
from optimus.cli import main as optimus
from optimus.config.machine import FOLDER, load_links, load_machine
from optimus.errors import ConfigError
from optimus.launch.environment import SINGLE, read_launch_env
from optimus.planner import rates as planner_rates
from optimus.planner.collectives import collective_s
from optimus.planner.machine_rates import ProductRates, rates_of


@pytest.fixture
def quick(monkeypatch):
    """Replace constants of the measurement, so that the measurement takes less time."""
    shorten(monkeypatch)


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_timer, "_BUDGET_S", 0.001)
    monkeypatch.setattr(network, "_RUNS", 2)
    monkeypatch.setattr(network, "_COMPUTED", {"cpu": 64})
    monkeypatch.setattr(bench, "_DISK_BYTES", 1 << 20)
    monkeypatch.setattr(bench, "_CPU_BYTES", 1 << 20)
    monkeypatch.setattr(planner_rates, "_RUNS", 3)
    monkeypatch.setattr(planner_rates, "_COPIED_BYTES", 1 << 20)


def test_fit_finds_the_constants_of_the_model():
    truth = ProductRates(100.0, 0.8, 40.0)
    shapes = [Shape(1024, 1024, 1024), Shape(64, 1024, 1024), Shape(256, 64, 512)]
    share, half = fit_products(100.0, [(shape, truth.rate(*shape)) for shape in shapes])
    assert share == pytest.approx(0.8, rel=0.03) and half == pytest.approx(40.0, rel=0.06)


def test_fitted_share_is_below_the_peak():
    share, _ = fit_products(100.0, [(Shape(64, 64, 64), 100.0), (Shape(512, 512, 512), 99.0)])
    assert share < 1


def test_a_single_rank_writes_a_machine_file(quick, tmp_path, capsys):
    result = bench.bench_machine(SINGLE, "cpu", 1, tmp_path)
    assert result is not None and result["network"] == {}
    assert list(tmp_path.iterdir()) == []  # the file for the disk's rate is removed
    path = tmp_path / "m.toml"
    write_machine(result, path)
    machine = load_machine(str(path))
    assert machine.model_dump(exclude_none=True)["device"]["name"] == machine.measured.device
    rates = rates_of(machine, "fp32", str(path))
    assert rates.gradients == machine.device.gradients_achieved.value <= rates.memory
    assert 0 < rates.products.rate(512, 512, 512) < rates.products.peak
    assert len(machine.device.products["bf16"].measured) == 8
    assert load_links(str(path)) == machine.links
    disk = {"disk_read", "disk_write"}  # only bench links --disk measures these rates
    assert set(result["machine"]["links"]) == set(type(machine.links).model_fields) - disk
    assert machine.measured.differences("x", machine.measured.cores, 1, machine.measured.torch) == [
        f"device: {machine.measured.device} measured, x now"
    ]
    text = path.read_text().replace("\nthreads = 1\n", "\nthreads = 7\n", 1)
    path.write_text(text.replace(f"cores = {machine.measured.cores}", "cores = 999"))
    words = ["plan", str(FOLDER.parent / "run" / "demo.toml"), "--machine", str(path)]
    assert optimus([*words, "train.threads=1"]) == 0
    printed = capsys.readouterr().out
    differences = f"cores: 999 measured, {machine.measured.cores} now; threads: 7 measured, 1 now"
    assert f"{differences}; measure again with optimus bench machine" in printed
    assert "fp32 products: peak" in format_machine(result)
    assert 0 < result["steadiness"] <= 1
    assert "warning" not in format_machine(result | {"steadiness": 0.9})
    assert "ranks reach only 30% of their speed" in format_machine(result | {"steadiness": 0.3})


def test_products_of_a_shape_are_those_of_a_linear_layer(monkeypatch):
    """A measured shape (rows, inner, columns) represents a linear layer. The three products that
    the benchmark computes must have the shapes and strides of the products in forward and backward
    of this layer."""
    calls = []
    monkeypatch.setattr(torch, "mm", lambda a, b: calls.append((a.shape, b.shape, a.stride())))
    run = bench._layer_products(Shape(8, 16, 32), torch.float32, torch.device("cpu"))
    run()
    assert calls == [
        ((8, 16), (16, 32), (16, 1)),  # output
        ((8, 32), (32, 16), (32, 1)),  # gradient of the input
        ((32, 8), (8, 16), (1, 32)),  # gradient of the weight
    ]


def test_consecutive_products_of_a_shape_have_different_operands(monkeypatch):
    """In this test, four copies of the operands exceed the caches. Four consecutive runs must use
    different copies, so that the caches never contain the operands of the next run."""
    operands = []
    monkeypatch.setattr(torch, "mm", lambda a, b: operands.append((a.data_ptr(), b.data_ptr())))
    monkeypatch.setattr(bench, "_CPU_BYTES", 4 * 64 * 64 * 4)
    run = bench._layer_products(Shape(64, 64, 64), torch.float32, torch.device("cpu"))
    for _ in range(8):
        run()
    rounds = [operands[first : first + 3] for first in range(0, 24, 3)]
    assert rounds[:4] == rounds[4:]
    used = [{address for pair in of_round for address in pair} for of_round in rounds[:4]]
    assert len(set.union(*used)) == sum(map(len, used)) == 4 * 3  # input, weight and gradient


def test_rate_of_a_product_counts_the_three_products_of_a_run(monkeypatch):
    """A run of a shape has the FLOPs of three products. Its median time gives the rate, and its
    smallest time the peak."""
    seconds = {8: [2.0, 1.0, 4.0], 16: [4.0, 6.0, 5.0]}
    shapes = [Shape(rows, 4, 2) for rows in seconds]
    attention = {"forward": {"value": 1.0}, "backward": {"value": 1.0}}
    of_shapes = iter(seconds.values())
    timer = SimpleNamespace(
        device=torch.device("cpu"), times=lambda run: next(of_shapes), slowest=lambda s: s
    )
    monkeypatch.setattr(bench, "shapes_for", lambda device_type: shapes)
    monkeypatch.setattr(bench, "_attention_tables", lambda *_: [attention])
    times = bench._ProductTimes(timer, torch.float32)
    times.add_round()
    tables = times.tables(lambda value: {"value": value})
    rates = [product["flops"]["value"] for product in tables["measured"]]
    assert rates == [3 * 2 * 8 * 4 * 2 / 2.0, 3 * 2 * 16 * 4 * 2 / 5.0]
    assert tables["peak"]["value"] == pytest.approx(3 * 2 * 8 * 4 * 2 / 1.0, rel=1e-3)


def test_rates_of_memory_count_the_bytes_of_all_passes(monkeypatch):
    """The passes over gradients are the norm, the check and filling with zeros, and each pass
    counts the bytes of the gradients. An addition in place reads two tensors and writes one."""
    size, seconds, runs = 1 << 12, iter((1.0, 2.0, 5.0, 4.0)), []

    def median(run):
        runs.append(run)
        return next(seconds)

    monkeypatch.setattr(bench, "_CPU_BYTES", size)
    timer = SimpleNamespace(device=torch.device("cpu"), median=median)
    assert bench._gradients_rate(timer) == pytest.approx(3 * size / 8.0)
    norm, check, fill = runs
    assert norm() == size // 4 and check() == (1, 1) and not fill().any()
    assert bench._memory_rate(timer) == pytest.approx(3 * size / 4.0)


def measure(folder: str, ranks_per_node: int) -> dict | None:
    launch = read_launch_env()
    launch = replace(
        launch, local_rank=launch.rank % ranks_per_node, local_world_size=ranks_per_node
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        shorten(monkeypatch)
        return bench.bench_machine(launch, "cpu", 1, Path(folder))


def test_two_ranks_measure_their_collectives(ranks, tmp_path):
    result, nothing = ranks(2, measure, str(tmp_path), 2, start_world=False)
    assert nothing is None and set(result["network"]) == {"node"}
    write_machine(result, tmp_path / "m.toml")
    machine = load_machine(str(tmp_path / "m.toml"))
    (node,) = machine.levels
    assert (node.ranks, machine.ranks_per_node, machine.measured.ranks) == (2, 2, 2)
    assert node.achieved.value <= node.peak.value
    rates = rates_of(machine, "fp32")
    for operation, sent, steps in (("all_reduce", 4096, 2), ("all_gather", 4096, 1)):
        (message,) = [m for m in node.messages if (m.operation, m.num_bytes) == (operation, sent)]
        seconds = collective_s(operation, 2 * sent, (0, 1), rates.links)
        assert seconds == pytest.approx(steps * message.seconds.value)
    assert {m.operation for m in node.messages} == set(network.OPERATIONS)


def test_ranks_of_two_nodes_measure_two_levels(ranks, tmp_path):
    """Four ranks on this machine emulate two nodes of two ranks each."""
    result, *_ = ranks(4, measure, str(tmp_path), 2, start_world=False)
    assert set(result["network"]) == {"node", "cluster"}
    write_machine(result, tmp_path / "m.toml")
    machine = load_machine(str(tmp_path / "m.toml"))
    assert [(level.name, level.ranks) for level in machine.levels] == [("node", 2), ("cluster", 0)]
    assert (machine.measured.nodes, machine.measured.ranks) == (2, 2)
    rates = rates_of(machine, "fp32")
    assert collective_s("all_reduce", 1 << 20, (0, 1, 2, 3, 4, 5), rates.links) > 0


def test_rounded_messages_are_not_above_the_peak():
    """A message takes 0.99994 s or 1.00049 s, which is rounded to 0.9999 s or 1 s. Its rate is the
    largest of the level, and for some sizes rounding lowers the peak, too."""

    def figure(value):
        return {"value": float(f"{value:.4g}"), "source": "test", "date": "2026-11-29"}

    rates = dict.fromkeys(network.OPERATIONS, 1.0)
    for size in range(100_000, 101_000):
        for seconds in (0.99994, 1.00049):
            messages = [network.Message("send", size, seconds)]
            level = network.LevelRates(rates, 1e-6, messages)
            (table,) = bench._level_tables({"node": level}, 2, figure)
            assert size / table["messages"][0]["seconds"]["value"] <= table["peak"]["value"]


def test_ranks_that_are_not_in_the_order_of_the_nodes_are_refused():
    launch = replace(SINGLE, rank=1, local_rank=0, local_world_size=2)
    with pytest.raises(ConfigError, match="must have consecutive numbers"):
        bench.bench_machine(replace(launch, world_size=1), "cpu", 1, Path("."))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mixes", "3"], "--mixes has no effect on bench machine; remove --mixes"),
        (["--nproc", "0"], "--nproc 0 must be at least 1"),
        (["absent.toml"], "absent.toml"),
    ],
)
def test_mistakes_are_refused(options, message, capsys):
    assert optimus(["bench", "machine", *options]) == 2
    assert message in capsys.readouterr().err


def test_folder_and_file_that_cannot_be_written_are_refused(quick, tmp_path, capsys):
    options = ["bench", "machine", "--nproc", "1"]
    assert optimus([*options, "--dir", "/absent"]) == 2
    assert "--dir /absent: No such file or directory; use another folder" in capsys.readouterr().err
    assert optimus([*options, "--dir", str(tmp_path), "--out", "/absent/f", "--json"]) == 2
    assert "--out /absent/f: No such file or directory; use" in capsys.readouterr().err


def test_json_has_the_tables_and_the_rates_of_the_file(quick, monkeypatch, tmp_path, capsys):
    """Gradients have their measured rate. The rate of activations is limited by that of memory."""
    for name, rate in (("memory", 3e9), ("gradients", 2e9), ("activations", 4e9)):
        monkeypatch.setattr(bench, f"_{name}_rate", lambda _, rate=rate: rate)
    options = ["bench", "machine", "--nproc", "1", "--dir", str(tmp_path), "--json"]
    assert optimus(options) == 0
    machine = json.loads(capsys.readouterr().out)["machine"]
    assert {"links", "device", "measured", "storage", "host_memory_bytes"} <= set(machine)
    names = ("memory_achieved", "gradients_achieved", "activations_achieved")
    assert [machine["device"][name]["value"] for name in names] == [3e9, 2e9, 3e9]
    assert machine["links"]["memory"] == 3e9


@pytest.mark.parametrize("name", ["machine", "links", "step"])
def test_unwritable_file_is_refused_before_the_measurement(monkeypatch, capsys, name):
    def measured(*_):
        raise AssertionError("the measurement began")

    monkeypatch.setattr(bench, "bench_machine", measured)
    monkeypatch.setattr("optimus.bench.links.bench_links", measured)
    monkeypatch.setattr("optimus.bench.layout.bench_layout", measured)
    option = "--trace" if name == "step" else "--out"
    config = [str(FOLDER.parent / "run" / "mula-1b.toml")] if name == "step" else []
    ranks = [] if name == "links" else ["--nproc", "1"]
    assert optimus(["bench", name, *config, *ranks, option, "/absent/f"]) == 2
    assert f"{option} /absent/f: No such file or directory" in capsys.readouterr().err
