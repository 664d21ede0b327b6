"""Tests of TokenDataset: order of instances in an epoch, hash of the instances (`identity`), and
refusal of damaged files."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import threading

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.dataset import reader
from data_prep.dataset.manifest import read_manifest
from data_prep.layout import write_checked_json
from data_prep.shuffle.order import Permutation
from optimus.data.dataset import TokenDataset
from optimus.data.mixture import MixedDataset
from optimus.errors import DamageError, DataError
from tests.data_prep.corpus import shards
from tests.kit.runs.tiny import CONTEXT, VOCAB, reshuffle


def test_attributes_are_those_of_the_manifest(tiny_data):
    dataset = TokenDataset(str(tiny_data))
    rows = shards(tiny_data)
    assert (dataset.num_instances, dataset.context) == rows.shape == (len(rows), CONTEXT)
    assert dataset.vocab_size == VOCAB and rows.max() < VOCAB
    assert os.path.isfile(dataset.tokenizer_file)
    assert len(bytes.fromhex(dataset.identity)) == 32


def test_epoch_zero_is_the_order_of_the_shards(many_shards):
    dataset, rows = TokenDataset(many_shards), shards(many_shards)
    tokens = dataset.read(0, len(rows))
    assert tokens.dtype == np.int64 and tokens.flags.writeable and np.array_equal(tokens, rows)
    assert np.array_equal(dataset.read(5, 17), rows[5:17])
    assert dataset.read(4, 4).shape == (0, CONTEXT)


@pytest.mark.parametrize("epoch", [1, 2, 1000])
def test_later_epochs_are_permuted_by_seed_and_epoch(many_shards, epoch):
    dataset, rows = TokenDataset(many_shards), shards(many_shards)
    order = Permutation(len(rows), 8, epoch).apply(np.arange(len(rows)))
    start = epoch * len(rows)
    assert np.array_equal(dataset.read(start, start + len(rows)), rows[order])
    assert not np.array_equal(order, np.arange(len(rows)))


def test_open_files_are_limited(many_shards):
    """The number of open files and memory mappings does not grow with the number of shards."""
    dataset = TokenDataset(many_shards)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    dataset.read(0, 3 * dataset.num_instances)
    assert len(dataset._reader._open) == reader._OPEN_SHARDS
    if before:
        opened = len(os.listdir("/proc/self/fd")) - before
        assert opened <= reader._OPEN_SHARDS < resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_threads_share_a_data_set(many_shards):
    dataset, rows = TokenDataset(many_shards), shards(many_shards)
    wrong = []

    def read(seed: int) -> None:
        for number in np.random.default_rng(seed).integers(0, len(rows), 2000).tolist():
            if not np.array_equal(dataset.read(number, number + 1)[0], rows[number]):
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_identity_depends_on_the_instances_only(tiny_data, many_shards, tmp_path):
    again = tmp_path / "again"
    shutil.copytree(tiny_data, again)
    assert TokenDataset(again).identity == TokenDataset(tiny_data).identity
    manifest = read_manifest(tiny_data)
    other = dataclasses.replace(manifest.shards[-1], xxh3="0" * 16)
    changed = dataclasses.replace(manifest, shards=(*manifest.shards[:-1], other))
    assert changed.identity != manifest.identity, "a run would resume with other tokens"
    assert TokenDataset(many_shards).identity != TokenDataset(tiny_data).identity
    assert TokenDataset(tiny_data / "eval").identity != TokenDataset(tiny_data).identity


def assert_refused(path, reason: str, status: int = 2) -> None:
    with pytest.raises(DataError) as caught:
        TokenDataset(path).read(0, 1)
    assert reason in str(caught.value) and str(path) in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.exit_code == status


def test_missing_unfinished_and_damaged_data_sets_are_refused(tiny_data, tmp_path):
    assert_refused(tmp_path / "nowhere", "is missing: ")
    assert_refused(tmp_path, "is not a data set; make it with optimus-data run")
    data = tmp_path / "data"
    shutil.copytree(tiny_data, data)
    manifest = data / "manifest.json"
    content = manifest.read_bytes()
    for damage in (b"", content[: len(content) // 2], content.replace(b'"seed": 0', b'"seed": 1')):
        manifest.write_bytes(damage)
        assert_refused(data, "manifest.json: damaged", 1)
    manifest.unlink()
    assert_refused(data, "is not finished")
    value = json.loads(content)
    del value["self_xxh3"]
    write_checked_json(manifest, value | {"version": 2})
    assert_refused(data, "version 2")
    write_checked_json(manifest, value | {"permutation": "other"})
    assert_refused(data, "permuted by other")
    manifest.write_bytes(content)
    shard = data / "shards" / "shard-00000.npy"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert_refused(data, "shard-00000.npy: has ", 1)
    shard.unlink()
    assert_refused(data, "shard-00000.npy: cannot be read")


def test_data_set_without_instances_is_refused(tiny_data, tmp_path):
    """`optimus-data verify` accepts an empty data set, but TokenDataset refuses it."""
    context = TokenDataset(tiny_data / "eval").num_instances * CONTEXT + CONTEXT
    reshuffle(tiny_data, tmp_path, context=context)
    assert main(["verify", str(tmp_path)]) == 0
    assert TokenDataset(tmp_path).num_instances > 0
    assert_refused(tmp_path / "eval", f"fewer than one instance of {context}")


@pytest.mark.parametrize("epoch", [0, 3])
@pytest.mark.parametrize("mixed", [False, True])
def test_id_outside_the_vocabulary_is_refused_with_shard_and_row(
    many_shards, tmp_path, epoch, mixed
):
    data = tmp_path / "data"
    shutil.copytree(many_shards, data)
    shard = data / "shards" / "shard-00007.npy"
    rows = np.load(shard)
    rows[2, 5] = VOCAB + 9
    np.save(shard, rows)
    dataset = source = TokenDataset(data)
    if mixed:
        source = MixedDataset([dataset], [1])
    n = dataset.num_instances
    order = Permutation(n, 8, epoch).apply(np.arange(n)) if epoch else np.arange(n)
    wrong = epoch * n + int(np.flatnonzero(order == 7 * 3 + 2)[0])
    source.read(wrong - 3, wrong)
    with pytest.raises(DamageError) as caught:
        source.read(wrong - 3, wrong + 2)
    expected = f"{shard}: row 2 has token id {VOCAB + 9}, outside the vocabulary of {VOCAB} ids; "
    assert expected in str(caught.value)
