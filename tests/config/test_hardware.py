"""Tests of machine files: each value has a source and is within bounds, and wrong files are refused
with a message."""

from __future__ import annotations

import statistics

import pytest

from optimus.cli import main
from optimus.config.hardware import Figure
from optimus.config.machine import FOLDER, Machine, load_machine
from optimus.planner.machine_rates import rates_of

MACHINES = sorted(path.stem for path in FOLDER.glob("*.toml"))
_SOURCE = 'source = "a page", date = "2026-01"'


def figures(section: object) -> list[Figure]:
    """Return all values with a source (type Figure) in a section, at any depth."""
    if isinstance(section, Figure):
        return [section]
    if isinstance(section, dict):
        return [figure for value in section.values() for figure in figures(value)]
    if isinstance(section, tuple):
        return [figure for value in section for figure in figures(value)]
    fields = getattr(type(section), "model_fields", {})
    return [figure for name in fields for figure in figures(getattr(section, name))]


def test_the_machines_of_the_planner_exist():
    assert {"a100-80", "aurora", "h100", "h200"} <= set(MACHINES)


@pytest.mark.parametrize("name", MACHINES)
def test_each_figure_has_a_source_and_a_date_and_is_within_bounds(name):
    machine = load_machine(name)
    assert machine.device is not None and machine.levels
    all_figures = figures(machine)
    assert len(all_figures) >= 10
    assert all(figure.source and figure.date and figure.value > 0 for figure in all_figures)
    device = machine.device
    for products in device.products.values():
        assert (products.best_share or 0.5) < 1
    if device.memory_achieved is not None and device.memory_peak is not None:
        assert device.memory_achieved.value <= device.memory_peak.value
    for level in machine.levels:
        assert 0 < level.rate <= level.peak.value < 1e13


@pytest.mark.parametrize("name", ["a100-80", "aurora", "h100", "h200"])
def test_a_node_has_host_memory(name):
    memory = load_machine(name).host_memory_bytes
    assert memory is not None and 1e12 <= memory.value < 2.2e12


def test_fitted_figures_name_the_rows():
    fitted = [figure for figure in figures(load_machine("a100-80")) if figure.fitted_on]
    assert len(fitted) == 4
    assert sum("Table 5, full recomputation" in figure.fitted_on for figure in fitted) == 2
    assert sum("seed 0" in figure.fitted_on for figure in fitted) == 2
    assert not any(figure.fitted_on for figure in figures(load_machine("aurora")))
    for name in ("h100", "h200"):  # both use a value of the A100, as no value is published
        (transferred,) = [f for f in figures(load_machine(name)) if f.fitted_on]
        device = load_machine("a100-80").device
        assert device is not None and device.products["bf16"].half_size is not None
        assert transferred.value == device.products["bf16"].half_size.value


@pytest.mark.parametrize("name", MACHINES)
def test_model_of_products_has_the_measured_rates(name):
    rates = rates_of(load_machine(name), "bf16", name).products
    device = load_machine(name).device
    assert device is not None
    ratios = [
        rates.rate(product.rows, product.inner, product.columns) / product.flops.value
        for product in device.products["bf16"].measured
    ]
    assert not ratios or statistics.geometric_mean(ratios) == pytest.approx(1, abs=0.10)
    assert all(ratio == pytest.approx(1, abs=0.15) for ratio in ratios)


def test_products_of_aurora_have_the_rate_of_a_layer():
    """Predictions that use only oneMKL's rate of an 8192^3 product (81 % of the peak) would be too
    fast. In torch, the products of a layer that is divided over 12 tiles need 44.26 ms for 7.54e12
    FLOPs."""
    device = load_machine("aurora").device
    assert device is not None
    products = device.products["bf16"]
    assert len(products.measured) == 6 and products.efficiency is None
    assert products.best_share == pytest.approx(0.694, abs=0.001)
    flops = 2 * 16896 * 25872 * 8624
    rate = rates_of(load_machine("aurora"), "bf16", "aurora").products.rate(16896, 25872, 8624)
    assert flops / rate == pytest.approx(44.26e-3, rel=0.05)
    assert not products.half_size and device.products["fp32"].best_share == pytest.approx(0.98)


