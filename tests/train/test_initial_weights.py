"""Tests of the initial weights of a run. Rank 0 reads the weights once, in pieces, and sends the
pieces to the other ranks."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus.checkpoint import shard_file, store, weights
from optimus.checkpoint.convert import from_hf, to_hf
from optimus.checkpoint.weights import open_weights
from optimus.config import make_config
from optimus.distributed.agreement import RunEnded
from optimus.distributed.mesh import Mesh
from optimus.distributed.world import start_world
from optimus.errors import CheckpointError, ConfigError
from optimus.hf import write_hf
from optimus.io import files, tensor_file
from optimus.parallel.apply import make_layout
from optimus.parallel.placement import whole_model
from optimus.train import load as load_module
from optimus.train.load import load_weights
from tests.kit.layouts.whole import WholeModel
from tests.kit.ranks.processes import peak_of
from tests.kit.runs.tiny import tiny_tree
from tests.kit.runs.training import make_rank_model, run_tree, train_on

SIZES = {
    "tp2-ep2": {"parallel__tp": 2, "parallel__ep": 2},
    "pp2-dp2": {"parallel__pp": 2, "parallel__dp": 2, "model__tie_embeddings": True},
    "dp4": {"parallel__dp": 4, "optim__frozen": ["embed.weight"]},
}


def piecewise(size: int) -> None:
    weights.BATCH_ELEMENTS = load_module.BATCH_ELEMENTS = size


def take(tree: dict[str, Any], path: str, size: int) -> tuple[dict[str, int], dict]:
    """Load the weights at `path` in pieces of `size` elements. Return a dict and the whole masters
    by parameter name. The dict contains the number of files that this rank opened and the number of
    bytes that this rank read."""
    piecewise(size)
    config, world, groups, _, shard = make_rank_model(tree)
    states = shard.make_states(initial=False)
    for state in states.chunks:
        state.master.fill_(torch.nan)
    for traffic in (tensor_file.traffic, shard_file.traffic):
        traffic.update(opens=0, bytes=0)
    opening = partial(open_weights, config.model, Path(path))
    distribute = config.checkpoint.distribute
    load_weights(shard.layout, partial(states.put, "master"), opening, world, distribute)
    read = {key: tensor_file.traffic[key] + shard_file.traffic[key] for key in shard_file.traffic}
    states.frozen.settle()
    whole = WholeModel(config, shard.layout, groups).gather(states, "master")
    return read, {name: master.clone() for name, master in whole.items()}


@pytest.fixture(scope="module")
def sources(rank_pool, tiny_data, tmp_path_factory) -> dict[str, dict[str, Path]]:
    """Return the paths of the same weights in four formats ("model", "full", "hf" and "ours"), for
    a model with tied embeddings (key True) and for a model without (key False)."""
    paths: dict = {}
    for tied in (False, True):
        run = tmp_path_factory.mktemp("initial") / "run"
        few = {"train__stop_at_step": 2, "checkpoint__model_interval": 2, "parallel__tp": 2}
        tree = tiny_tree(tiny_data, run, model__tie_embeddings=tied, **few)
        train_on(rank_pool.run, 2, tree)
        paths[tied] = {"model": store.model_path(run, 2), "full": store.full_path(run, 2)}
        paths[tied] |= {"hf": run.parent / "hf", "ours": run.parent / "ours"}
        to_hf(paths[tied]["full"], paths[tied]["hf"])
        from_hf(paths[tied]["hf"], paths[tied]["ours"])
    return paths


@pytest.mark.parametrize("kind", ["model", "full", "hf", "ours"])
@pytest.mark.parametrize("layout", SIZES)
@pytest.mark.parametrize("size", [1000, 1 << 22])
def test_all_ranks_get_their_slices_of_weights(ranks, sources, kind, layout, size):
    distribute = "all_reduce" if kind == "hf" else "broadcast"
    settings = {
        "checkpoint__distribute": distribute,
        "optim__sharding": "so",
        "optim__chunk_length": 3000,
    }
    tree = tiny_tree("d", "r", **SIZES[layout], **settings)
    path = sources[tree["model"].get("tie_embeddings", False)][kind]
    results = ranks(4, take, tree, str(path), size, start_world=False)
    assert [read for read, _ in results[1:]] == [{"opens": 0, "bytes": 0}] * 3
    read, masters = results[0]
    files = list(path.glob("*.safetensors" if kind != "full" else "shard-*"))
    stored = sum(file.stat().st_size for file in files)
    if kind == "full":  # only masters, not moments
        assert read["opens"] == len(files)
        assert read["bytes"] <= stored + len(files) * shard_file.HEADER_BYTES
    else:  # the first open reads headers, to compare names and shapes
        heads = [8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files]
        assert read["opens"] == 2 * len(files)
        assert read["bytes"] <= stored + 2 * sum(heads)
    with open_weights(make_config(tree).model, path) as weights:
        wanted = {name: torch.empty(shape) for name, shape in weights.shapes.items()}
        for name, start, values in weights.ranges():
            wanted[name].view(-1)[start : start + len(values)] = values
    assert masters.keys() == wanted.keys()
    assert all(torch.equal(masters[name], wanted[name]) for name in wanted)


def run_and_count(tree: dict[str, Any]) -> tuple[int, list[str]]:
    """Train. Return the number of bytes that this rank read from files of weights, and a list of
    file names. The list contains the files that this rank hashed in a separate read."""
    plain, hashed = files.xxh3_file, []

    def xxh3_file(path):
        hashed.append(Path(path).name)
        return plain(path)

    files.xxh3_file = xxh3_file
    tensor_file.traffic.update(opens=0, bytes=0)
    run_tree(tree)
    return tensor_file.traffic["bytes"], hashed


@pytest.mark.parametrize("load", ["model@2", "path"])
def test_run_reads_the_model_that_it_starts_from_once(ranks, tiny_data, tmp_path, load):
    """A run must hash the file of initial weights while it reads the weights, so that each byte of
    the weights is read only once, by rank 0."""
    tree = tiny_tree(tiny_data, tmp_path, train__stop_at_step=2, checkpoint__model_interval=2)
    train_on(ranks, 1, tree)
    path = store.model_path(tmp_path, 2)
    load, run = ("model@2", tmp_path) if load == "model@2" else (str(path), tmp_path / "other")
    tree = tiny_tree(tiny_data, run, train__stop_at_step=3, checkpoint__load=load)
    (read, hashed), (none, _) = ranks(2, run_and_count, tree, start_world=False)
    content = (path / "model.safetensors").read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    assert read == len(content) + 3 * head and none == 0  # only the header is read again
    assert "model.safetensors" not in hashed and "config.json" in hashed


def refused(tree: dict[str, Any]) -> str:
    try:
        run_tree(tree)
    except RunEnded as ended:
        assert ended.is_shared and ended.kind is CheckpointError.kind
        return str(ended)
    return ""


@pytest.mark.parametrize("kind", ["model", "ours"])
def test_damage_in_the_last_byte_is_refused_on_all_ranks(ranks, sources, tiny_data, tmp_path, kind):
    path = tmp_path / "damaged"
    path.mkdir()
    for file in sources[False][kind].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    weights = bytearray((path / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (path / "model.safetensors").write_bytes(weights)
    tree = tiny_tree(tiny_data, tmp_path / "run", checkpoint__load=str(path))
    messages = ranks(2, refused, tree, start_world=False)
    assert messages[0] == messages[1]
    assert messages[0] == f"{path}/model.safetensors: its content does not match its checksum"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def truncate_while_reading(tree: dict[str, Any], path: str) -> str:
    plain = weights.FileWeights.__iter__

    def truncated(weights):
        pieces = plain(weights)
        yield next(pieces)
        Path(path, "model.safetensors").write_bytes(b"")
        yield from pieces

    weights.FileWeights.__iter__ = truncated
    piecewise(1000)
    return refused(tree)


def test_file_truncated_while_reading_is_refused_on_all_ranks(ranks, sources, tiny_data, tmp_path):
    path = tmp_path / "cut"
    path.mkdir()
    for file in sources[False]["hf"].iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    tree = tiny_tree(tiny_data, tmp_path / "run", checkpoint__load=str(path))
    messages = ranks(2, truncate_while_reading, tree, str(path), start_world=False)
    assert messages[0] == messages[1] and "model.safetensors: ends before byte" in messages[0]


def refused_by_its_configuration(tree: dict[str, Any]) -> str:
    _, world, _, _, shard = make_rank_model(tree)

    def opening() -> None:
        raise ConfigError("of its configuration")

    with pytest.raises(ConfigError) as refusal:
        load_weights(
            shard.layout, partial(shard.make_states(initial=False).put, "master"), opening, world
        )
    return str(refusal.value)


def test_error_of_the_first_rank_is_raised_on_all_ranks(ranks):
    errors = ranks(2, refused_by_its_configuration, tiny_tree("d", "r"), start_world=False)
    assert errors == ["of its configuration"] * 2


def peak_of_loading(tree: dict[str, Any], path: str) -> int:
    """Read the model at `path`, and distribute its weights. Return the largest increase of this
    rank's memory during the load, in bytes."""
    config, mesh = make_config(tree), Mesh()
    layout = make_layout(config, mesh, mesh.coordinate(0), 1)
    shapes = [p.shape for p in whole_model(config.model).parameters()]
    sizes: list[int] = []
    piecewise(1 << 20)
    opening, world = partial(open_weights, config.model, Path(path)), start_world(device="cpu")
    take = lambda name, values, start: sizes.append(values.numel())  # noqa: E731
    peak = peak_of(lambda: load_weights(layout, take, opening, world))
    assert sum(sizes) == 2 * sum(map(math.prod, shapes))  # peak_of loads twice
    return peak


def test_first_rank_uses_memory_for_pieces_only(ranks, tmp_path):
    """During a load, the memory of rank 0 must increase by less than half of the bytes of the
    model's largest tensor."""
    large = {"model__hidden_size": 256, "model__vocab_size": 1 << 16, "model__num_experts": 32}
    large |= {"model__intermediate_size": 512, "model__num_attention_heads": 4}
    tree = tiny_tree("d", "r", **large, model__num_layers=4, train__dtype="bf16")
    config = make_config(tree).model
    shapes = {name: p.shape for name, p in whole_model(config).named_parameters()}
    zeros = ((name, 0, torch.zeros(math.prod(shape))) for name, shape in shapes.items())
    write_hf(tmp_path / "hf", config, zeros, dict.fromkeys(shapes, torch.float32))
    size = (tmp_path / "hf" / "model.safetensors").stat().st_size
    largest = 4 * max(map(math.prod, shapes.values()))
    (peak,) = ranks(1, peak_of_loading, tree, str(tmp_path / "hf"), start_world=False)
    figures = f"{peak / 1e6:.1f} MB of a model of {size / 1e6:.1f}, its largest {largest / 1e6:.1f}"
    assert peak < largest / 2 < size / 8, figures
