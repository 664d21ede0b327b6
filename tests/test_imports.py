"""Tests of imports. A package imports only the packages that ALLOWED lists for it, imports have no
cycle, and `import optimus` loads no heavy library."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kit.ranks.processes import python

ROOT = Path(__file__).resolve().parents[1]

BASE = "errors io.files io.workspace launch observe.events observe.log"
COMMON = f"{BASE} config platform"
ALL = "*"

# For each package, the packages that it is permitted to import. The imported packages precede the
# package in the table, so the imports have no cycle.
ALLOWED = {
    # The base layer, without torch.
    "errors": "",
    "io.files": "errors",
    "io.workspace": "errors io.files",
    "launch": "errors io.files",
    "observe.events": "",
    "observe.log": "errors observe.events",
    # Independent of the rest of Optimus.
    "data_prep": BASE,
    "kernels": "",
    # Every package below is permitted to import these packages.
    "config": BASE,
    "platform": f"{BASE} config",
    # The packages.
    "peak": COMMON,
    "doctor": f"{COMMON} kernels peak",
    "io": COMMON,
    "distributed": COMMON,
    "model": f"{COMMON} kernels io",
    "hf": f"{COMMON} kernels io model",
    "data": f"{COMMON} data_prep",
    "parallel": f"{COMMON} distributed model kernels",
    "chunks": f"{COMMON} distributed kernels",
    "checkpoint": f"{COMMON} io distributed chunks model hf data data_prep",
    "observe": f"{COMMON} distributed",
    "rank": f"{COMMON} kernels distributed model data parallel chunks checkpoint",
    "resilience": f"{COMMON} distributed model data parallel chunks checkpoint rank observe",
    "planner": f"{COMMON} kernels peak distributed model data parallel chunks checkpoint observe "
    "rank",
    "offloading": f"{COMMON} kernels chunks rank planner",
    "evaluate": f"{COMMON} distributed model hf parallel data checkpoint",
    "train": ALL,
    "bench": ALL,
    "study": ALL,
    # Entry points. Nothing imports them.
    "cli": ALL,
    "warm": ALL,
    "__main__": ALL,
    "optimus": ALL,
}
ENTRY_POINTS = ("cli", "warm", "__main__", "optimus")
"""Modules that import packages only inside functions, so that `optimus --help` is fast."""
# For each package, the libraries that it must not import. Model code, for example, does not use
# process groups.
BANNED = {
    **dict.fromkeys(
        ("errors", "io.files", "launch", "observe.events", "observe.log", "config", "data_prep"),
        ("torch",),
    ),
    **dict.fromkeys(("model", "data", "kernels"), ("torch.distributed",)),
}
ENTRANCES = {"data_prep": "data_prep.dataset"}
"""Maps a package to the only module of this package that other packages are permitted to import."""
LAYERS = [
    "layout",
    "runtime",
    "sources",
    "tokenizer",
    "tokenize",
    "shuffle",
    "dataset",
    "pipeline",
    "cli",
]
"""Modules and folders of data_prep, in order of their layers. The code of an entry is permitted to
import only from the same entry and from earlier entries."""
OURS = ("optimus", "data_prep", "optimus_kernels")
OUTSIDE = ("tests", "scripts")
"""Folders whose code imports the packages. The packages must not import these folders."""

PACKAGES = {"optimus": "optimus", "data_prep": "data_prep", "optimus_kernels": "kernels"}
"""For each importable package, the folder below the root that is the package or contains it."""


@dataclass(frozen=True)
class Import:
    """One import statement."""

    importer: str
    imported: str
    """Dotted name of the imported module, of our packages or of another library."""
    line: int
    lazy: bool
    """True for an import inside a function."""

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}: imports {self.imported}"


def find_modules(root: Path) -> dict[str, Path]:
    """Return the path of each module of Optimus by dotted name. The name of a package is without
    `__init__`."""
    modules = {}
    for package, folder in PACKAGES.items():
        top = root / folder if folder == package else root / folder / package
        for path in sorted(top.rglob("*.py")):
            names = path.relative_to(top.parent).with_suffix("").parts
            modules[".".join(names[:-1] if names[-1] == "__init__" else names)] = path
    return modules


def read_imports(modules: Mapping[str, Path]) -> list[Import]:
    """Return all imports of all modules. An import is an import statement, also inside a function,
    a call of `import_module("name")`, or a use of the attribute `torch.distributed`."""
    imports = []
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
        for node, lazy in _walk(tree, lazy=False):
            targets = dict.fromkeys(_targets(node, package, modules))
            imports += [Import(name, target, node.lineno, lazy) for target in targets]
    return imports


def find_cycle(imports: Iterable[Import]) -> list[str]:
    """Return the modules of Optimus in a cycle of imports, with the first module again at the end.
    Return [] if there is no cycle."""
    edges: dict[str, list[str]] = {}
    for statement in imports:
        edges.setdefault(statement.importer, []).append(statement.imported)
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


MODULES = find_modules(ROOT)
IMPORTS = read_imports(MODULES)


def package_of(module: str) -> str:
    """Return a module's key in ALLOWED, such as `model` for `optimus.model.layers`."""
    names = module.split(".")
    if names[0] == "optimus_kernels":
        return "kernels"
    if names[0] == "optimus" and ".".join(names[1:3]) in ALLOWED:
        return ".".join(names[1:3])
    return names[1] if names[0] == "optimus" and len(names) > 1 else names[0]


