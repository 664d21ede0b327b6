"""Model of a disk: its possible contents after a power cut, from a record of file calls.

An fsync of a file makes its bytes durable. An fsync of a directory makes its entries durable:
creations, renames and removals. After a power cut, the disk can contain any subset of the changes
after the last fsync. A rename within a directory is one change. For a written extent, the disk can
contain all bytes, only the first half of the bytes, zeros, or the old content.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TypeAlias

from tests.kit.faults.disk import Call

EXHAUSTIVE = 1 << 12
"""If the examined paths can have at most this number of states after a power cut, all states are
examined. Otherwise, random states of the whole disk are drawn."""

_LOSSES = ("nothing", "half", "zeros")

Tree: TypeAlias = "bytes | tuple[tuple[str, Tree], ...]"
"""Content of a file; or, for a directory, pairs of name and Tree."""
PathFilter = Callable[[PurePath], bool]
"""Function that returns True if the file or directory at a relative path is examined."""


class File:
    """Durable bytes of a file, and its pending changes: written extents and changes of the size."""

    def __init__(self) -> None:
        self.durable = b""
        self.pending: list[tuple[int, bytes | None]] = []
        """Offset and bytes of each written extent; new size and None for a truncation."""

    def sync(self) -> None:
        self.durable, self.pending = self.current(), []

    def current(self) -> bytes:
        return self._with(["all"] * len(self.pending))

    def trees(self, path: PurePath, is_examined: PathFilter) -> Iterator[bytes]:
        for fates in itertools.product(("all", *_LOSSES), repeat=len(self.pending)):
            yield self._with(fates)

    def draw(self, rng: random.Random, probability: float) -> bytes:
        """Draw one possible content of the file after a power cut. Each pending change is complete
        with `probability`."""
        fates = ["all" if rng.random() < probability else rng.choice(_LOSSES) for _ in self.pending]
        return self._with(fates)

    def _with(self, fates: Sequence[str]) -> bytes:
        if not self.pending:
            return self.durable  # the same object, since trees are often compared
        content = bytearray(self.durable)
        for (offset, data), fate in zip(self.pending, fates, strict=True):
            if fate == "nothing":
                continue
            if data is None:  # a new size
                del content[offset:]
                content.extend(bytes(offset - len(content)))
                continue
            if fate != "all":
                data = bytes(len(data)) if fate == "zeros" else data[: len(data) // 2]
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(data)] = data
        return bytes(content)


class Directory:
    """Durable entries of a directory, and its pending changes. A pending change concerns one name
    or, for a rename, two names."""

    def __init__(self) -> None:
        self.durable: dict[str, Node] = {}
        self.entries: dict[str, Node] = {}
        """Entries that the running machine shows."""
        self.pending: list[Mapping[str, Node | None]] = []

    def change(self, names: Mapping[str, Node | None]) -> None:
        """Set the nodes of several names in the directory as one pending change; None removes a
        name."""
        self.pending.append(names)
        _apply(self.entries, names)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.entries), []

    def trees(self, path: PurePath, is_examined: PathFilter) -> Iterator[Tree]:
        """Yield all possible states of the examined paths. Some states are yielded several
        times."""
        for entries in self._subsets(path, is_examined):
            below = [  # limited, since the product can be too large
                itertools.islice(node.trees(path / name, is_examined), EXHAUSTIVE + 1)
                for name, node in entries
            ]
            for contents in itertools.product(*below):
                yield tuple(zip((name for name, _ in entries), contents, strict=True))

    def _subsets(
        self, path: PurePath, is_examined: PathFilter
    ) -> Iterator[tuple[tuple[str, Node], ...]]:
        """Yield the entries of a directory after each subset of its pending changes. Only entries
        that pass `is_examined` are included, and equal results are yielded once."""
        seen = set()
        touching = [
            names for names in self.pending if any(is_examined(path / name) for name in names)
        ]
        for applied in itertools.product((False, True), repeat=len(touching)):
            entries = dict(self.durable)
            for names in itertools.compress(touching, applied):
                _apply(entries, names)
            examined = tuple((n, entries[n]) for n in sorted(entries) if is_examined(path / n))
            if examined not in seen:
                seen.add(examined)
                yield examined

    def draw(self, rng: random.Random, probability: float) -> Tree:
        """Draw one possible state of the directory after a power cut. Each pending change is on the
        disk with `probability`."""
        entries = dict(self.durable)
        for names in self.pending:
            if rng.random() < probability:
                _apply(entries, names)
        return tuple((name, entries[name].draw(rng, probability)) for name in sorted(entries))


Node = File | Directory


def _apply(entries: dict[str, Node], names: Mapping[str, Node | None]) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """Model of a file system below `root`, which applies recorded file calls."""

    def __init__(self, root: str) -> None:
        self._root, self.top = PurePath(root), Directory()
        self._files: dict[int, File] = {}
        """Files by inode."""

    def apply(self, call: Call) -> None:
        """Apply a call. Calls outside of `root` and on removed files change nothing."""
        position = self._find(call.path)
        if position is None:
            return
        folder, name, node = position
        if call.op == "create":
            self._files[call.inode] = File()
            folder.change({name: self._files[call.inode]})
        elif call.op == "mkdir":
            folder.change({name: Directory()})
        elif call.op == "unlink":
            folder.change({name: None})
        elif call.op in ("rename", "link"):
            assert node is not None, call
            self._move(folder, name, node, call)
        elif not call.path.endswith(" (deleted)"):
            self._write(node or self._renamed(folder, name, call), call)

    def _renamed(self, folder: Directory, name: str, call: Call) -> File:
        """Apply a rename that the record of calls does not contain: rename the file of `call` to
        `name`. Return the file."""
        node = self._files[call.inode]
        old = next(entry for entry, other in folder.entries.items() if other is node)
        folder.change({old: None, name: node})
        return node

    def _write(self, node: Node, call: Call) -> None:
        if call.op == "fsync":
            node.sync()
            return
        assert isinstance(node, File), call
        if call.op == "extend":
            node.pending.append((max(call.offset, len(node.current())), None))
        else:
            node.pending.append((call.offset, call.data if call.op == "write" else None))

    def _move(self, folder: Directory, name: str, node: Node, call: Call) -> None:
        position = self._find(call.other)
        assert position is not None, call
        target, new, _ = position
        removed: dict[str, Node | None] = {name: None} if call.op == "rename" else {}
        if target is folder:
            folder.change({**removed, new: node})
        else:
            target.change({new: node})
            folder.change(removed)

    def _find(self, path: str) -> tuple[Directory, str, Node | None] | None:
        """Return the directory, the name and the node of a path; None outside of `root`."""
        if not PurePath(path).is_relative_to(self._root):
            return None
        names = PurePath(path).relative_to(self._root).parts
        if not names:
            return Directory(), "", self.top
        folder = self.top
        for name in names[:-1]:
            node = folder.entries.get(name)
            if not isinstance(node, Directory):
                return None
            folder = node
        return folder, names[-1], folder.entries.get(names[-1])

    def trees(self, is_examined: PathFilter, rng: random.Random, draws: int) -> Iterator[Tree]:
        """Yield all states of the examined paths after a power cut. If there are more than
        EXHAUSTIVE, yield `draws` random states of the whole disk instead."""
        states = list(itertools.islice(self.top.trees(PurePath(), is_examined), EXHAUSTIVE + 1))
        if len(states) <= EXHAUSTIVE:
            yield from states
            return
        for _ in range(draws):
            yield self.draw(rng)

    def draw(self, rng: random.Random) -> Tree:
        """Draw a state of the whole disk, sometimes with almost all or almost no changes."""
        return self.top.draw(rng, rng.choice((0.05, 0.3, 0.5, 0.7, 0.95)))

    def durable(self, path: PurePath) -> bytes:
        """Return the durable bytes of a file; b"" if the name of the file is not durable."""
        node: Node | None = self.top
        for name in path.parts:
            node = node.durable.get(name) if isinstance(node, Directory) else None
        return node.durable if isinstance(node, File) else b""

    def current(self, is_examined: PathFilter) -> Tree:
        """Return the examined paths as the running machine shows them."""
        return _current(self.top, PurePath(), is_examined)

    def num_pending(self) -> int:
        """Return the number of pending changes of all files and directories that can exist after a
        power cut."""
        reached: dict[int, Node] = {}
        remaining: list[Node] = [self.top]
        while remaining:
            node = remaining.pop()
            if id(node) not in reached:
                reached[id(node)] = node
                if isinstance(node, Directory):
                    changed = (n for names in node.pending for n in names.values() if n is not None)
                    remaining += [*node.durable.values(), *changed]
        return sum(len(node.pending) for node in reached.values())


def _current(node: Node, path: PurePath, is_examined: PathFilter) -> Tree:
    if isinstance(node, File):
        return node.current()
    names = [name for name in sorted(node.entries) if is_examined(path / name)]
    return tuple((name, _current(node.entries[name], path / name, is_examined)) for name in names)