def test_taper_of_aurora_is_the_ratio_of_its_links():
    machine = load_machine("aurora")
    group, whole = machine.levels[-2:]
    links = 165 * 2 * 25 / (64 * 8 * 25)
    assert whole.taper is not None and whole.taper.value == pytest.approx(links, abs=0.001)
    assert whole.rate == pytest.approx(links * group.rate, rel=0.002)
    assert group.ranks == 64 * machine.ranks_per_node


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[device]\nname = 'x'\nmemory_bytes = { value = 1e9, date = '2026-01' }",
            "device.memory_bytes.source is missing",
        ),
        (
            "[device]\nname = 'x'\nmemory_bytes = { value = 1e9, source = ' ', date = '2026-01' }",
            "must name the page, paper or command that gives the value",
        ),
        (
            "[device]\nname = 'x'\n"
            "memory_bytes = { value = 1e9, source = 'a page', date = '1/26' }",
            "device.memory_bytes.date = '1/26'",
        ),
        (
            f"[device]\nname = 'x'\nmemory_bytes = {{ value = 0.0, {_SOURCE} }}",
            "device.memory_bytes.value = 0.0",
        ),
        (
            f"[device]\nname = 'x'\nmemory_bytes = {{ value = 1e9, {_SOURCE} }}\n"
            f"memory_peak = {{ value = 1e-300, {_SOURCE} }}",
            "device.memory_peak.value = 1e-300: must be from 1e-12 to 1e+30; correct the value",
        ),
        (
            "[links]\nto_device = 1e-300",
            "links.to_device = 1e-300: must be from 1e-12 to 1e+30; correct the value",
        ),
        (
            f"[device]\nname = 'x'\nmemory_bytes = {{ value = 1e9, {_SOURCE} }}\n"
            f"memory_peak = {{ value = 1e12, {_SOURCE} }}\n"
            f"memory_achieved = {{ value = 2e12, {_SOURCE} }}",
            "device: memory_achieved = 2e+12 is above the peak 1e+12; correct one",
        ),
        (
            f"[device]\nname = 'x'\nmemory_bytes = {{ value = 1e9, {_SOURCE} }}\n"
            f"memory_peak = {{ value = 1e12, {_SOURCE} }}\n"
            f"activations_achieved = {{ value = 2e12, {_SOURCE} }}",
            "device: activations_achieved = 2e+12 is above the peak 1e+12; correct one",
        ),
        (
            f"[device]\nname = 'x'\nmemory_bytes = {{ value = 1e9, {_SOURCE} }}\n"
            f"memory_peak = {{ value = 1e12, {_SOURCE} }}\n"
            f"gradients_achieved = {{ value = 2e12, {_SOURCE} }}",
            "device: gradients_achieved = 2e+12 is above the peak 1e+12; correct one",
        ),
        (
            f"[device]\nname = 'x'\nmemory_bytes = {{ value = 1e9, {_SOURCE} }}\n"
            f"[device.products.bf16]\npeak = {{ value = 1e12, {_SOURCE} }}\n"
            f"efficiency = {{ value = 1.0, {_SOURCE} }}",
            "efficiency = 1.0 must be below 1",
        ),
        (
            f"[device]\nname = 'x'\nmemory_bytes = {{ value = 1e9, {_SOURCE} }}\n"
            f"[device.products.bf16]\npeak = {{ value = 1e12, {_SOURCE} }}\n"
            "[[device.products.bf16.measured]]\nrows = 1\ninner = 1\ncolumns = 1\n"
            f"flops = {{ value = 2e12, {_SOURCE} }}",
            "measured.flops = 2e+12 is above the peak 1e+12",
        ),
        (
            f"[device]\nname = 'x'\nmemory_bytes = {{ value = 1e9, {_SOURCE} }}\n"
            f"[device.products.bf16]\npeak = {{ value = 1e12, {_SOURCE} }}\n"
            f"efficiency = {{ value = 0.7, {_SOURCE} }}\n"
            f"half_size = {{ value = 64.0, {_SOURCE} }}\n"
            "[[device.products.bf16.measured]]\nrows = 640\ninner = 640\ncolumns = 640\n"
            f"flops = {{ value = 0.7e12, {_SOURCE} }}",
            "efficiency and half_size give 0.75 times the FLOP/s in measured; correct the values",
        ),
        (
            f"[[levels]]\nname = 'node'\npeak = {{ value = 1.0, {_SOURCE} }}\n"
            f"achieved = {{ value = 2.0, {_SOURCE} }}",
            "achieved = 2 is above the peak 1",
        ),
        (
            f"[[levels]]\nname = 'node'\npeak = {{ value = 1.0, {_SOURCE} }}\n"
            f"taper = {{ value = 1.5, {_SOURCE} }}",
            "taper = 1.5 must be at most 1",
        ),
        (
            f"[[levels]]\nname = 'node'\nranks = 8\npeak = {{ value = 1.0, {_SOURCE} }}\n"
            f"[[levels]]\nname = 'group'\nranks = 12\npeak = {{ value = 1.0, {_SOURCE} }}",
            "levels: ranks = 12 of group must be a multiple of ranks = 8 of node",
        ),
        ("algorithm = 'tree'", "algorithm = 'tree'"),
        ("[device]\nnames = 'x'", "unknown key device.names"),
    ],
)
def test_wrong_figure_is_refused_in_a_line(tmp_path, capsys, text, message):
    path = tmp_path / "m.toml"
    path.write_text(text + "\n")
    assert main(["machine", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and str(path) in line
    assert "{'" not in line  # the message has the wrong value, but not the table that contains it


def test_machine_without_figures_is_valid():
    machine = Machine()
    assert machine.device is None and machine.levels == () and machine.algorithm == "ring"
