"""Test that docs/design names functions that exist, and shows the packages and their imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from scripts.package_picture import picture
from tests.test_imports import ALLOWED, LAYERS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(ROOT.glob("docs/design/*.md"))
_NAMED = re.compile(r"`([\w/]+\.py)::([\w.]+)`")


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


def test_a_name_that_is_gone_is_missed():
    names = defined_in(ROOT / "data_prep/sources/documents.py")
    assert {"InputReader", "InputReader.position", "NO_LIMITS", "_skip"} <= names
    assert not {"position", "InputReader.nobody"} & names


def test_packages_page_has_the_graph_of_the_import_table():
    """`python scripts/package_picture.py` prints the graph."""
    page = (ROOT / "docs/design/packages.md").read_text()
    assert f"```mermaid\n{picture()}\n```" in page


def test_packages_page_describes_each_package_once():
    page = (ROOT / "docs/design/packages.md").read_text()
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    assert re.findall(r"`([\w.]+)`", " ".join(rows)) == [*ALLOWED, *LAYERS]
