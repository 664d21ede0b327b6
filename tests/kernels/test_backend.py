"""The ladder: auto falls through with one line, a name is taken or refused."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import torch

from optimus_kernels import backend, build, cache, library
from optimus_kernels.cache import KernelError

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")


@needs_gxx
def test_auto_takes_the_devices_own_kernels_without_a_word(small_csrc, capfd):
    found = backend.active(torch.device("cpu"))
    assert found.name == "cpu" and found.library.optimus_kernels_abi() == 7
    assert backend.active("cpu:0") is found
    assert capfd.readouterr() == ("", "")


def test_auto_falls_through_with_one_line_on_the_first_rank(small_csrc, monkeypatch, capfd):
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
def test_a_name_that_cannot_be_had_is_refused(small_csrc, monkeypatch, name):
    monkeypatch.setenv("OPTIMUS_KERNELS", name)
    monkeypatch.setenv("CXX", "no-such-compiler")
    match = "no-such-compiler" if name == "cpu" else "computes on .* use cpu or torch or auto"
    with pytest.raises(KernelError, match=match):
        backend.active("cpu")


def test_the_environment_wins_over_the_configuration(small_csrc, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    backend.choose("cpu")
    with pytest.raises(KernelError, match="kernels.backend = cpu cannot be had"):
        backend.active("cpu")
    monkeypatch.setenv("OPTIMUS_KERNELS", "torch")
    assert backend.active("cpu").name == "torch"
    monkeypatch.setenv("OPTIMUS_KERNELS", "cdua")
    with pytest.raises(KernelError, match="OPTIMUS_KERNELS='cdua': it is one of auto, sycl"):
        backend.chosen()


@needs_gxx
def test_a_library_with_another_interface_is_refused(small_csrc):
    header = small_csrc / "include" / "interface.h"
    header.write_text("#define OPTIMUS_ABI 7\n#define ABI_OF_THIS_LIBRARY 6\n")
    found = backend.active("cpu")
    assert found.name == "torch" and "has interface 6, this package needs 7" in found.why_not


@needs_gxx
def test_a_library_without_a_function_is_refused(small_csrc, monkeypatch):
    header = small_csrc / "include" / "interface.h"
    declaration = '#define OPTIMUS_API extern "C"\nOPTIMUS_API int optimus_more(void);\n'
    header.write_text(header.read_text() + declaration)
    found = backend.active("cpu")
    assert found.name == "torch" and "has no function optimus_more; remove " in found.why_not
    monkeypatch.setenv("OPTIMUS_KERNELS", "cpu")
    backend._active.clear()
    with pytest.raises(KernelError, match="has no function optimus_more"):
        backend.active("cpu")


def test_the_interfaces_functions_are_those_that_are_called():
    called = {"optimus_kernels_abi", "optimus_route_scratch"}
    called |= {f"optimus_{name}" for name in library.SIGNATURES}
    assert {*build.interface_functions()} == called


@needs_gxx
def test_many_ranks_compile_nothing_but_load_what_is_there(small_csrc, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(backend.MAX_BUILDING_WORLD + 1))
    found = backend.active("cpu")
    assert found.name == "torch" and "`optimus kernels build` once" in found.why_not
    build.build("cpu")
    backend._active.clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert backend.active("cpu").name == "cpu"


@pytest.mark.parametrize("launcher", ["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"])
def test_every_launchers_number_of_ranks_counts(small_csrc, monkeypatch, launcher):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv(launcher, str(backend.MAX_BUILDING_WORLD + 1))
    assert "none is built" in backend.active("cpu").why_not


def test_without_a_home_auto_takes_torch_and_a_name_is_refused(small_csrc, homeless, monkeypatch):
    found = backend.active("cpu")
    assert found.name == "torch" and "set OPTIMUS_KERNELS_CACHE" in found.why_not
    assert "set OPTIMUS_KERNELS_CACHE" in backend.status()[-1]["why_not"]
    backend._active.clear()
    monkeypatch.setenv("OPTIMUS_KERNELS", "cpu")
    with pytest.raises(KernelError, match="cannot be had: this user has no home directory; set"):
        backend.active("cpu")


@needs_gxx
def test_status_says_what_is_built_for_what_and_why_not(small_csrc):
    status = {one["backend"]: one for one in backend.status()}
    assert not status["cpu"]["built"] and "not built yet" in status["cpu"]["why_not"]
    build.build("cpu")
    (small_csrc / "cpu" / "more.cpp").write_text("")
    build.source_hash.cache_clear()
    entry = build.build("cpu")
    cpu = {one["backend"]: one for one in backend.status()}["cpu"]
    assert cpu["usable"] and cpu["library"] == str(entry.library)
    assert cpu["built_for"]["torch"] == torch.__version__
    assert list(cpu["refused"].values()) == ["built from other sources"]


PLANTED = """
#include <cstdio>
__attribute__((constructor)) static void run(void) { fclose(fopen("%s", "w")); }
extern "C" __attribute__((visibility("default"))) int optimus_kernels_abi(void) { return 7; }
"""


@needs_gxx
def test_library_that_others_may_have_written_is_listed_and_never_loaded(small_csrc, tmp_path):
    """An entry that fits, is the newest, and whose code runs as soon as it is loaded."""
    entry = build.build("cpu")
    ran, planted = tmp_path / "ran", entry.path.with_name("cpu-0000000000000000")
    shutil.copytree(entry.path, planted)
    source = tmp_path / "planted.cpp"
    source.write_text(PLANTED % ran)
    library = planted / entry.library.name
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    info = entry.info | {"sha256": cache._sha256(library), "built_at": 4e9}
    (planted / "info.json").write_text(json.dumps(info))
    library.chmod(0o775)

    cpu = {found["backend"]: found for found in backend.status()}["cpu"]
    assert cpu["usable"] and cpu["library"] == str(entry.library)
    assert "mode 0775" in cpu["refused"][planted.name]
    assert backend.find("cpu", may_build=False).key == entry.key
    assert backend.find("cpu", may_build=False, key=planted.name).key == entry.key
    assert not ran.exists()

    library.chmod(0o755)  # the same library is loaded once only this user can write it
    assert backend.find("cpu", may_build=False).key == planted.name and ran.exists()
