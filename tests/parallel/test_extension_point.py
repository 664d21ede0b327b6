"""Tests that parallelism changes a model only by objects that replace modules (`ParallelStyle`)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from optimus.config import make_config
from optimus.distributed.groups import plan_groups
from optimus.distributed.mesh import Mesh
from optimus.model.transformer import Transformer
from optimus.parallel.apply import build_model, make_layout
from tests.kit.runs.tiny import DENSE, tiny_tree

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("optimus/parallel", "optimus/rank")
OWNERS = ("self", "ctx")
"""Names of variables whose attributes the checked code is permitted to set. `ctx` is the context of
an autograd function."""
SWAPS = ("__class__", "forward")
CALLS = ("setattr", "vars", "__setattr__", "register_forward_hook")
"""Functions that can change a module without an assignment."""
# `optimus/rank` is permitted to register forward pre-hooks, with which it only observes segments.
PARALLEL_CALLS = (*CALLS, "register_forward_pre_hook")


def changes_from_outside(text: str, calls: tuple[str, ...]) -> Iterator[str]:
    """Yield a message for each place in the source code `text` that can change a module.

    Such a place is an assignment to an attribute of a variable that is not in OWNERS, an assignment
    to an attribute in SWAPS, a use of `__dict__`, or a call of a function in `calls`.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in SWAPS or owner not in OWNERS:
                yield f"line {node.lineno}: {ast.unparse(node)} = ..."
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in calls:
                yield f"line {node.lineno}: {name}(...)"
        elif isinstance(node, ast.Attribute) and node.attr == "__dict__":
            yield f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_is_assigned_to_a_module_from_outside(folder):
    calls = PARALLEL_CALLS if folder == "optimus/parallel" else CALLS
    changes = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in changes_from_outside(path.read_text(encoding="utf-8"), calls)
    ]
    assert not changes, "\n".join(changes)


@pytest.mark.parametrize(
    "text",
    [
        "linear.__class__ = RowLinear",
        "self.__class__ = RowLinear",
        "module.forward = run",
        "self.forward = run",
        "model.embed, x = None, 1",
        "block.mlp.experts.first_expert = 3",
        "module.size += 1",
        "del block.mlp",
        "setattr(module, name, value)",
        "object.__setattr__(module, name, value)",
        "vars(module).update(other)",
        "module.__dict__['forward'] = run",
        "module.register_forward_hook(hook)",
        "module.register_forward_pre_hook(hook)",
    ],
)
def test_planted_change_is_detected(text):
    assert list(changes_from_outside(text, PARALLEL_CALLS))


def test_assignments_to_self_pass():
    text = "class A:\n def f(self, ctx, x):\n  self.x = ctx.x = x\n  x[0] = 1\n  y: int = 1"
    assert not list(changes_from_outside(text, PARALLEL_CALLS))


LAYOUTS = [
    {"tp": 2, "ep": 2, "sequence_parallel": True},
    {"tp": 2, "pp": 2, "schedule": "zb-h1"},
    {"ep": 2, "pp": 2},
    {"tp": 2, "dense": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_styles_keep_names_order_and_types(layout):
    """On each rank, parameters have the names and the order of the undivided model. A module that
    replaces another module is an instance of the same class or of a subclass.
    """
    sizes = {f"parallel__{key}": value for key, value in layout.items() if key != "dense"}
    recompute = {"recompute__modules": ["norm", "attention"]}
    config = make_config(
        tiny_tree("d", "r", **sizes, **recompute, **(DENSE if "dense" in layout else {}))
    )
    mesh = Mesh(**{axis: layout.get(axis, 1) for axis in ("pp", "dp", "ep", "tp")})
    with torch.device("meta"):
        whole = Transformer(config.model)
    order = [name for name, _ in whole.named_parameters()]
    types = {name: type(module) for name, module in whole.named_modules()}
    for rank in range(mesh.world_size):
        groups = plan_groups(mesh, rank)
        rank_layout = make_layout(config, mesh, mesh.coordinate(rank), num_microbatches=4)
        model = build_model(config, rank_layout, groups, torch.device("meta"))
        names = [name for name, _ in model.named_parameters()]
        assert names == [name for name in order if name in set(names)]
        assert set(names) == set(rank_layout.placements)
        for name, module in model.named_modules():
            assert isinstance(module, types[name]), name


def test_a_single_rank_has_the_plain_model():
    config = make_config(tiny_tree("d", "r"))
    groups, layout = plan_groups(Mesh(), 0), make_layout(config, Mesh(), Mesh().coordinate(0), 4)
    model = build_model(config, layout, groups, torch.device("meta"))
    modules = [type(module).__module__ for module in model.modules()]
    assert all(name.startswith(("optimus.model.", "torch.nn.")) for name in modules)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert isinstance(model, nn.Module)
