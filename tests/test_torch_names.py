"""Test that every name of torch.cuda and torch.xpu in the code exists. On a machine without a GPU,
other tests run only a small fraction of the code with these names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def dotted(node: ast.AST) -> str:
    """Return the dotted name of an attribute, such as `torch.cuda.synchronize`. Return "" if `node`
    is not an attribute of a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(names)]) if isinstance(node, ast.Name) else ""


def names_of_devices() -> Iterator[tuple[str, str]]:
    for folder in ("optimus", "kernels", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                name = dotted(node)
                if name.startswith(("torch.cuda.", "torch.xpu.")):
                    yield name, f"{path.relative_to(ROOT)}:{node.lineno}"


def exists(name: str) -> bool:
    value = torch
    for attribute in name.split(".")[1:]:
        if not hasattr(value, attribute):
            return False
        value = getattr(value, attribute)
    return True


def test_names_of_torch_cuda_and_torch_xpu_exist():
    used = list(names_of_devices())
    assert used
    assert [f"{line}: {name}" for name, line in used if not exists(name)] == []
