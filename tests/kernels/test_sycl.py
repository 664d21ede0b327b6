"""Tests of the SYCL kernels on Intel's OpenCL device for CPUs. Results are compared with the
reference implementations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from optimus_kernels import library
from tests.kernels import on_cpu
from tests.kernels import op_checks as checks
from tests.kernels.planted import BUGS, Bug

PREFIX = on_cpu.find_wheels()
pytestmark = [
    pytest.mark.skipif(isinstance(PREFIX, str), reason=str(PREFIX)),
    pytest.mark.usefixtures("filled"),
]

SMALL = [routing for routing in checks.ROUTINGS if routing.tokens < 1000]


@pytest.fixture(scope="module")
def sycl(tmp_path_factory: pytest.TempPathFactory) -> on_cpu.SyclOnCpu:
    """Compile all launchers and functors of csrc/sycl."""
    proof = on_cpu.SyclOnCpu(PREFIX, tmp_path_factory.mktemp("sycl"))
    proof.build(proof.source)
    return proof


@pytest.fixture(params=on_cpu.LANES)
def lanes(request, sycl, monkeypatch) -> Iterator[int]:
    """Make all ops run the SYCL kernels, and return the number of lanes in a sub-group."""
    sycl.use(sycl.source, request.param)
    monkeypatch.setattr(library, "native", lambda tensor, **_: sycl)
    return request.param


def test_device_is_a_cpu_and_all_functors_are_compiled(sycl):
    # gather, swiglu, reduce and the backward of the last two: 3 dtypes and 2 vector widths each.
    # route: 3 kernels. adamw: 3 dtypes of gradients, 2 of parameters, and 2 vector widths.
    assert sycl.num_functors == 3 * 2 * 5 + 3 + 3 * 2 * 2
    assert "Intel(R) OpenCL" in sycl.device  # the device's name on CPUs of all vendors


@pytest.mark.parametrize("routing", checks.ROUTINGS, ids=lambda routing: routing.name)
def test_route(lanes, routing):
    checks.check_route(routing, "cpu")


def test_route_ignores_numbers_out_of_range(lanes):
    checks.check_out_of_range("cpu")


@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("size", checks.SIZES)
def test_rows_of_all_sizes(lanes, size, dtype):
    for routing in SMALL:
        checks.check_rows(routing, size, dtype, "cpu")
    for rows in (0, 1, 131):
        checks.check_swiglu(rows, size, dtype, "cpu")


def test_non_finite_values(lanes):
    checks.check_non_finite("cpu")


def test_invalid_sizes_are_refused(lanes, sycl):
    with pytest.raises(RuntimeError, match="-2"):
        sycl.call("gather", None, 0, None, None, -1, 4, None)
    with pytest.raises(RuntimeError, match="-1"):
        sycl.call("gather", None, 9, None, None, 1, 4, None)
    with pytest.raises(RuntimeError, match="-2"):
        sycl.call("route", None, None, 2**30, 2, 0, 4, *[None] * 5, 2**40)


@pytest.mark.parametrize("options", [(), ("-DOPTIMUS_SYCL_ESIMD",)], ids=["plain", "esimd"])
def test_file_compiles_without_changes(sycl, options):
    sycl.compile(sycl.source, options)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_detected(sycl, monkeypatch, tmp_path, bug):
    monkeypatch.setattr(library, "native", lambda tensor, **_: sycl)
    sycl.use(sycl.source, 16)
    bug.check(sycl)
    planted = bug.plant(tmp_path) / "sycl/kernels.sycl"
    sycl.build(planted, bug.functor)
    sycl.use(planted, 16)
    with pytest.raises(AssertionError):
        bug.check(sycl)


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("throw 1;", "exception"),
        ("outside();", "outside"),
        ("static int calls = 0; ++calls;", "static"),
    ],
    ids=["an exception", "an unknown call", "a variable of the host"],
)
def test_code_that_a_device_cannot_run_is_refused(sycl, tmp_path, new, message):
    old = "const int64_t pieces = route_pieces(slots);"
    bug = Bug("", "include/gpu/route.h", old, f"{old} {new}", "", lambda native: None)
    with pytest.raises(on_cpu.DeviceCodeError, match=message):
        sycl.compile(bug.plant(tmp_path) / "sycl/kernels.sycl")
