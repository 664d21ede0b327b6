"""Tests of the CUDA kernels: compiled by nvcc, emulated on a CPU, and run on a GPU.

Tests that need nvcc or a GPU are skipped on other machines.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil

import pytest
import torch

from optimus_kernels import backend, build, library
from optimus_kernels.cache import Entry, KernelError
from tests.kernels import op_checks as checks
from tests.kernels.on_cpu import CudaOnCpu
from tests.kernels.op_checks import needs_torch_form
from tests.kernels.planted import BUGS

# As an attribute, `optimus_kernels.grouped_mm` is the op. The module with the same name stores the
# selected implementation in `_form`.
GROUPED = importlib.import_module("optimus_kernels.grouped_mm")
SMALL = [routing for routing in checks.ROUTINGS if routing.tokens < 1000]


def missing_compiler() -> str:
    try:
        build.find_compiler("cuda")
    except KernelError as error:
        return str(error)
    return ""


needs_nvcc = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or bool(missing_compiler()),
    reason=missing_compiler() or f"torch {torch.__version__} finds no CUDA device",
)
needs_host_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")


# ---- compiled ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Entry:
    """Compile the CUDA library as `optimus kernels build` does. In addition, compiler warnings
    are errors here."""
    nvcc = " ".join(build.find_compiler("cuda"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPTIMUS_KERNELS_CACHE", str(tmp_path_factory.mktemp("cuda")))
        patch.setenv("NVCC", f"{nvcc} -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror")
        return build.build("cuda")


@needs_nvcc
def test_all_launchers_are_exported(built):
    loaded = backend.load(built)
    native = library.Native(loaded, "cpu")  # fails unless all signatures can be bound
    assert native.route_scratch(1000, 8, 64) == 16 * 64
    assert loaded.optimus_kernels_abi() == build.interface_version()


@needs_nvcc
def test_library_contains_code_for_each_architecture(built):
    # nvcc stores the options of its last step with the code of each device.
    words = built.library.read_bytes()
    for arch in build.CUDA_ARCHS:
        assert f"-arch sm_{arch} ".encode() in words


@needs_nvcc
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_launchers_return_an_error_code(built):
    native = library.Native(backend.load(built), "cpu")
    memory = ctypes.create_string_buffer(64)
    on, at = torch.empty(0), ctypes.addressof(memory)
    with pytest.raises(RuntimeError, match="runtime's error [1-9]"):
        native.call("gather", on, 0, at, at, 1, 1, at)


# ---- run on a CPU --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> CudaOnCpu:
    return CudaOnCpu(build.csrc() / "cuda/kernels.cu", tmp_path_factory.mktemp("cuda_on_cpu"))


@needs_host_compiler
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("routing", checks.ROUTINGS, ids=lambda routing: routing.name)
def test_route_on_an_emulated_gpu(emulated, monkeypatch, routing):
    monkeypatch.setattr(library, "native", lambda tensor, **_: emulated)
    checks.check_route(routing, "cpu")


@needs_host_compiler
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
def test_rows_on_an_emulated_gpu(emulated, monkeypatch, dtype):
    monkeypatch.setattr(library, "native", lambda tensor, **_: emulated)
    for routing in SMALL:
        for size in (1, 136, 521):
            checks.check_rows(routing, size, dtype, "cpu")


EXPERTS = (checks.ROUTINGS[1], checks.ROUTINGS[6])
"""Two routings. In the first, all experts are local. In the second, only some experts are local."""


@needs_host_compiler
@needs_torch_form
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("routing", EXPERTS, ids=lambda routing: routing.name)
def test_experts_on_an_emulated_gpu(emulated, monkeypatch, routing):
    """Run the op `experts` with torch's grouped_mm and emulated CUDA kernels."""
    exact = checks.experts_step(routing, torch.float64, torch.float32, "cpu")()
    monkeypatch.setattr(library, "native", lambda tensor, **_: emulated)
    monkeypatch.setattr(GROUPED, "_form", "torch")
    actual = checks.experts_step(routing, torch.float32, torch.float32, "cpu")()
    checks.assert_near(actual, exact, 1e-5)


