"""Tests of compilation: compilers, targets, and reasons not to use a compiled library."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optimus_kernels import backend, build, cache, sycl_build
from optimus_kernels.cache import KernelError

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
IPEX_EXTENSION = "intel_extension_for_pytorch.xpu.cpp_extension"


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@needs_gxx
def test_library_is_reused_until_an_input_changes(small_csrc, monkeypatch):
    first = build.build("cpu")
    assert build.build("cpu") == first and build.why_incompatible(first) == ""
    (small_csrc / "include" / "more.h").write_text("// a comment\n")
    build.source_hash.cache_clear()
    second = build.build("cpu")
    assert second.key != first.key
    assert build.why_incompatible(first).startswith("built from other source files")
    assert build.prebuilt("cpu") == second
    monkeypatch.setattr(build, "CPU_FLAGS", [*build.CPU_FLAGS, "-DMORE"])
    assert build.why_incompatible(second).startswith("built with other compiler flags")
    assert build.build("cpu").key not in (first.key, second.key)


@needs_gxx
@pytest.mark.parametrize(
    ("field", "value"), [("torch", "2.5.0"), ("machine", "riscv64"), ("arch", "sm_70")]
)
def test_library_for_another_target_is_refused_with_the_reason(small_csrc, field, value):
    entry = build.build("cpu")
    path = entry.path / cache.RECORD
    path.write_text(json.dumps({**entry.record, field: value}))
    (other,) = cache.entries("cpu")
    assert build.why_incompatible(other).startswith(f"built for {field} {value}, not for ")
    assert build.prebuilt("cpu") is None
    with pytest.raises(KernelError, match=f"is built for {field} {value}"):
        backend.obtain("cpu", may_build=False)


@needs_gxx
def test_another_compiler_gives_another_library(small_csrc, tmp_path, monkeypatch):
    first = build.build("cpu")
    script = '#!/bin/sh\ncase "$*" in *--version*) echo "mine 1.0"; exit;; esac\nexec g++ "$@"\n'
    monkeypatch.setenv("CXX", f"{executable(tmp_path / 'mine', script)} -DX=1")
    second = build.build("cpu")
    assert second.record["compiler"] == "mine 1.0 -DX=1" and second.key != first.key
    # `prebuilt` compiles nothing. It accepts a library of any compiler, and prefers the library
    # with the given key.
    assert build.prebuilt("cpu", first.key) == first and build.prebuilt("cpu") == second


def test_missing_and_failing_compilers_are_named(small_csrc, tmp_path, monkeypatch):
    for cxx, message in (
        ("no-such-compiler", "CXX=no-such-compiler: no such compiler"),
        ('"', "not a shell command"),
        (" ", "no such compiler"),
    ):
        monkeypatch.setenv("CXX", cxx)
        with pytest.raises(KernelError, match=message):
            build.build("cpu")
    script = '#!/bin/sh\n[ $1 = --version ] && echo me && exit\necho "x: error: sour" >&2; exit 3\n'
    monkeypatch.setenv("CXX", str(executable(tmp_path / "sour", script)))
    with pytest.raises(KernelError, match="sour failed with status 3: x: error: sour"):
        build.build("cpu")
    assert cache.entries("cpu") == [] and not list(cache.cache_dir().glob(".*.tmp"))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelError, match=r"no compiler: g\+\+ or .* is not on PATH"):
        build.build("cpu")


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
def test_cuda_library_supports_two_architectures(small_csrc):
    entry = build.build("cuda")
    assert entry.record["arch"] == "sm_80,sm_90" and entry.library.stat().st_size > 1000
    assert "release" in entry.record["compiler"]


def test_sycl_without_xpu_support_is_refused_with_the_remedy(small_csrc):
    if getattr(torch.version, "xpu", None):
        pytest.skip("this torch has xpu support")
    (small_csrc / "sycl" / "kernels.sycl").write_text("")
    with pytest.raises(KernelError, match="has no xpu support; install torch's xpu build"):
        build.build("sycl")


def test_search_for_ipex_does_not_import_it(tmp_path, monkeypatch):
    if getattr(torch.version, "xpu", None):
        pytest.skip("this torch has xpu support")
    package = tmp_path / sycl_build.IPEX / "xpu"
    package.mkdir(parents=True)
    for module in (package.parent / "__init__.py", package / "__init__.py"):
        module.write_text("raise AssertionError('imported')")
    (package / "cpp_extension.py").write_text("")
    monkeypatch.delitem(sys.modules, sycl_build.IPEX, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KernelError, match="has no xpu support"):
        sycl_build.way()
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    assert sycl_build.way() == "ipex"


def test_sycl_is_compiled_ahead_of_time_for_pvc(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCH_XPU_ARCH_LIST", raising=False)
    monkeypatch.setattr(sycl_build, "way", lambda: "torch")
    command, environ = sycl_build.command([Path("a.sycl")], Path("include"), tmp_path)
    assert environ["TORCH_XPU_ARCH_LIST"] == "pvc"
    assert json.loads(command[-2]) == {"way": "torch", "sources": ["a.sycl"], "include": "include"}
    monkeypatch.setenv("TORCH_XPU_ARCH_LIST", "pvc,bmg")
    assert sycl_build.arch_list() == "pvc,bmg"


def test_sycl_extension_accepts_our_arguments(monkeypatch):
    """torch's SyclExtension must accept our arguments. The test needs no torch with XPU support."""
    from torch.utils import cpp_extension

    monkeypatch.setattr(cpp_extension, "include_paths", lambda **_: [])
    monkeypatch.setattr(cpp_extension, "library_paths", lambda **_: [])
    extension = cpp_extension.SyclExtension(**sycl_build.torch_arguments(["a.sycl"], "include"))
    assert extension.name == sycl_build.NAME and extension.sources == ["a.sycl"]
    assert "-fno-fast-math" in extension.extra_compile_args["sycl"]
    assert "include" in extension.include_dirs and "c10_xpu" in extension.libraries


