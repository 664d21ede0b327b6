"""Models alone, written by ranks that hold parts: little memory, and no write is lost."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus.checkpoint import manager
from optimus.checkpoint.pieces import whole_box
from optimus.checkpoint.rank_states import RankStates
from optimus.checkpoint.save_model import ModelSaver
from optimus.chunks.layout import Parameter, lay_out
from optimus.chunks.states import Home, StateShard
from optimus.config import make_config
from optimus.dist.groups import plan_groups
from optimus.dist.mesh import Mesh
from optimus.launch_env import read_launch_env
from optimus.model.tensor_writer import TensorWriter
from optimus.parallel.placement import whole_model
from tests.helpers.memory import peak_of
from tests.helpers.saves import BOTH, Ended, run_with, warnings
from tests.helpers.tiny import tiny_tree

LARGE = {"model__hidden_size": 256, "model__vocab_size": 1 << 16, "model__num_experts": 32}
LARGE |= {"model__intermediate_size": 512, "model__num_attention_heads": 4, "model__num_layers": 2}


def masters_of(shapes: dict[str, tuple[int, ...]]) -> RankStates:
    """All of a model on one rank, which has no moments."""
    home = Home()
    chunks = lay_out([Parameter(name, shape) for name, shape in shapes.items()], 1 << 24).chunks
    shards = [StateShard(one, 0, home, {"master": torch.ones(one.length)}) for one in chunks]
    boxes = {name: whole_box(shape) for name, shape in shapes.items()}
    return RankStates(plan_groups(Mesh(), 0), shards, boxes, shapes)


def peak_of_saving(tree: dict[str, Any], folder: str, staged: bool) -> tuple[int, int]:
    """What the process takes besides while it makes and uses a saver, and the size of the model."""
    config = make_config(tree).model
    shapes = {name: tuple(p.shape) for name, p in whole_model(config).named_parameters()}
    states, limits = masters_of(shapes), {"limit_s": 60.0, "begin_s": 60.0}

    def save() -> None:
        saver = ModelSaver(states, config, "balanced", staged=staged, **limits)
        path = Path(folder) / f"m{len(os.listdir(folder))}"
        under_way = saver.begin(states, path, lambda directory: None, step=1)
        assert under_way.drain().failure is None

    return peak_of(save), 2 * sum(map(math.prod, shapes.values()))


@BOTH
def test_a_rank_takes_memory_for_pieces_alone_or_for_its_own_part(ranks, tmp_path, beside):
    tree = tiny_tree("d", "r", **LARGE, train__dtype="bf16")
    [(peak, size)] = ranks(1, peak_of_saving, tree, str(tmp_path), beside)
    assert size > 100e6
    assert peak - beside * size < 32e6, f"{peak / 1e6:.1f} MB for a model of {size / 1e6:.1f}"
    manager.read_manifest(tmp_path / "m1").verify()


def run_that_loses_a_write(tree: dict[str, Any]) -> Ended:
    """A disk that tells of a success and keeps nothing, once on the second rank."""
    plain, lost = TensorWriter._put, []

    def put(files: TensorWriter, file: str, data: memoryview, at: int) -> None:
        if read_launch_env().rank == 1 and not lost and len(data) > 2:
            lost.append(file)
            data = data[:0]
        plain(files, file, data, at)

    TensorWriter._put = put
    return run_with(tree, lambda step: None)


@BOTH
def test_a_write_that_is_lost_is_found_before_the_seal(ranks, tiny_data, tmp_path, beside):
    settings = {"train__max_steps": 9, "checkpoint__model_interval": 3, "checkpoint__interval": 0}
    tree = tiny_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=beside)
    ended = ranks(2, run_that_loses_a_write, tree, start_world=False)
    assert [one[:2] for one in ended] == [(0, "")] * 2
    (told,) = warnings(ended[0])
    assert "step 3 is not saved: model of step 3: its files do not hold what was written" in told
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["model-00000006", "model-00000009", "step-00000009"]


@pytest.mark.parametrize("limit", [20_000, 1 << 40])
def test_several_files_are_made_of_a_large_model(tmp_path, monkeypatch, limit):
    transformers = pytest.importorskip("transformers")
    from optimus.checkpoint import save_model
    from optimus.model.hf import plan_hf

    monkeypatch.setattr(save_model, "plan_hf", lambda *arguments: plan_hf(*arguments, limit))
    config = make_config(tiny_tree("d", "r")).model
    shapes = {name: tuple(p.shape) for name, p in whole_model(config).named_parameters()}
    states = masters_of(shapes)
    for one in states.shards:
        one.states["master"].normal_()
    saver = ModelSaver(states, config, "paper", staged=False, limit_s=60.0, begin_s=60.0)
    saver.begin(states, tmp_path / "m", lambda directory: None, step=1).drain()
    manager.read_manifest(tmp_path / "m").verify()
    assert (len(list((tmp_path / "m").glob("*.safetensors"))) > 1) == (limit == 20_000)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m").state_dict()
    chunk = states.shards[0]
    slot = next(slot for slot in chunk.chunk.slots if slot.name == "embed.weight")
    ours = chunk.states["master"][slot.start : slot.stop].view(slot.shape).bfloat16()
    assert torch.equal(theirs["model.embed_tokens.weight"], ours)
