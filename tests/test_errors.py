"""Tests of messages: counted nouns (`1 shard`, `2 shards`), control characters and length."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

import pytest

from optimus.errors import counted, one_line
from tests.kit.ranks.processes import ROOT

COUNTED = (
    "arrays|checkpoints|damages|documents|experts|files|instances|layers|problems|ranks|rows|"
    "shards|stages|steps|threads|units|updates|workers"
)
# Expressions that need no `counted`, because their value is never 1 or is not a count.
ALWAYS_SEVERAL = {
    "{size} ranks",  # the size of an axis, which is above 1 here
    "{result['world']} ranks",  # printed only if an axis is above 1
    "{stages} pipeline stages",  # above 1
    "{short(value['documents'])} documents",  # an estimate, such as 1.2k
    "{short(value['instances'])} instances",
    "{piece_rows} adjacent rows",  # not an integer
    "{ending} files",  # a name, not a number
    "{_MAX_FILES} files",
    "{_HISTORY} updates",  # constants: 20, and 10 below
    "{_UPDATES} updates",
    "{_MOST_RANKS} ranks",
    "{self._model.experts_by_layer[layer]} experts",  # a single expert is never unbalanced
    "{mesh.num_data_ranks} data ranks",  # above 1
    "{mesh.pp * parallel.virtual_stages} stages",  # above 1
    "{MIN_HELD_OUT_DOCUMENTS} documents",
}


def by_hand(text: str) -> Iterator[str]:
    """Search the f-strings in the source code `text` for expressions before a plural noun. Yield
    each expression with its noun, such as `{n} ranks`."""
    for node in ast.walk(ast.parse(text)):
        values = node.values if isinstance(node, ast.JoinedStr) else []
        for value, after in itertools.pairwise(values):
            if isinstance(value, ast.FormattedValue) and isinstance(after, ast.Constant):
                match = re.match(rf" (?!in |of |on )(?:[a-z-]+ )?(?:{COUNTED})\b", after.value)
                if match:
                    yield f"{{{ast.unparse(value.value)}}}{match[0]}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, "shard"), "1 shard"),
        ((0, "shard"), "0 shards"),
        ((2000, "shard"), "2,000 shards"),
        ((1, "microbatch", "microbatches"), "1 microbatch"),
        ((3, "microbatch", "microbatches"), "3 microbatches"),
    ],
)
def test_counted(arguments, text):
    assert counted(*arguments) == text


@pytest.mark.parametrize("package", ["optimus", "data_prep"])
def test_messages_count_with_the_helper(package):
    """Messages must use `counted` for a number with a noun. A plain f-string could print text such
    as `1 ranks`."""
    assert [*by_hand('f"on {n} ranks"')] == ["{n} ranks"]
    assert not [*by_hand('f"ranks {n} or higher"')]
    by_expression = {
        expression: path
        for path in sorted((ROOT / package).rglob("*.py"))
        for expression in by_hand(path.read_text())
    }
    assert not {e: path for e, path in by_expression.items() if e not in ALWAYS_SEVERAL}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, déjà vu 漢字 \U0001f468\u200d\U0001f469", None),
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("a\u202eb\x9bc\x7f", "a\\u202eb\\x9bc\\x7f"),
        ("\udcff", "\\udcff"),
    ],
)
def test_a_message_cannot_control_the_terminal(text, shown):
    assert one_line(text) == (shown or text)
    one_line(text).encode()


def test_a_long_message_keeps_its_beginning_and_its_remedy():
    line = one_line(f"config.toml: {'x' * 300_000} is unknown; use y")
    assert len(line) < 2100
    assert line.startswith("config.toml: xxx") and line.endswith("is unknown; use y")
