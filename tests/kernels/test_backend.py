"""Tests of the choice of a backend. `auto` falls back to torch with one log line. A backend that is
selected by name is used or refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess

import pytest
import torch

from optimus_kernels import backend, build, cache, library
from optimus_kernels.cache import KernelError

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")


@needs_gxx
def test_auto_uses_the_kernels_of_the_device_and_logs_nothing(small_csrc, capfd):
    active = backend.active(torch.device("cpu"))
    assert active.name == "cpu" and active.library.optimus_kernels_abi() == 7
    assert backend.active("cpu:0") is active
    assert capfd.readouterr() == ("", "")


def test_auto_falls_back_to_torch_with_a_single_line_on_the_first_rank(
    small_csrc, monkeypatch, capfd
):
    monkeypatch.setenv("CXX", "no-such-compiler")
    for _ in range(2):
        assert backend.active("cpu").name == "torch"
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "no-such-compiler" in err and "plain torch on cpu" in err
    backend._active.clear()
    monkeypatch.setenv("RANK", "1")
    assert backend.active("cpu").name == "torch"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["cpu", "sycl", "cuda"])
def test_unavailable_backend_selected_by_name_is_refused(small_csrc, monkeypatch, name):
    monkeypatch.setenv("OPTIMUS_KERNELS", name)
    monkeypatch.setenv("CXX", "no-such-compiler")
    match = "no-such-compiler" if name == "cpu" else "runs on .* use cpu or torch or auto"
    with pytest.raises(KernelError, match=match):
        backend.active("cpu")


def test_environment_takes_precedence_over_the_configuration(small_csrc, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    backend.choose("cpu")
    with pytest.raises(KernelError, match="kernels.backend = cpu is not available"):
        backend.active("cpu")
    monkeypatch.setenv("OPTIMUS_KERNELS", "torch")
    assert backend.active("cpu").name == "torch"
    monkeypatch.setenv("OPTIMUS_KERNELS", "cdua")
    with pytest.raises(KernelError, match="OPTIMUS_KERNELS='cdua': unknown .* one of auto, sycl"):
        backend.chosen()


@needs_gxx
def test_library_with_another_interface_version_is_refused(small_csrc):
    header = small_csrc / "include" / "interface.h"
    header.write_text("#define OPTIMUS_ABI 7\n#define ABI_OF_THIS_LIBRARY 6\n")
    active = backend.active("cpu")
    assert active.name == "torch"
    assert "has interface version 6, but this package needs 7" in active.why_not


@needs_gxx
def test_library_without_a_function_is_refused(small_csrc, monkeypatch):
    header = small_csrc / "include" / "interface.h"
    declaration = '#define OPTIMUS_API extern "C"\nOPTIMUS_API int optimus_more(void);\n'
    header.write_text(header.read_text() + declaration)
    active = backend.active("cpu")
    assert active.name == "torch" and "has no function optimus_more; remove " in active.why_not
    monkeypatch.setenv("OPTIMUS_KERNELS", "cpu")
    backend._active.clear()
    with pytest.raises(KernelError, match="has no function optimus_more"):
        backend.active("cpu")


def test_bindings_cover_the_functions_of_the_interface():
    called = {"optimus_kernels_abi", "optimus_route_scratch"}
    called |= {f"optimus_{name}" for name in library.SIGNATURES}
    assert {*build.interface_functions()} == called


@needs_gxx
def test_run_of_many_ranks_loads_a_library_and_compiles_none(small_csrc, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(backend.MAX_BUILDING_WORLD + 1))
    active = backend.active("cpu")
    assert active.name == "torch" and "`optimus kernels build` once" in active.why_not
    build.build("cpu")
    backend._active.clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert backend.active("cpu").name == "cpu"


@pytest.mark.parametrize("launcher", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"])
def test_number_of_ranks_is_read_from_the_variables_of_all_launchers(
    small_csrc, monkeypatch, launcher
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(launcher, str(backend.MAX_BUILDING_WORLD + 1))
    assert "has no compatible kernel library" in backend.active("cpu").why_not


def test_without_a_home_directory_auto_uses_torch_and_a_name_is_refused(
    small_csrc, homeless, monkeypatch
):
    active = backend.active("cpu")
    assert active.name == "torch" and "set OPTIMUS_KERNELS_CACHE" in active.why_not
    assert "set OPTIMUS_KERNELS_CACHE" in backend.status()[-1]["why_not"]
    backend._active.clear()
    monkeypatch.setenv("OPTIMUS_KERNELS", "cpu")
    with pytest.raises(KernelError, match="is not available: this user has no home directory; set"):
        backend.active("cpu")


@needs_gxx
def test_status_reports_targets_and_reasons(small_csrc):
    status = {report["backend"]: report for report in backend.status()}
    assert not status["cpu"]["built"] and "not built yet" in status["cpu"]["why_not"]
    build.build("cpu")
    (small_csrc / "cpu" / "more.cpp").write_text("")
    build.source_hash.cache_clear()
    entry = build.build("cpu")
    cpu = {report["backend"]: report for report in backend.status()}["cpu"]
    assert cpu["usable"] and cpu["library"] == str(entry.library)
    assert cpu["built_for"]["torch"] == torch.__version__
    (reason,) = cpu["refused"].values()
    assert reason.startswith("built from other source files")


PLANTED = """
#include <cstdio>
__attribute__((constructor)) static void run(void) { fclose(fopen("%s", "w")); }
extern "C" __attribute__((visibility("default"))) int optimus_kernels_abi(void) { return 7; }
"""


@needs_gxx
def test_library_that_others_may_have_written_is_listed_and_never_loaded(small_csrc, tmp_path):
    """A planted library is compatible and newer than the real library, but its file is writable by
    the group. The code of the planted library must not run."""
    entry = build.build("cpu")
    ran, planted = tmp_path / "ran", entry.path.with_name("cpu-0000000000000000")
    shutil.copytree(entry.path, planted)
    source = tmp_path / "planted.cpp"
    source.write_text(PLANTED % ran)
    library = planted / entry.library.name
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    record = entry.record | {
        "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        "built_at": 4e9,
    }
    (planted / "info.json").write_text(json.dumps(record))
    library.chmod(0o775)

    cpu = {report["backend"]: report for report in backend.status()}["cpu"]
    assert cpu["usable"] and cpu["library"] == str(entry.library)
    assert "mode 0775" in cpu["refused"][planted.name]
    assert backend.find("cpu", may_build=False).key == entry.key
    assert backend.find("cpu", may_build=False, key=planted.name).key == entry.key
    assert not ran.exists()

    library.chmod(0o755)  # now only this user can write the library
    assert backend.find("cpu", may_build=False).key == planted.name and ran.exists()


@needs_gxx
def test_the_library_that_was_checked_is_loaded_even_if_it_is_replaced(small_csrc, monkeypatch):
    entry, check = build.build("cpu"), cache.open_library

    def replace_after_check(checked):
        file = check(checked)
        entry.library.unlink()
        entry.library.write_bytes(b"not a library")
        return file

    monkeypatch.setattr(cache, "open_library", replace_after_check)
    assert backend.load(entry).optimus_kernels_abi() == 7