def forbidden(statement: Import) -> str:
    """Return the reason why an import is forbidden, or "" if it is allowed."""
    package, top = package_of(statement.importer), statement.imported.split(".")[0]
    if top in OUTSIDE:
        return f"packages do not import {top}/"
    for library in BANNED.get(package, ()):
        if statement.imported == library or statement.imported.startswith(f"{library}."):
            return f"{package} does not import {library}"
    if top not in OURS:
        return ""
    target = package_of(statement.imported)
    if package in ENTRY_POINTS and not statement.lazy and target not in BASE.split():
        return f"{package} imports {target} inside the function that needs it"
    packages = list(ALLOWED)
    if target != package and statement.imported != ENTRANCES.get(target, statement.imported):
        return f"{package} imports {ENTRANCES[target]}, not another module of {target}"
    if target == package == "data_prep" and not _is_below(statement):
        return "folders of data_prep import in the order of LAYERS"
    if target == package or target in ALLOWED[package].split():
        return ""
    if ALLOWED[package] == ALL and packages.index(target) < packages.index(package):
        return ""
    return f"{package} may import {ALLOWED[package] or 'no package'}, not {target}"


def _is_below(statement: Import) -> bool:
    """Return True if the imported module is in the same layer as the importer or in an earlier
    layer."""
    importer, imported = (name.split(".")[1:2] for name in (statement.importer, statement.imported))
    return not imported or LAYERS.index(imported[0]) <= LAYERS.index(importer[0])


def test_packages_are_in_the_table():
    assert {package_of(module) for module in MODULES} <= set(ALLOWED)


def test_the_table_has_no_upward_import():
    packages = list(ALLOWED)
    for package, allowed in ALLOWED.items():
        above = set(packages[: packages.index(package)])
        assert allowed == ALL or set(allowed.split()) <= above, (
            f"{package} names a package below itself"
        )


def test_contributing_has_the_table():
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## Packages")[1].split("\n## ")[0]
    in_page = {
        package: ALL if "all above" in allowed else " ".join(re.findall(r"`(\w+)`", allowed))
        for packages, allowed in re.findall(r"^\| (`[^|]+) \| ([^|]*)\|", text, re.MULTILINE)
        for package in re.findall(r"`([\w.]+)`", packages)
    }
    common = COMMON.split()
    assert in_page == {
        package: " ".join(name for name in allowed.split() if name not in common)
        for package, allowed in ALLOWED.items()
        if package not in BASE.split()
    }


def test_imports_are_allowed():
    wrong = [f"{statement}; {why}" for statement in IMPORTS if (why := forbidden(statement))]
    assert not wrong, "\n".join(wrong)


def test_modules_have_no_cycle():
    assert not (cycle := find_cycle(IMPORTS)), " -> ".join(cycle)


def plant(root: Path, files: Mapping[str, str]) -> list[Import]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return read_imports(find_modules(root))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("optimus/model/a.py", "from optimus.distributed.mesh import Mesh"),
        ("optimus/model/a.py", "def f():\n    from optimus import distributed"),
        ("optimus/model/a.py", "def f():\n    from ..distributed import mesh"),
        ("optimus/model/a.py", "import torch.distributed as d"),
        ("optimus/model/a.py", "from torch import distributed"),
        ("optimus/model/a.py", "import torch\nrank = torch.distributed.get_rank()"),
        (
            "optimus/distributed/a.py",
            "class A:\n    async def f(self):\n        import optimus.train.loop",
        ),
        ("optimus/distributed/a.py", "import importlib\nimportlib.import_module('optimus.cli')"),
        ("optimus/chunks/a.py", "from optimus.model.transformer import Transformer"),
        ("optimus/errors.py", "import torch"),
        ("optimus/cli.py", "from optimus.config import load_config"),
        ("optimus/train/a.py", "from optimus.cli import main"),
        ("optimus/train/a.py", "from tests.kit.ranks import pool"),
        ("data_prep/cli/a.py", "from optimus.config import Config"),
        ("data_prep/cli/a.py", "def f():\n    import torch"),
        ("data_prep/shuffle/a.py", "from data_prep.pipeline.run import prepare"),
        ("optimus/data/a.py", "from data_prep.dataset.manifest import read_manifest"),
        ("optimus/data/a.py", "from data_prep.dataset import manifest"),
        ("optimus/data/a.py", "from data_prep import layout"),
        ("kernels/optimus_kernels/a.py", "from optimus.errors import ConfigError"),
        ("optimus/data/a.py", "import optimus"),
    ],
)
def test_planted_import_is_refused(tmp_path, name, text):
    modules = ("optimus/__init__", "optimus/distributed/__init__", "data_prep/dataset/manifest")
    imports = plant(tmp_path, {**{f"{module}.py": "" for module in modules}, name: text})
    assert any(map(forbidden, imports)), imports


