"""Imports run one way: only the arrows below, no circle, nothing heavy where it is not wanted."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.helpers.import_graph import Import, find_cycle, find_modules, read_imports
from tests.helpers.programs import python

ROOT = Path(__file__).resolve().parents[1]

GROUND = "errors io.files launch"
COMMON = f"{GROUND} config platform"
ALL = "*"

# Room: the rooms it may import. A room may name only rooms above it, so that imports run one way.
ARROWS = {
    # The torch-free ground.
    "errors": "",
    "io.files": "errors",
    "launch": "errors io.files",
    # Apart from the rest of Optimus.
    "data_prep": GROUND,
    "kernels": "",
    # Open to every room below.
    "config": GROUND,
    "platform": f"{GROUND} config",
    # The rooms.
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
    "planner": f"{COMMON} distributed model parallel chunks checkpoint rank",
    "evaluate": f"{COMMON} distributed model hf parallel data checkpoint",
    "train": ALL,
    # The faces. Nothing imports them.
    "bench": ALL,
    "cli": ALL,
    "optimus": ALL,
}
FACES = ("cli", "optimus")
"""They load a room only when it is asked for, so that `optimus --help` is quick."""
# Room: libraries it may not import (DESIGN idea 4: model code knows no process group).
BANNED = {
    **dict.fromkeys(("errors", "io.files", "launch", "config", "data_prep"), ("torch",)),
    **dict.fromkeys(("model", "data", "kernels"), ("torch.distributed",)),
}
OURS = ("optimus", "data_prep", "optimus_kernels")
OUTSIDE = ("tests", "scripts")
"""Code that uses the packages and that they may not use."""

MODULES = find_modules(ROOT)
IMPORTS = read_imports(MODULES)


def room_of(module: str) -> str:
    """`optimus.model.layers` -> `model`; a module with an entry in the table is a room by itself;
    the package itself -> `optimus`."""
    parts = module.split(".")
    if parts[0] == "optimus_kernels":
        return "kernels"
    if ".".join(parts[1:3]) in ARROWS:
        return ".".join(parts[1:3])
    return parts[1] if parts[0] == "optimus" and len(parts) > 1 else parts[0]


def forbidden(one: Import) -> str:
    """Why this import may not be, or nothing."""
    here, top = room_of(one.importer), one.imported.split(".")[0]
    if top in OUTSIDE:
        return f"packages do not import {top}/"
    for library in BANNED.get(here, ()):
        if one.imported == library or one.imported.startswith(f"{library}."):
            return f"{here} does not import {library}"
    if top not in OURS:
        return ""
    there = room_of(one.imported)
    if here in FACES and not one.lazy and there not in GROUND.split():
        return f"{here} imports {there} inside the function that needs it"
    rooms = list(ARROWS)
    if there == here or there in ARROWS[here].split():
        return ""
    if ARROWS[here] == ALL and rooms.index(there) < rooms.index(here):
        return ""
    return f"{here} may import {ARROWS[here] or 'no room'}, not {there}"


def test_every_room_is_in_the_table():
    assert {room_of(module) for module in MODULES} <= set(ARROWS)


def test_the_table_runs_one_way():
    rooms = list(ARROWS)
    for room, arrows in ARROWS.items():
        above = set(rooms[: rooms.index(room)])
        assert arrows == ALL or set(arrows.split()) <= above, f"{room} names a room below itself"


def test_only_the_allowed_arrows():
    wrong = [f"{one}; {why}" for one in IMPORTS if (why := forbidden(one))]
    assert not wrong, "\n".join(wrong)


def test_no_circle_of_modules():
    assert not (circle := find_cycle(IMPORTS)), " -> ".join(circle)


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
        ("optimus/train/a.py", "from tests.helpers import rank_pool"),
        ("data_prep/a.py", "from optimus.config import Config"),
        ("data_prep/a.py", "def f():\n    import torch"),
        ("kernels/optimus_kernels/a.py", "from optimus.errors import ConfigError"),
        ("optimus/data/a.py", "import optimus"),
    ],
)
def test_a_planted_arrow_is_found(tmp_path, name, text):
    imports = plant(
        tmp_path, {"optimus/__init__.py": "", "optimus/distributed/__init__.py": "", name: text}
    )
    assert any(forbidden(one) for one in imports), imports


def test_allowed_arrows_are_left_alone(tmp_path):
    imports = plant(
        tmp_path,
        {
            "optimus/cli.py": "import optimus.errors\ndef f():\n    import optimus.bench.step",
            "optimus/train/a.py": "from optimus.model.transformer import T\nimport numpy",
            "data_prep/a.py": "from optimus.io.files import atomic_writer\nfrom data_prep import b",
        },
    )
    assert len(imports) == 6 and not any(map(forbidden, imports))


def test_a_planted_circle_is_found(tmp_path):
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
    ["import optimus", "import optimus.config", "import optimus.cli", "import data_prep.cli"],
)
def test_imports_without_torch(statement):
    heavy = "' '.join({'torch', 'transformers', 'matplotlib'} & {*sys.modules})"
    code = f"import sys; {statement}; sys.exit({heavy} or 0)"
    done = python("-c", code)
    assert done.returncode == 0, f"{statement} brings: {done.stderr}"


def test_dependencies_are_those_that_are_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", text)[0] for text in project["dependencies"]}
    optional = {"oneccl_bindings_for_pytorch", "intel_extension_for_pytorch"}
    optional |= {"transformers", "liger_kernel", "scattermoe"}  # `optimus bench moe`'s peers
    optional |= {"deepspeed"}  # `optimus bench optimizer`'s peer
    optional |= {"setuptools"}  # runs the SYCL build where torch has xpu; declared for building
    extra = {re.match(r"[\w-]+", text)[0] for text in project["optional-dependencies"]["data"]}
    optional |= extra
    tops = {one.imported.split(".")[0] for one in IMPORTS}
    imported = {top for top in tops if top not in sys.stdlib_module_names and top not in OURS}
    assert imported - optional <= declared, "imported, but not declared in pyproject.toml"
    through_torch = {"tensorboard": "torch.utils.tensorboard"}
    everything = " ".join(one.imported for one in IMPORTS)
    used = imported | {name for name, way in through_torch.items() if way in everything}
    assert declared | extra <= used, "declared in pyproject.toml, but not imported"


def test_every_requirement_is_pinned():
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


def test_every_pin_but_torch_has_its_hash():
    """Set-up installs from these on Linux x86-64; scripts/lock.sh writes them."""
    lines = (ROOT / "constraints-hashes.txt").read_text().splitlines()[1:]
    found = [re.fullmatch(r"([\w.-]+==[\w.]+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found)
    no_hash = re.compile(r"#|torch==|intel-|tbb==|tcmlib==|umf==")
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    expected = {pin.lower() for pin in pins if not no_hash.match(pin)}
    assert {match[1].lower() for match in found} == expected
