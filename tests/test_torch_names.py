"""What the code takes from torch.cuda and torch.xpu exists: most of it never runs on a machine
without such a device, where a slip of the pen would wait for the first user who has one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def dotted(node: ast.AST) -> str:
    """`torch.cuda.synchronize` of the attribute that reads so; "" for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def names_of_devices() -> Iterator[tuple[str, str]]:
    for folder in ("optimus", "kernels", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                name = dotted(node)
                if name.startswith(("torch.cuda.", "torch.xpu.")):
                    yield name, f"{path.relative_to(ROOT)}:{node.lineno}"


def exists(name: str) -> bool:
    value = torch
    for part in name.split(".")[1:]:
        if not hasattr(value, part):
            return False
        value = getattr(value, part)
    return True


def test_every_name_of_torch_cuda_and_torch_xpu_exists():
    used = list(names_of_devices())
    assert used
    assert [f"{place}: {name}" for name, place in used if not exists(name)] == []
