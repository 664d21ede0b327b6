"""Tests of MixedDataset: exact share of each source, reads in any order, the hash `identity`, and
refused mixtures."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.dataset.manifest import read_manifest
from optimus.data.dataset import TokenDataset
from optimus.data.mixture import MixedDataset
from optimus.errors import DataError
from tests.kit.runs.tiny import CONTEXT, reshuffle


@pytest.fixture
def sources(tiny_data, many_shards, few_instances) -> list[TokenDataset]:
    """Return three data sets. Two have the same documents in different orders. The third is so
    small that its instances repeat during a test."""
    return [TokenDataset(path) for path in (tiny_data, many_shards, few_instances)]


def test_share_and_order_of_each_source_are_exact(sources):
    """The number and order of the instances of each source, and the order of the sources, are
    exact, also in later epochs of a source."""
    mix = MixedDataset(sources, [3, 1, 4])
    count = 8 * 40
    assert count // 2 > sources[2].num_instances, "the small source must repeat"
    tokens = mix.read(0, count)
    assert tokens.dtype == np.int64 and tokens.shape == (count, CONTEXT)
    picks = np.array([2, 0, 2, 0, 1, 2, 0, 2] * 40)  # computed by hand, see docs/formats/dataset.md
    for index, (source, weight) in enumerate(zip(sources, (3, 1, 4), strict=True)):
        assert np.array_equal(tokens[picks == index], source.read(0, 40 * weight))


def test_num_instances_ends_before_a_source_repeats(sources):
    mix = MixedDataset([sources[1], sources[2]], [1, 1])
    count = mix.num_instances
    assert 2 * sources[2].num_instances <= count <= 2 * sources[2].num_instances + 1
    assert len(np.unique(mix.read(0, count)[1::2], axis=0)) == sources[2].num_instances


def test_reads_do_not_depend_on_earlier_reads(sources):
    mix = MixedDataset(sources, [5, 2, 7])
    whole = MixedDataset(sources, [5, 2, 7]).read(0, 200)
    for start, stop in ((150, 200), (0, 1), (13, 15), (7, 7), (14, 28)):
        assert np.array_equal(mix.read(start, stop), whole[start:stop])
    far = 10**12 + 3
    single = np.concatenate([mix.read(i, i + 1) for i in range(far, far + 20)])
    assert np.array_equal(mix.read(far, far + 20), single)


def test_identity_covers_sources_weights_and_order(sources):
    identity = MixedDataset(sources, [3, 1, 4]).identity
    assert MixedDataset(sources, [3, 1, 4]).identity == identity
    assert len(bytes.fromhex(identity)) == 32
    others = {
        MixedDataset(sources, [3, 1, 5]).identity,
        MixedDataset(sources[:2], [3, 1]).identity,
        MixedDataset(sources[::-1], [4, 1, 3]).identity,
        sources[0].identity,
    }
    assert identity not in others and len(others) == 4


def test_sources_that_do_not_match_are_refused(sources, tiny_data, tmp_path):
    def assert_refused(path, reason):
        with pytest.raises(DataError) as caught:
            MixedDataset([sources[0], TokenDataset(path)], [1, 1])
        assert reason in str(caught.value) and str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    assert_refused(reshuffle(tiny_data, tmp_path / "wide", context=64), "has context = 32")
    text, tokenizer, other = tmp_path / "a.txt", tmp_path / "t.json", tmp_path / "other"
    text.write_text("some other text " * 50)
    trained = ["train-tokenizer", "--input", str(text), "--vocab-size", "300"]
    assert main([*trained, "--out", str(tokenizer)]) == 0
    run = ["run", "--input", str(text), "--tokenizer", str(tokenizer), "--out", str(other)]
    assert main([*run, "--context", str(CONTEXT), "--workers", "1"]) == 0
    assert_refused(other, "has tokenizer_sha256 = ")
    shutil.copytree(tiny_data, tmp_path / "copy")
    assert_refused(tmp_path / "copy", "have the same instances")


def test_held_out_data_are_not_mixed_with_training_data(tiny_data):
    train, held_out = TokenDataset(tiny_data), TokenDataset(tiny_data / "eval")
    with pytest.raises(DataError, match="has train data and .*eval has held-out data"):
        MixedDataset([train, held_out], [1, 1])


def test_sources_with_different_held_out_fractions_are_refused(tiny_data, tmp_path):
    """One source is a blend of other data sets. The check uses the held-out fraction with which
    these other data sets were made."""
    plain, same = tmp_path / "plain", tmp_path / "same"
    text = tmp_path / "a.txt"
    text.write_text("some other text " * 500)
    run = ["run", "--input", str(text), "--tokenizer", str(tiny_data / "tokenizer.json")]
    run += ["--context", str(CONTEXT), "--workers", "1"]
    assert main([*run, "--out", str(plain)]) == 0
    share = read_manifest(tiny_data).eval_fraction
    for seed in range(99):  # until the only document is not held out
        text.write_text(f"more {seed} text " * 500)
        if main([*run, "--out", str(same), "--eval-fraction", str(share)]) == 0:
            break
        shutil.rmtree(same)
    blend = ["blend", "--source", f"{tiny_data}=1", "--context", str(CONTEXT), "--out"]
    assert main([*blend, str(tmp_path / "blend")]) == 0
    assert main(["shard", str(tmp_path / "blend"), "--workers", "1"]) == 0
    with_eval, without = TokenDataset(tiny_data), TokenDataset(plain)
    blended = TokenDataset(tmp_path / "blend")
    for pair in ([with_eval, without], [without, with_eval], [blended, without]):
        with pytest.raises(DataError, match="data.mix: .*hold.*of its documents.*same --eval-fr"):
            MixedDataset(pair, [1, 1])
    MixedDataset([TokenDataset(same), blended], [1, 1])
