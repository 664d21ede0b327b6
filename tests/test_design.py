"""Tests of documentation pages. The functions and files that a page names exist, and the import
graph and the numbers in docs/design agree with the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from optimus.checkpoint.save import states_to_write
from optimus.config import load_config
from optimus.distributed.mesh import Coordinate, Mesh
from optimus.rank.states import PlannedRank, plan_rank, states_of_rank
from scripts.package_picture import picture
from tests.test_imports import ALLOWED, LAYERS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("docs/design/*.md")), ROOT / "tests" / "kit" / "README.md"]
_NAMED = re.compile(r"`([\w/]+\.py)::([\w.]+)`")
_FOLDERS = "optimus|data_prep|kernels|scripts|tests|configs|docs"
_PATH = re.compile(rf"(?<![\w/.-])(?:{_FOLDERS})/[\w./-]*\w")


def defined_in(path: Path) -> set[str]:
    """Return the names of a module's functions, classes, constants and methods (`Class.method`)."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            names.add(getattr(target, "id", None))
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (member for member in node.body if isinstance(member, ast.FunctionDef))
            names |= {f"{node.name}.{member.name}" for member in inner}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_functions_that_a_page_names_exist(page):
    named = _NAMED.findall(page.read_text())
    assert named
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).is_file() or name not in defined_in(ROOT / file)
    ]
    assert not missing, f"{page.name}: {missing}"


@pytest.mark.parametrize(
    "page",
    sorted(
        [*ROOT.glob("README.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/formats/*.md"), *PAGES]
    ),
    ids=lambda page: page.name,
)
def test_files_that_a_page_names_exist(page):
    """The test does not check pages in docs/benchmarks, because such a page can name a script that
    was removed later, together with the commit that contains the script."""
    paths = {path for path in _PATH.findall(page.read_text()) if "NAME" not in path}
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert not missing, f"{page.name}: {missing}"


def test_a_name_that_is_gone_is_missed():
    names = defined_in(ROOT / "data_prep/sources/documents.py")
    assert {"InputReader", "InputReader.position", "NO_LIMITS", "_too_deep"} <= names
    assert not {"position", "InputReader.nobody"} & names


def test_packages_page_has_the_graph_of_the_import_table():
    """docs/design/packages.md contains the import graph that `python scripts/package_picture.py`
    prints."""
    page = (ROOT / "docs/design/packages.md").read_text()
    assert f"```mermaid\n{picture()}\n```" in page


def test_packages_page_describes_each_package_once():
    page = (ROOT / "docs/design/packages.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    assert re.findall(r"`([\w.]+)`", " ".join(rows)) == [*ALLOWED, *LAYERS]


def test_parameter_page_has_the_figures_of_its_example():
    page = " ".join((ROOT / "docs/design/a-parameter-s-journey.md").read_text().split())
    mesh, coordinate = Mesh(pp=2, dp=2, ep=4, tp=2), Coordinate(pp=0, dp=1, ep=2, tp=1)
    sizes = [f"parallel.{axis}={size}" for axis, size in mesh._asdict().items()]
    settings = [*sizes, "model.tie_embeddings=true", "optim.sharding=epso"]
    config = load_config(ROOT / "configs/run/mula-7b-a1b.toml", settings)
    rank = plan_rank(config, mesh, coordinate)
    expert, embed = "blocks.3.mlp.experts.gate_up", "embed.weight"
    (experts,), (gate, up), _ = rank.layout.placements[expert].intervals
    ((rows,), _) = rank.layout.placements[embed].intervals
    slot = rank.engine.slots[expert]
    state = rank.engine.chunks[slot.chunk]
    local = state.local_slice(state.master, slot)
    states = states_of_rank(config.model, rank.layout, rank.groups, rank.engine)
    written = [
        param
        for _, state_slice in states_to_write(states, config.checkpoint.scatter)
        for param, _ in state_slice.params
        if param.name == expert
    ]
    assert len({*written}) == 1 and len(written) == 3
    assert [slot.name for slot in state.chunk.slots] == [expert, expert.replace("gate_up", "down")]
    sizes_of = {name: group_sizes(rank, name) for name in (expert, embed)}
    assert sizes_of == {expert: (2, 2), embed: (8, 8)}
    for figure in (
        f"rank {mesh.rank_at(coordinate)} of the {mesh.world_size} ranks",
        f"layers {rank.layout.layers[0][0]} to {rank.layout.layers[0][-1]}",
        f"here {[*rank.layout.placements[expert].shape]}",
        f"experts {experts[0]} to {experts[1] - 1}",
        f"rows {gate[0]} to {gate[1] - 1} of gate and {up[0]} to {up[1] - 1} of up",
        f"The slice is {[*slot.shape]}",
        f"rows {rows[0]:,} to {rows[1] - 1:,}",
        "ranks {} and {}".format(*mesh.group_of(mesh.rank_at(coordinate), ("dp",))),
        f"This chunk has {state.chunk.length:,} elements: `gate_up` from element {slot.start}",
        f"the last {len(local[0]):,} elements of `gate_up`",
        f"elements {written[0].start:,} to {written[0].stop - 1:,}",
    ):
        assert figure in page


def group_sizes(rank: PlannedRank, name: str) -> tuple[int, int]:
    groups = rank.engine.chunks[rank.engine.slots[name].chunk].groups
    return groups.reduce_group.size, groups.shard_group.size