def test_arguments_for_ipex_request_aot_compilation_for_pvc(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_XPU_ARCH_LIST", raising=False)
    source = tmp_path / "in" / "a.sycl"
    source.parent.mkdir()
    source.write_text("int x;")
    arguments = sycl_build.ipex_arguments([str(source)], "include", tmp_path)
    (copy,) = arguments["sources"]
    assert copy.endswith("a_sycl.cpp") and Path(copy).read_text() == "int x;"
    assert arguments["include_dirs"] == ["include", str(source.parent)]
    assert "-fno-fast-math" in arguments["extra_compile_args"]["cxx"]
    link = arguments["extra_link_args"]
    assert link[link.index("-Xs") + 1] == "-device pvc"
    assert "-fsycl-targets=spir64_gen" in link


@pytest.mark.skipif(
    importlib.util.find_spec("intel_extension_for_pytorch") is None, reason="IPEX is not installed"
)
def test_extension_of_ipex_accepts_our_arguments(tmp_path):
    """The test runs in a separate process, because importing IPEX would replace torch's operators
    in later tests."""
    source = tmp_path / "a.sycl"
    source.write_text("int x;")
    code = f"""
import importlib, json, pathlib
from optimus_kernels import sycl_build
extension = importlib.import_module({IPEX_EXTENSION!r})
arguments = sycl_build.ipex_arguments([{str(source)!r}], "inc", pathlib.Path({str(tmp_path)!r}))
made = extension.DPCPPExtension(**arguments)
wanted = ("name", "include_dirs", "extra_compile_args", "extra_link_args")
print("MADE", json.dumps({{name: getattr(made, name) for name in wanted}}))
"""
    # IPEX finds oneAPI by these variables, which setvars.sh sets.
    roots = ("CMPLR_ROOT", "MKLROOT", "DNNLROOT")
    environ = {**os.environ, **dict.fromkeys(roots, str(tmp_path))}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    made = json.loads(result.stdout.partition("MADE ")[2].splitlines()[0])
    assert made["name"] == sycl_build.NAME and "inc" in made["include_dirs"]
    assert made["extra_compile_args"]["cxx"].count("-fsycl") == 1
    assert "-fsycl-targets=spir64_gen" in made["extra_link_args"]


@needs_gxx
def test_compiler_too_old_for_avx_builds_only_the_portable_kernels(small_csrc, too_old):
    (small_csrc / "cpu" / "kernels_avx2.cpp").write_text("#error\n")
    entry = build.build("cpu")
    assert entry.record["arch"] == "portable" and build.why_incompatible(entry) == ""
    assert "OPTIMUS_PORTABLE_ALONE" in entry.record["flags"]
