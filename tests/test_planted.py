"""Test that the planted faults of scripts/drills/planted.py match the code and the tests."""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from functools import cache

from tests.kit.ranks.processes import ROOT

FAULTS = tomllib.loads((ROOT / "tests/planted/faults.toml").read_text(encoding="utf-8"))["fault"]
KEYS = {"name", "package", "file", "old", "new", "tests", "why"}


@cache
def functions(path: str) -> set[str]:
    """Return the names of the functions at the top level of a test module."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_each_fault_changes_a_unique_text():
    wrong = []
    for fault in FAULTS:
        assert set(fault) == KEYS and all(fault[key] for key in KEYS - {"new"}), fault
        path = ROOT / fault["file"]
        count = path.read_text(encoding="utf-8").count(fault["old"]) if path.is_file() else 0
        if count != 1 or fault["old"] == fault["new"]:
            wrong.append(f"{fault['name']}: {fault['file']} contains `old` {count} times")
    assert not wrong, "the code has changed: update these entries of tests/planted/faults.toml"


def test_each_fault_names_tests_that_exist():
    nodes = {node for fault in FAULTS for node in fault["tests"]}
    split = (node.partition("::") for node in nodes)
    missing = [
        f"{path}::{name}"
        for path, _, name in split
        if not (ROOT / path).is_file() or name.partition("[")[0] not in functions(path)
    ]
    assert not missing


def test_faults_are_of_all_packages():
    assert len(FAULTS) >= 60
    assert [name for name, count in Counter(f["name"] for f in FAULTS).items() if count > 1] == []
    assert all(fault["file"].startswith(f"{fault['package']}/") for fault in FAULTS)
    folders = {path.parent for path in (ROOT / "optimus").glob("*/*.py")}
    packages = {folder.relative_to(ROOT).as_posix() for folder in folders}
    packages |= {"optimus", "data_prep", "kernels/optimus_kernels"}
    assert packages <= {fault["package"] for fault in FAULTS}
