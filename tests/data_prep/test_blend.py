"""Tests of blends (data sets mixed from several sources): the number and order of the instances of
each source, and refused arguments."""

from __future__ import annotations

import json
import shutil
import signal

import numpy as np
import pytest

from data_prep.cli import main
from data_prep.pipeline.verify import verify
from data_prep.shuffle.blend import mixing_of, parse_weight
from data_prep.shuffle.order import Permutation, read_order
from data_prep.tokenize.store import array_path
from optimus.errors import ConfigError
from tests.data_prep.corpus import refused, run_killed_at, train_arguments, tree, write_corpus
from tests.data_prep.test_ranks import start_rank, statuses


@pytest.mark.parametrize("text", ["0", "-1", "", "1e3", "nan", "a", "0.0", "1/3"])
def test_bad_weights_are_refused(text):
    with pytest.raises(ConfigError, match="not a decimal number above 0"):
        parse_weight(text)


@pytest.fixture(scope="module")
def second(made, tmp_path_factory):
    """Return a folder with the token arrays of another corpus, made with the same tokenizer."""
    base = tmp_path_factory.mktemp("second")
    write_corpus(base / "text", 1)
    command = ["tokenize", "--input", str(base / "text"), "--tokenizer", str(made.tokenizer)]
    assert main([*command, "--out", str(base / "data"), "--unit-size", "5000",
                 "--eval-fraction", "0.15"]) == 0  # fmt: skip
    return base / "data"


def blend_arguments(first, second, out, *more: str) -> list[str]:
    sources = [f"{first}=0.7", f"{second}=0.3"]
    return ["blend", "--source", *sources, "--out", str(out), "--context", "16", "--seed", "4",
            "--shard-size", "8192", *more]  # fmt: skip


