"""Content of the marker, the JSON file that a rank writes about a non-finite value."""

from __future__ import annotations

import json

import pytest
import torch

from data_prep.dataset.describe import inspect
from optimus.data.dataset import TokenDataset
from optimus.data.loader import make_microbatch
from optimus.data.mixture import MixedDataset
from optimus.io import files
from optimus.resilience.nonfinite import measure
from tests.kit.faults.nonfinite import train_on_bad_instance
from tests.kit.runs.tiny import reshuffle, tiny_tree

INSTANCE = 8 + 5
"""Number of the instance that gives NaN, in step 2. An update has 8 microbatches of one
instance."""
FAST = {"train__deterministic": False, "train__threads": 1}
ZERO_2 = FAST | {"optim__sharding": "so", "optim__resident": "parameters"}
PIPELINE = {"parallel__pp": 2, "model__num_layers": 4}


@pytest.mark.parametrize("target", ["output", "slope"])
@pytest.mark.parametrize(
    ("size", "settings", "rank", "microbatch", "blocks"),
    [
        pytest.param(1, {}, 0, 5, 2, id="one"),
        pytest.param(1, FAST, 0, 5, 2, id="one-fast"),
        pytest.param(2, FAST, 1, 2, 2, id="dp2-fast"),
        pytest.param(2, ZERO_2, 1, 2, 2, id="dp2-zero2"),
        pytest.param(2, PIPELINE, 0, 5, 3, id="pp2"),
        pytest.param(2, PIPELINE | {"parallel__schedule": "zb-h1"}, 0, 5, 3, id="pp2-zb"),
        pytest.param(
            2,
            PIPELINE | {"parallel__schedule": "interleaved", "parallel__virtual_stages": 2},
            0,
            5,
            2,
            id="pp2-interleaved",
        ),
    ],
)
def test_marker_names_microbatch_layer_and_instances(
    ranks, tiny_data, tmp_path, size, settings, rank, microbatch, blocks, target
):
    """One instance of the data causes NaN in the output of the embedding (`target` "output"), or
    only in the gradient of this output (`target` "slope")."""
    tree = tiny_tree(tiny_data, tmp_path, train__max_steps=3, **settings)
    ended = ranks(size, train_on_bad_instance, tree, INSTANCE, target, start_world=False)
    assert [end.status for end in ended] == [4] * size
    (path,) = (tmp_path / "log").glob("nonfinite-*")
    marker = json.loads(path.read_text())
    where = "rank", "step", "microbatch", "device", "was_repeated"
    assert [marker[key] for key in where] == [rank, 2, microbatch, "cpu", True]
    layer, direction = ("embed", "forward") if target == "output" else ("embed.weight", "backward")
    assert (marker["layer"], marker["direction"]) == (layer, direction)
    assert marker["instances"] == [{"data": str(tiny_data), "instance": INSTANCE}]
    assert len(marker["layers"]) == blocks
    for figures in marker["layers"].values():
        assert figures["nonfinite"] == (1.0 if target == "output" else 0.0)
        if target == "slope":
            assert figures["min"] < figures["mean"] < figures["max"]
    data, data_ranks = TokenDataset(tiny_data), 1 if "parallel__pp" in settings else size
    numbers = range(8 + (INSTANCE - 8) % data_ranks, 16, data_ranks)
    tokens = [make_microbatch(data, n, n + 1, False).tokens.numpy().tobytes() for n in numbers]
    assert marker["data_xxh3"] == files.xxh3_bytes(b"".join(tokens))


def test_figures_of_an_output():
    values = torch.tensor([1.0, torch.nan, 4.0, -torch.inf])
    assert measure(values) == {"min": 1.0, "max": 4.0, "mean": 2.5, "nonfinite": 0.5}
    none = {"min": None, "max": None, "mean": None, "nonfinite": 1.0}
    assert measure(torch.full((2, 2), torch.inf)) == none


def test_instances_of_a_mixture_are_located_in_their_sources(tiny_data, tmp_path):
    other = reshuffle(tiny_data, tmp_path / "other", "--seed", "5")
    mixed = MixedDataset([TokenDataset(tiny_data), TokenDataset(other)], [2, 1])
    located = mixed.locate(3, 2000)
    assert {path for path, _ in located} == {str(tiny_data), str(other)}
    sources = {path: TokenDataset(path) for path, _ in located}
    instances = mixed.read(3, 2000)
    for row, (path, number) in zip(instances, located, strict=True):
        assert (sources[path].read(number, number + 1)[0] == row).all()


def test_documents_of_an_instance_are_those_that_inspect_shows(tiny_data):
    data = TokenDataset(tiny_data)
    for number in (17, data.num_instances + 3):
        sources = inspect(tiny_data, number)["sources"]
        expected = [f"{source['input']}:{source['line']}" for source in sources]
        assert data.documents(number) == expected and expected[0].split(":")[0].endswith(".jsonl")
