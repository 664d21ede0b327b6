"""Data sets mixed by weight: exact shares, stateless numbers, identity, refusals in one line."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.manifest import read_manifest
from optimus.data.dataset import TokenDataset
from optimus.data.mixture import MixedDataset
from optimus.errors import DataError
from tests.helpers.tiny import CONTEXT, reshuffled


@pytest.fixture
def parts(tiny_data, many_shards, few_instances) -> list[TokenDataset]:
    """A large source, another order of it, and one so small that it repeats at once."""
    return [TokenDataset(path) for path in (tiny_data, many_shards, few_instances)]


def test_each_source_gives_its_own_instances_in_order(parts):
    """Each exactly by weight, continuing through epochs, whatever stands between."""
    mix = MixedDataset(parts, [3, 1, 4])
    count = 8 * 40
    assert count // 2 > parts[2].num_instances, "the small source must repeat"
    found = mix.read(0, count)
    assert found.dtype == np.int64 and found.shape == (count, CONTEXT)
    sources = np.array([2, 0, 2, 0, 1, 2, 0, 2] * 40)  # by hand: docs/formats/dataset.md, "Mixing"
    for index, (part, weight) in enumerate(zip(parts, (3, 1, 4), strict=True)):
        assert np.array_equal(found[sources == index], part.read(0, 40 * weight))


def test_it_knows_when_a_source_repeats(parts):
    mix = MixedDataset([parts[1], parts[2]], [1, 1])
    count = mix.num_instances
    assert 2 * parts[2].num_instances <= count <= 2 * parts[2].num_instances + 1
    assert len(np.unique(mix.read(0, count)[1::2], axis=0)) == parts[2].num_instances


def test_it_is_stateless(parts):
    mix = MixedDataset(parts, [5, 2, 7])
    whole = MixedDataset(parts, [5, 2, 7]).read(0, 200)
    for start, stop in ((150, 200), (0, 1), (13, 15), (7, 7), (14, 28)):
        assert np.array_equal(mix.read(start, stop), whole[start:stop])
    far = 10**12 + 3
    one_by_one = np.concatenate([mix.read(i, i + 1) for i in range(far, far + 20)])
    assert np.array_equal(mix.read(far, far + 20), one_by_one)


def test_identity_covers_sources_weights_and_order(parts):
    one = MixedDataset(parts, [3, 1, 4]).identity
    assert MixedDataset(parts, [3, 1, 4]).identity == one and len(bytes.fromhex(one)) == 32
    others = {
        MixedDataset(parts, [3, 1, 5]).identity,
        MixedDataset(parts[:2], [3, 1]).identity,
        MixedDataset(parts[::-1], [4, 1, 3]).identity,
        parts[0].identity,
    }
    assert one not in others and len(others) == 4


def test_sources_that_do_not_go_together(parts, tiny_data, tmp_path):
    def refused(path, needle):
        with pytest.raises(DataError) as caught:
            MixedDataset([parts[0], TokenDataset(path)], [1, 1])
        assert needle in str(caught.value) and str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    refused(reshuffled(tiny_data, tmp_path / "wide", context=64), "has context = 32")
    text, tokenizer, other = tmp_path / "a.txt", tmp_path / "t.json", tmp_path / "other"
    text.write_text("some other text " * 50)
    trained = ["train-tokenizer", "--input", str(text), "--vocab-size", "300"]
    assert main([*trained, "--out", str(tokenizer)]) == 0
    run = ["run", "--input", str(text), "--tokenizer", str(tokenizer), "--out", str(other)]
    assert main([*run, "--context", str(CONTEXT), "--workers", "1"]) == 0
    refused(other, "has tokenizer_sha256 = ")
    shutil.copytree(tiny_data, tmp_path / "twin")
    refused(tmp_path / "twin", "hold the same instances")


def test_a_held_out_part_is_not_mixed_into_training(tiny_data):
    train, held_out = TokenDataset(tiny_data), TokenDataset(tiny_data / "eval")
    with pytest.raises(DataError, match="is a train part and .*eval a held-out part"):
        MixedDataset([train, held_out], [1, 1])


def test_sources_that_hold_out_other_shares(tiny_data, tmp_path):
    """As `blend` refuses them; a blend is known by its sources."""
    plain, same = tmp_path / "plain", tmp_path / "same"
    text = tmp_path / "a.txt"
    text.write_text("some other text " * 500)
    run = ["run", "--input", str(text), "--tokenizer", str(tiny_data / "tokenizer.json")]
    run += ["--context", str(CONTEXT), "--workers", "1"]
    assert main([*run, "--out", str(plain)]) == 0
    share = read_manifest(tiny_data).eval_fraction
    for seed in range(99):  # until the one document is not held out
        text.write_text(f"more {seed} text " * 500)
        if main([*run, "--out", str(same), "--eval-fraction", str(share)]) == 0:
            break
        shutil.rmtree(same)
    blend = ["blend", "--source", f"{tiny_data}=1", "--context", str(CONTEXT), "--out"]
    assert main([*blend, str(tmp_path / "blend")]) == 0
    assert main(["shard", str(tmp_path / "blend"), "--workers", "1"]) == 0
    one, other = TokenDataset(tiny_data), TokenDataset(plain)
    blended = TokenDataset(tmp_path / "blend")
    for pair in ([one, other], [other, one], [blended, other]):
        with pytest.raises(DataError, match="data.mix: .*hold.*of its documents.*same --eval-fr"):
            MixedDataset(pair, [1, 1])
    MixedDataset([TokenDataset(same), blended], [1, 1])