def cut(dataset, sidecars: int) -> np.ndarray:
    """Return the instances in the first `sidecars` token arrays of a source, in stored order, [n,
    16]. If the last tokens of an array do not fill an instance, these tokens are left out."""
    arrays = [np.load(array_path(dataset / "tokens", unit)) for unit in range(sidecars)]
    return np.concatenate([a[: len(a) // 16 * 16].reshape(-1, 16) for a in arrays])


@pytest.mark.parametrize("instances", [0, 9000])
def test_rows_are_those_of_the_specification(made, second, tmp_path, instances):
    """A complete pass over source s has the rows in the stored order of the source. In the last,
    incomplete pass, the permutation P for (seed, (s + 1) * 2^32 + pass) selects rows. P for (seed,
    0) then orders the rows of all sources. docs/formats/dataset.md defines P."""
    out = tmp_path / "blend"
    more = ["--instances", str(instances)] if instances else []
    assert main(blend_arguments(made.data, second, out, *more)) == 0
    assert list(verify(out)) == []
    manifest = json.loads((out / "manifest.json").read_text())
    rows_of_sources = []
    for number, folder in enumerate((made.data, second)):
        source = cut(folder, len(list((folder / "tokens").glob("*.docs.npy"))))
        size, quota = len(source), manifest["blend"][number]["quota"]
        last = Permutation(size, 4, (number + 1) * 2**32 + quota // size)
        whole = [source] * (quota // size)
        rows_of_sources.append(
            np.concatenate([*whole, source[last.apply(np.arange(quota % size))]])
        )
    total = manifest["num_instances"]
    mixing = mixing_of(["0.7", "0.3"])
    assert tuple(len(rows) for rows in rows_of_sources) == mixing.quotas(total)
    available = [source["instances"] for source in manifest["blend"]]
    assert total == (instances or mixing.before_repeating(available))
    expected = np.concatenate(rows_of_sources)[Permutation(total, 4).apply(np.arange(total))]
    stored = [np.load(out / shard["name"]) for shard in manifest["shards"]]
    assert np.array_equal(np.concatenate(stored), expected)


def test_blend_by_two_ranks_with_buckets_has_the_same_bytes(made, second, tmp_path):
    single, ranked = tmp_path / "one", tmp_path / "two"
    assert main(blend_arguments(made.data, second, single, "--workers", "1")) == 0
    more = blend_arguments(made.data, second, ranked, "--world", "2", "--strategy", "bucket")
    for _ in range(2):  # the second run changes nothing
        assert statuses([start_rank([*more, "--rank", rank]) for rank in "01"]) == [0] * 2
        assert tree(single) == tree(ranked)


def test_inspect_of_a_blend_names_files_of_both_sources(made, second, tmp_path, capsys):
    out = tmp_path / "blend"
    assert main(blend_arguments(made.data, second, out)) == 0
    from_first = set()
    for number in range(40):
        capsys.readouterr()
        assert main(["inspect", str(out), str(number), "--json"]) == 0
        value = json.loads(capsys.readouterr().out)
        from_first |= {segment["input"].startswith(str(made.text)) for segment in value["sources"]}
        assert sum(s["stop"] - s["first"] for s in value["sources"]) == 16
    assert from_first == {True, False}


def test_impossible_blends_are_refused(made, second, tmp_path, capsys):
    out = tmp_path / "blend"
    assert main(blend_arguments(made.data, second, out)) == 0
    other = tmp_path / "other"
    assert main(train_arguments(made.text, tmp_path / "t.json", 300)) == 0
    command = ["tokenize", "--input", str(made.text), "--tokenizer", str(tmp_path / "t.json")]
    assert main([*command, "--out", str(other)]) == 0
    leaky = tmp_path / "leaky"
    command = ["tokenize", "--input", str(made.text), "--tokenizer", str(made.tokenizer)]
    assert main([*command, "--out", str(leaky)]) == 0
    late = ["--rank", "1", "--world", "2"]
    cases = [
        (blend_arguments(made.data, second, out, "--seed", "5"), "seed = 4, now 5"),
        (blend_arguments(made.data, second, out, *late, "--seed", "5"), "seed = 4, now 5"),
        (blend_arguments(made.data, second, out, *late, "--context", "8"), "context = 16, now 8"),
        (blend_arguments(made.data, second, out, *late, "--carry-tails"), "carry_tails"),
        (blend_arguments(made.data, second, out, *late, "--instances", "9"), "now 9;"),
        (blend_arguments(made.data, second, out, *late, "--shard-size", "64"), "now 2;"),
        (blend_arguments(second, made.data, out), "already contains another blend"),
        (["shuffle", str(out), "--context", "16"], "has no token arrays"),
        (["shuffle", str(second), "--context", "16", "--to", str(out)], "already contains a blend"),
        (blend_arguments(made.data, leaky, tmp_path / "y"), "0 of its documents"),
        (blend_arguments(made.data, made.data, out), "named twice"),
        (blend_arguments(made.data, made.data / "eval", tmp_path / "z"), "is a held-out split"),
        (blend_arguments(made.data, second, second), "is a source"),
        (blend_arguments(made.data, other, tmp_path / "x"), "another tokenizer"),
        (
            ["blend", "--source", "a", "--out", "b", "--context", "4"],
            "not have the form DIR=WEIGHT",
        ),
        (["blend", "--source", "a=x", "--out", "b", "--context", "4"], "weight 'x'"),
        (["blend", "--source", "a=1", "--out", "b", "--context", "4"], "a/tokens/plan.json"),
    ]
    for arguments, needle in cases:
        refused(capsys, arguments, needle)
    assert read_order(made.data).seed == 5, "the sources have not changed"


@pytest.mark.parametrize("instances", [10**13, 10**18, 10**20])
def test_blend_larger_than_the_disk_is_refused_before_it_writes(
    made, second, tmp_path, capsys, instances
):
    out = tmp_path / "out"
    error = refused(capsys, blend_arguments(made.data, second, out, "--instances", str(instances)))
    assert f"{instances:,} instances of 16 tokens take " in error
    assert " or fewer, or another --out" in error and not (out / "order.json").exists()


def test_blend_continues_if_the_rest_fits_on_the_disk(made, second, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(blend_arguments(made.data, second, whole, "--workers", "1")) == 0
    arguments = blend_arguments(made.data, second, out, "--workers", "1")
    assert run_killed_at(arguments, 5, before=False) == -signal.SIGKILL
    assert (out / "order.json").exists() and not (out / "manifest.json").exists()
    almost_full = shutil.disk_usage(tmp_path)._replace(free=20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: almost_full)
    for _ in range(2):
        assert main(arguments) == 0 and tree(out) == tree(whole)
    assert main(blend_arguments(made.data, second, tmp_path / "other")) == 2


def test_report_has_epochs_of_each_source_and_warns_of_many(made, second, tmp_path, capsys):
    available = read_order(made.data).num_instances
    for instances, warned in ((available, False), (available * 8, True)):
        out = tmp_path / str(instances)
        assert main(blend_arguments(made.data, second, out, "--instances", str(instances))) == 0
        lines = capsys.readouterr().out.splitlines()
        quota = json.loads((out / "manifest.json").read_text())["blend"][0]["quota"]
        epochs = f"{quota / available:.3g}"
        assert any(line.endswith(f"of {available:,}, {epochs} epochs") for line in lines), lines
        warnings = [line for line in lines if "warning: " in line]
        assert bool(warnings) == warned
        if warned:
            expected = f"is repeated for {epochs} epochs; text that is repeated for more than 4 "
            assert expected in warnings[0]
            most = int(warnings[0].rpartition(" ")[2])
    out = tmp_path / "most"
    assert main(blend_arguments(made.data, second, out, "--instances", str(most))) == 0
    assert not [line for line in capsys.readouterr().out.splitlines() if made.data.name in line
                and "warning" in line]  # fmt: skip
