"""The language check of `make lint` finds every kind of text and name that it forbids."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_SPEC = importlib.util.spec_from_file_location("language", ROOT / "scripts" / "language.py")
language = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(language)


@pytest.mark.parametrize(
    ("path", "text", "word"),
    [
        ("a.py", "# all but for the last\n", "but for"),
        ("a.py", 'raise ValueError(f"the rank {n} goes on")\n', "goes on"),
        ("a.py", 'def f():\n    """Return what lies in it."""\n', "lies"),
        ("a.py", 'def f():\n    """Whether it is so."""\n', "Whether"),
        ("a.py", "for one in chunks:\n    pass\n", "one"),
        ("a.py", "def f(told: str) -> None: ...\n", "told"),
        ("a.py", "class A:\n    def __init__(self):\n        self._own = 1\n", "_own"),
        ("a.py", "def test_what_is_told():\n    pass\n", "what"),
        ("a.py", "item = 1\n", "item"),
        ("a.md", "```\nstands\n```\nIt stands\nthere.\n", "stands"),
        ("a.toml", "key = 1 # begun\n", "begun"),
        ("a.sh", "echo behind # behind it\n", "behind"),
        ("a.cpp", "int x; // lies here\n", "lies"),
        ("a.cu", "/* goes\n on, but for one */\n", "but for"),
    ],
)
def test_language_check_finds_an_idiom_or_a_vague_name(path, text, word):
    assert word in [finding.word for finding in language.check_text(path, text)]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.py", 'def f():\n    """Return the ranks of a group."""\n    key = "lies"\n'),
        ("a.md", "```sh\nit stands\n```\nUse `goes on` here.\n"),
        ("a.toml", 'name = "behind"\n'),
    ],
)
def test_language_check_passes_plain_text_and_code(path, text):
    assert language.check_text(path, text) == []


def test_language_check_gives_the_line():
    text = "Plain.\n\n```\ncode\n```\n\nThis lies there.\n"
    assert [finding.line for finding in language.check_text("a.md", text)] == [7]


def test_exempt_paths_exist():
    assert [path for path in language.EXEMPT if not (ROOT / path).exists()] == []
