"""Tests of collective backends, conflicts with IPEX, the number of threads and compile caches."""

from __future__ import annotations

import importlib
import mmap
import os
import resource
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed

from optimus import platform
from optimus.errors import ConfigError
from optimus.platform import check_compile, collective_backend, use_private_compile_cache

XPU = torch.device("xpu")
CCL_MODULE = """
import torch.distributed as distributed

def make(store, rank, size, timeout):
    return distributed.ProcessGroupGloo(store, rank, size, timeout)

distributed.Backend.register_backend("ccl", make, devices=["cpu"])
"""


@pytest.fixture
def oneccl(tmp_path, monkeypatch):
    """Return a function that writes a fake module `oneccl_bindings_for_pytorch`, which can then be
    imported. The argument of the function is the source code of the module."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "oneccl_bindings_for_pytorch", raising=False)

    def write(text: str) -> None:
        (tmp_path / "oneccl_bindings_for_pytorch.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("oneccl_bindings_for_pytorch", None)


def without_xccl(monkeypatch) -> None:
    monkeypatch.setattr(distributed, "is_xccl_available", lambda: False, raising=False)


def test_backend_of_torch_comes_first(oneccl, monkeypatch):
    oneccl("raise AssertionError('not to be imported')")
    monkeypatch.setattr(distributed, "is_xccl_available", lambda: True, raising=False)
    assert collective_backend(XPU) == "xccl"
    assert collective_backend(torch.device("cuda")) == "nccl"
    assert collective_backend(torch.device("cpu")) == "gloo"


def test_legacy_ccl_where_only_its_bindings_are(oneccl, monkeypatch):
    without_xccl(monkeypatch)
    monkeypatch.setattr(distributed.Backend, "CCL", None, raising=False)  # restored by monkeypatch
    oneccl(CCL_MODULE)
    assert collective_backend(XPU) == "ccl"
    assert "oneccl_bindings_for_pytorch" in sys.modules  # importing it registers the backend
    assert "ccl" in distributed.Backend.backend_list


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "is not installed"), ("raise ImportError('libccl.so.1: no such file')", "libccl.so.1")],
)
def test_missing_backend_is_a_single_line(oneccl, monkeypatch, text, message):
    without_xccl(monkeypatch)
    if text:
        oneccl(text)
    with pytest.raises(ConfigError, match=message) as error:
        collective_backend(XPU)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["imported", "to be imported", "left out"])
def test_compiling_with_ipex_is_refused(how, tmp_path, monkeypatch):
    """IPEX's layer_norm has no gradient under torch.compile. `train.compile` must be refused if
    IPEX is imported already, or will be imported."""
    name = "intel_extension_for_pytorch"
    monkeypatch.setenv("OPTIMUS_IPEX", "1" if how == "to be imported" else "0")
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    if how == "imported":
        monkeypatch.setitem(sys.modules, name, sys)
    if how != "left out":
        with pytest.raises(ConfigError, match="set OPTIMUS_IPEX=0 .*or train.compile = false"):
            check_compile(True)
    else:
        check_compile(True)
    check_compile(False)


@pytest.mark.parametrize(
    ("setting", "deterministic", "variable", "expected"),
    [
        (3, True, "2", 3),
        (0, True, "2", 1),
        (0, False, "2", 2),
        (0, False, " 4,2", 4),
        (0, False, "many", 5),
        (0, False, "0", 5),
        (0, False, None, 5),
    ],
)
def test_threads_follow_the_setting_the_mode_the_variable_the_cores(
    monkeypatch, setting, deterministic, variable, expected
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(platform, "available_cores", lambda: 11)
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    assert platform.set_threads(setting, deterministic, local_world_size=2) == expected
    assert set_to == [expected]


def test_compiled_libraries_are_kept_where_no_other_user_can_put_some(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def cache() -> Path:
        use_private_compile_cache()
        return Path(os.environ.pop("TORCHINDUCTOR_CACHE_DIR"))

    first = cache()
    assert first == cache() and first.stat().st_mode & 0o777 == 0o700
    first.chmod(0o777)  # other users can write to this folder
    other = cache()
    assert other != first and other.stat().st_mode & 0o777 == 0o700
    tmp_path.chmod(0o1777)
    assert cache().parent == tmp_path
    tmp_path.chmod(0o777)
    (tmp_path / "mine").mkdir(mode=0o700)
    for folder in (tmp_path, tmp_path / "mine"):  # parent folders are checked, too
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        with pytest.raises(ConfigError, match="other users can replace folders in .*; set TMPDIR"):
            use_private_compile_cache()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/chosen")
    use_private_compile_cache()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/chosen"


class Runtime:
    """Fake of CUDA's runtime. It records the host memory that is registered and unregistered, and
    refuses to register the address 0."""

    def __init__(self) -> None:
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.registered.append((address, size))
        return 0 if address else 1

    def cudaHostUnregister(self, address: int) -> int:
        self.unregistered.append(address)
        return 0


def check_error(status: int) -> None:
    if status:
        raise RuntimeError("invalid argument")


def test_host_memory_for_cuda_is_registered_once_and_stays_mapped(monkeypatch):
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(platform, "_locked_pages", {})
    device = torch.device("cuda")
    for length in (5, 0, 5000, 5):
        flat = platform.host_zeros(length, torch.float32, device)
        assert len(flat) == length and flat.dtype is torch.float32 and not flat.any()
        del flat
    page = mmap.PAGESIZE
    first, second, third = runtime.registered
    assert len({address for address, _ in (first, second, third)}) == 3
    assert [size for _, size in (first, second, third)] == [page, -(-20000 // page) * page, page]
    assert list(platform._locked_pages) == [first[0], second[0], third[0]]
    flat = platform.host_zeros(7, torch.float32, device).fill_(3.0)
    platform.free_host(flat)
    platform.free_host(flat)
    platform.free_host(torch.zeros(5))
    assert runtime.unregistered == [flat.data_ptr()] and len(platform._locked_pages) == 3
    assert bool((flat == 3.0).all())


def test_memory_that_cannot_be_locked_is_a_single_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda status: check_error(1))
    monkeypatch.setattr(platform, "_locked_pages", {0: b"1234"})
    for limit, remedy in (
        (resource.RLIM_INFINITY, "or request more memory"),
        (24, "or request more memory"),
        (23, "or raise the limit of locked memory by 1 byte .ulimit -l 1., or request"),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, limit=limit: (limit, limit))
        message = "cannot lock 20 bytes of memory .invalid argument.; offl.* = false, " + remedy
        with pytest.raises(ConfigError, match=message):
            platform.host_zeros(5, torch.float32, torch.device("cuda"))
