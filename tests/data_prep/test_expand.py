"""Tests of the files that an input pattern matches: links, loops of links, names with a leading
dot, and lists of files."""

from __future__ import annotations

import os

import pytest

from data_prep.sources.inputs import find_inputs
from optimus.errors import DataError


def names(folder, patterns, **more) -> list[str]:
    return [os.path.relpath(file.name, folder) for file in find_inputs(patterns, **more)]


@pytest.fixture
def text(tmp_path):
    """Return a folder with a.txt, b/c.txt, b/d/e.txt, .git/config and b/.hidden."""
    for name in ("a.txt", "b/c.txt", "b/d/e.txt", ".git/config", "b/.hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def test_loops_of_links_are_followed_once(text):
    """Each link to a parent folder is followed once. If links were followed again, two links would
    give 2^40 paths."""
    for name in ("l1", "l2", "b/l3"):
        (text / name).symlink_to(text)
    for pattern in (f"{text}", f"{text}/**/*.txt", f"{text}/**"):
        assert names(text, [pattern]) == ["a.txt", "b/c.txt", "b/d/e.txt"]
    assert names(text, [f"{text}/**/b/**/*.txt"]) == ["b/c.txt", "b/d/e.txt", "b/l3/a.txt"]
    assert names(text, [f"{text}/**/d/*.txt"]) == ["b/d/e.txt"]


def test_a_directory_has_its_shortest_name(text):
    (text / "z").symlink_to("b/d")
    assert names(text, [f"{text}"]) == ["a.txt", "b/c.txt", "z/e.txt"]


def test_globs_match_as_in_a_shell(text, monkeypatch):
    monkeypatch.chdir(text)
    assert names(".", ["**/*.txt"]) == names(".", ["."]) == ["a.txt", "b/c.txt", "b/d/e.txt"]
    assert names(".", ["*/*.txt"]) == names(".", ["b/*.txt"]) == ["b/c.txt"]
    assert names(".", ["b/**/e.txt"]) == ["b/d/e.txt"] and names(".", ["b/**/c.txt"]) == ["b/c.txt"]
    assert names(".", [".git/**"]) == [".git/config"] and names(".", ["b/.h*"]) == ["b/.hidden"]


def test_skipped_names_with_a_leading_dot_are_counted(text):
    lines: list[str] = []
    find_inputs([f"{text}"], say=lines.append)
    assert len(lines) == 1 and lines[0].startswith("left out: 2 names with a leading dot")
    find_inputs([f"{text}"], ["*/.*"], say=lines.append)
    find_inputs([f"{text}/b/*.txt"], say=lines.append)
    assert len(lines) == 1


def test_broken_links_and_pipes_are_errors(text):
    (text / "b" / "gone.txt").symlink_to("nowhere")
    for pattern in (f"{text}", f"{text}/b/*.txt", f"{text}/**/*.txt", f"{text}/b/gone.txt"):
        with pytest.raises(DataError, match=r"gone.txt: links to nothing; fix it, or --exclude"):
            find_inputs([pattern])
    assert "b/c.txt" in names(text, [f"{text}"], exclude=["*/gone.txt"])
    os.mkfifo(text / "pipe")
    with pytest.raises(DataError, match="pipe: is no regular file"):
        find_inputs([f"{text}"], ["*/gone.txt"])


def test_a_directory_that_cannot_be_read_is_an_error(text, monkeypatch):
    real = os.scandir

    def scandir(folder):
        if str(folder).endswith("/d"):
            raise PermissionError(13, "Permission denied", folder)
        return real(folder)

    monkeypatch.setattr("data_prep.sources.inputs.os.scandir", scandir)
    with pytest.raises(DataError, match="d: cannot be read: Permission denied"):
        find_inputs([f"{text}"])
    assert "b/c.txt" in names(text, [f"{text}"], exclude=["*/d/*"])


def test_lists_name_patterns_with_comments(text):
    (text / "list").write_text(f"# all\n  {text}/a.txt \n\n {text}/b/*.txt # but not d\n   # end\n")
    assert names(text, [f"@{text}/list"]) == ["a.txt", "b/c.txt"]
    (text / "b#1.txt").write_text("no comment")
    (text / "list").write_text(f"{text}/b#1.txt")
    assert names(text, [f"@{text}/list"]) == ["b#1.txt"]
    (text / "list").write_text("# nothing\n")
    with pytest.raises(DataError, match="the list names nothing"):
        find_inputs([f"@{text}/list"])
    with pytest.raises(DataError, match="is not a file"):
        find_inputs([f"@{text}/gone"])