def test_allowed_imports_pass(tmp_path):
    imports = plant(
        tmp_path,
        {
            "optimus/cli.py": "import optimus.errors\ndef f():\n    import optimus.bench.step",
            "optimus/train/a.py": "from optimus.model.transformer import T\nimport numpy",
            "optimus/data/a.py": "import data_prep.dataset",
            "data_prep/cli/a.py": "from optimus.io.files import a\nfrom data_prep.cli import b",
        },
    )
    assert len(imports) == 7 and not any(map(forbidden, imports))


def test_planted_cycle_is_detected(tmp_path):
    planted = {
        "optimus/distributed/a.py": "import optimus.distributed.b",
        "optimus/distributed/b.py": "def f():\n    from optimus.distributed.c import x",
        "optimus/distributed/c.py": "from .a import y\nimport optimus.distributed.d",
        "optimus/distributed/d.py": "",
    }
    assert set(find_cycle(plant(tmp_path, planted))) == {f"optimus.distributed.{n}" for n in "abc"}
    planted["optimus/distributed/c.py"] = "import optimus.distributed.d"
    assert find_cycle(plant(tmp_path, planted)) == []


@pytest.mark.parametrize(
    "statement",
    [
        *("import optimus", "import optimus.config", "import optimus.cli", "import data_prep.cli"),
        *("import optimus.checkpoint.format", "import optimus.checkpoint.index"),
        *("import optimus.checkpoint.store", "import data_prep.dataset"),
    ],
)
def test_imports_without_heavy_libraries(statement):
    libraries = "'torch transformers matplotlib tokenizers sentencepiece pyarrow'"
    heavy = f"' '.join({{*{libraries}.split()}} & {{*sys.modules}})"
    code = f"import sys; {statement}; sys.exit({heavy} or 0)"
    done = python("-c", code)
    assert done.returncode == 0, f"{statement} imports: {done.stderr}"


def test_dependencies_are_those_that_are_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", text)[0] for text in project["dependencies"]}
    optional = {"oneccl_bindings_for_pytorch", "intel_extension_for_pytorch"}
    optional |= {"setuptools"}  # for the SYCL build; a build requirement
    extra = {re.match(r"[\w-]+", text)[0] for text in project["optional-dependencies"]["data"]}
    optional |= extra
    tops = {statement.imported.split(".")[0] for statement in IMPORTS}
    imported = {top for top in tops if top not in sys.stdlib_module_names and top not in OURS}
    assert imported - optional <= declared, "imported, but not declared in pyproject.toml"
    through_torch = {"tensorboard": "torch.utils.tensorboard"}
    everything = " ".join(statement.imported for statement in IMPORTS)
    used = imported | {name for name, way in through_torch.items() if way in everything}
    assert declared | extra <= used, "declared in pyproject.toml, but not imported"


def test_requirements_are_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], "setuptools"]
    for extra in ("data", "test", "sycl"):
        wanted += project["optional-dependencies"][extra]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins), "name==version, nothing else"
    pinned = {pin.partition("==")[0].lower() for pin in pins}
    assert {re.match(r"[\w-]+", text)[0] for text in wanted} <= pinned | {"optimus"}
    assert "torch==2.13.0" in pins


def test_pins_except_torch_have_hashes():
    """Each package that constraints.txt pins, except torch and Intel's packages, must have a hash
    in constraints-hashes.txt."""
    lines = (ROOT / "constraints-hashes.txt").read_text().splitlines()[1:]
    matches = [
        re.fullmatch(r"([\w.-]+==[\w.]+) --hash=sha256:[0-9a-f]{64}", line) for line in lines
    ]
    assert all(matches)
    no_hash = re.compile(r"#|torch==|intel-|tbb==|tcmlib==|umf==")
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    expected = {pin.lower() for pin in pins if not no_hash.match(pin)}
    assert {match[1].lower() for match in matches} == expected


def test_an_installation_adds_no_relative_entry_to_the_path(tmp_path):
    """sys.path of the installed Python must have no relative entry. With a relative entry, Python
    could import a module in the working directory instead of the installed module."""
    code = "import os, sys; print([entry for entry in sys.path if not os.path.isabs(entry)])"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-P", "-c", code]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr
