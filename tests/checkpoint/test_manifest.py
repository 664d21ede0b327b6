from __future__ import annotations

import json
import os

import pytest

from optimus.checkpoint.manifest import MANIFEST, read_manifest, seal
from optimus.errors import CheckpointError


def write_two_files(directory):
    (directory / "a.bin").write_bytes(os.urandom(1000))
    (directory / "sub").mkdir()
    (directory / "sub" / "b.bin").write_bytes(b"")


@pytest.fixture
def sealed(tmp_path):
    return seal(tmp_path / "c", write_two_files, kind="full", step=3, settings={"train.seed": 1})


def test_sealed_checkpoint_reads_back(sealed):
    manifest = read_manifest(sealed.path)
    assert manifest == sealed and manifest.step == 3
    assert [entry.name for entry in manifest.files] == ["a.bin", "sub/b.bin"]
    manifest.verify()


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_any_damage_is_found_and_named(sealed, damage):
    path = sealed.path / "a.bin"
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[500] ^= 4
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    with pytest.raises(CheckpointError, match="a.bin"):
        read_manifest(sealed.path).verify()


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": 99}'])
def test_a_bad_manifest_is_no_checkpoint(sealed, content):
    (sealed.path / MANIFEST).write_text(content)
    with pytest.raises(CheckpointError):
        read_manifest(sealed.path)


def test_a_failed_write_leaves_nothing_behind(tmp_path):
    def fail(directory):
        write_two_files(directory)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError):
        seal(tmp_path / "c", fail, kind="full")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_place_is_refused_and_kept(sealed):
    before = json.loads((sealed.path / MANIFEST).read_text())
    with pytest.raises(CheckpointError, match="exists already"):
        seal(sealed.path, write_two_files, kind="full")
    assert json.loads((sealed.path / MANIFEST).read_text()) == before
    sealed.verify()
