"""Who imports whom, read from the sources without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGES = {"optimus": "optimus", "data_prep": "data_prep", "optimus_kernels": "kernels"}
"""Importable packages and the folder, below the root, that is or holds each."""


@dataclass(frozen=True)
class Import:
    """One import statement."""

    importer: str
    imported: str
    """A module of ours, or the dotted name of another library's."""
    line: int
    lazy: bool
    """Whether it stands inside a function."""

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}: imports {self.imported}"


def find_modules(root: Path) -> dict[str, Path]:
    """Our modules by dotted name; a package goes by its own name, without `__init__`."""
    modules = {}
    for package, folder in PACKAGES.items():
        top = root / folder if folder == package else root / folder / package
        for path in sorted(top.rglob("*.py")):
            parts = path.relative_to(top.parent).with_suffix("").parts
            modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def read_imports(modules: Mapping[str, Path]) -> list[Import]:
    """Every import of every module, lazy or not.

    `import_module("name")` counts, and so does reaching for `torch.distributed` as an attribute.
    """
    found = []
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for node, lazy in _walk(tree, lazy=False):
            targets = dict.fromkeys(_targets(node, package, modules))
            found += [Import(name, target, node.lineno, lazy) for target in targets]
    return found


def find_cycle(imports: Iterable[Import]) -> list[str]:
    """Modules of ours that import each other in a circle, first one repeated last; [] if none."""
    edges: dict[str, list[str]] = {}
    for one in imports:
        edges.setdefault(one.importer, []).append(one.imported)
    done: set[str] = set()
    for start in edges:
        path, stack = [], [(start, False)]
        while stack:
            module, leaving = stack.pop()
            if leaving:
                done.add(path.pop())
            elif module in path:
                return [*path[path.index(module) :], module]
            elif module not in done:
                path.append(module)
                stack.append((module, True))
                stack += [(target, False) for target in edges.get(module, ())]
    return []


def _walk(node: ast.AST, lazy: bool) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield child, inside
        yield from _walk(child, inside)


def _targets(node: ast.AST, package: str, modules: Mapping[str, Path]) -> Iterator[str]:
    match node:
        case ast.Import():
            yield from (alias.name for alias in node.names)
        case ast.ImportFrom():
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield whole if whole in modules or base == "torch" else base
        case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
            yield "torch.distributed"
        case ast.Call(args=[ast.Constant(value=str(name)), *_]):
            if ast.unparse(node.func).rpartition(".")[2] in ("import_module", "__import__"):
                yield name
