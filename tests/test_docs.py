"""Tests of the documentation: commands, options, settings, files and links exist, and README's map
of the folders is complete."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimus.config import load_config
from tests.kit.ranks.processes import python

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "tests" / "kit" / "README.md",
]
MAIN = {"optimus": "optimus.cli", "optimus-data": "data_prep.cli"}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SEPARATORS = {"&&", "||", "|", ";", "&", ">"}


def shell_commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command in the `sh` blocks of the page `text`, without comments and
    variable assignments."""
    for language, block in _FENCE.findall(text):
        if language != "sh":
            continue
        for line in block.replace("\\\n", " ").splitlines():
            lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;>")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if word not in _SEPARATORS:
                    words.append(word)
                    continue
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    del words[0]
                if words:
                    yield words
                words = []


COMMANDS = sorted(
    {(page.name, *words) for page in PAGES for words in shell_commands(page.read_text())}
)


def of(*programs: str) -> list:
    return [
        pytest.param(list(words), id=shlex.join(words))
        for _, *words in COMMANDS
        if words[0] in programs
    ]


@functools.cache
def help_text(program: str, subcommand: str) -> str:
    code = f"import sys; from {MAIN[program]} import main; sys.exit(main())"
    arguments = [*subcommand.split(), "--help"]
    done = python("-c", code, *arguments)
    assert done.returncode == 0, f"{program} {shlex.join(arguments)}: {done.stderr}"
    return done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("words", of("make"))
def test_make_targets_exist(words):
    done = subprocess.run(
        ["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("words", of("optimus", "optimus-data"))
def test_commands_and_options_exist(words):
    program, *rest = words
    subcommand = rest[0] if rest and not rest[0].startswith("-") else ""
    if subcommand in ("bench", "study"):  # they have subcommands with other options
        subcommand = " ".join(rest[:2])
    text = help_text(program, subcommand)
    for word in rest:
        if word.startswith("--"):
            option = word.partition("=")[0]
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", text), f"no {option} in: {text}"


@pytest.mark.parametrize("words", of("optimus"))
def test_configurations_and_settings_exist(words):
    overrides = [word for word in words if re.fullmatch(r"[a-z]+\.[a-z_]+=.*", word)]
    files = [word for word in words if word.endswith(".toml") and "=" not in word]
    assert files or not overrides
    for name in files:
        load_config(ROOT / name, overrides)


def test_readme_shows_the_two_commands():
    shown = {tuple(words) for page, *words in COMMANDS if page == "README.md"}
    assert {("make", "demo"), ("make", "test")} <= shown
    assert {words[0] for words in shown} >= set(MAIN)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        assert other.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in headings(other.read_text()), f"{page.name}: {target}"


def test_examples_of_the_kit_are_code_of_tests():
    page = ROOT / "tests" / "kit" / "README.md"
    examples = re.findall(r"`([^`|]+)` in \[\w+\]\(([^)]+)\) \|$", page.read_text(), re.MULTILINE)
    assert len(examples) > 30
    missing = [code for code, name in examples if code not in (page.parent / name).read_text()]
    assert not missing, missing


def headings(text: str) -> set[str]:
    """Return the anchors (targets of links) that GitHub makes from the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def mapped_folders(text: str) -> list[str]:
    """Return the paths of the folders in README's map `text`. In the map, each level of folders is
    indented by two spaces."""
    block = text.split("## Map of the folders", 1)[1].split("```", 2)[1]
    folders, above = [], []
    for line in block.splitlines()[1:]:
        if match := re.match(r"( *)([\w.-]+)/(?: |$)", line):
            above = [*above[: len(match[1]) // 2], match[2]]
            folders.append("/".join(above))
    return folders


def test_the_map_shows_all_packages():
    folders = mapped_folders((ROOT / "README.md").read_text())
    assert folders, "the map could not be read"
    assert not [name for name in folders if not (ROOT / name).is_dir()]
    packages = {f"optimus/{path.parent.name}" for path in ROOT.glob("optimus/*/__init__.py")}
    assert packages <= set(folders), f"not in the map: {packages - set(folders)}"
    assert len(folders) == len(set(folders)), "a folder is in the map twice"


def test_the_command_reader_reads():
    text = "```sh\nA=1 make x  # note\ncd y && optimus \\\n  train a.toml | tail\n```\n"
    text += "```toml\nb = 1\n```\n"
    assert list(shell_commands(text)) == [
        ["make", "x"],
        ["cd", "y"],
        ["optimus", "train", "a.toml"],
        ["tail"],
    ]