@needs_host_compiler
@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_is_detected(emulated, monkeypatch, tmp_path, bug):
    monkeypatch.setattr(library, "native", lambda tensor, **_: emulated)
    bug.check(emulated)
    planted = CudaOnCpu(bug.plant(tmp_path) / "cuda/kernels.cu", tmp_path)
    monkeypatch.setattr(library, "native", lambda tensor, **_: planted)
    # Fill new tensors, which could otherwise contain the correct results of the first check.
    torch.set_deterministic_debug_mode("warn")
    try:
        with pytest.raises(AssertionError):
            bug.check(planted)
    finally:
        torch.set_deterministic_debug_mode("default")


# ---- run on a GPU --------------------------------------------------------------------------------


@pytest.fixture
def gpu(built, monkeypatch) -> str:
    """Select the library of `built` for CUDA devices, and return the device "cuda"."""
    active = backend.Backend("cuda", built.key, backend.load(built))
    monkeypatch.setitem(backend._active, "cuda", active)
    return "cuda"


@needs_gpu
@pytest.mark.parametrize("routing", checks.ROUTINGS, ids=lambda routing: routing.name)
def test_route_on_a_gpu(gpu, routing):
    checks.check_route(routing, gpu)


@needs_gpu
def test_numbers_out_of_range_and_non_finite_values_on_a_gpu(gpu):
    checks.check_out_of_range(gpu)
    checks.check_non_finite(gpu)


@needs_gpu
@pytest.mark.parametrize("dtype", checks.DTYPES, ids=str)
@pytest.mark.parametrize("size", (*checks.SIZES, 2048))
def test_rows_on_a_gpu(gpu, size, dtype):
    for routing in checks.ROUTINGS:
        checks.check_rows(routing, size, dtype, gpu)


@needs_gpu
def test_ops_do_not_wait_for_the_host_and_use_the_current_stream(gpu):
    """A CUDA graph captures the ops and replays them on new input. The capture fails if an op waits
    for the host."""
    from optimus_kernels.rows import gather, reduce_rows, route
    from optimus_kernels.swiglu import swiglu, swiglu_backward

    routing = checks.ROUTINGS[1]
    x = checks.random(routing.tokens, 128, dtype=torch.bfloat16, device=gpu)
    w = checks.random(routing.tokens, routing.top_k, dtype=torch.bfloat16, device=gpu, seed=2)
    chosen = routing.chosen(gpu)

    def step():
        rows = route(chosen, 0, routing.total)
        h = gather(x, rows.token, rows.row)
        a = swiglu(h)
        return reduce_rows(a, w, rows.row, rows.slot), *swiglu_backward(h, a, w, rows.slot)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    x.copy_(checks.random(routing.tokens, 128, dtype=torch.bfloat16, device=gpu, seed=5))
    chosen.copy_(chosen.flip(0))
    graph.replay()
    assert all(map(torch.equal, replayed, step()))


@needs_gpu
@pytest.mark.parametrize("routing", EXPERTS, ids=lambda routing: routing.name)
def test_experts_on_a_gpu_never_wait_for_the_host(gpu, routing):
    exact = checks.experts_step(routing, torch.float64, torch.bfloat16, "cpu")()
    step = checks.experts_step(routing, torch.bfloat16, torch.bfloat16, gpu)
    step()  # the first step waits while it fills caches
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        actual = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    checks.assert_near(actual, exact, 1e-2)


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_work_goes_to_the_tensors_device(gpu):
    checks.check_route(checks.ROUTINGS[1], "cuda:1")
    checks.check_rows(checks.ROUTINGS[1], 136, torch.bfloat16, "cuda:1")
