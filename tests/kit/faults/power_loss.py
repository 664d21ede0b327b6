"""What a disk may hold after a power cut, from the recorded calls that led to it.

A file's bytes are durable from its fsync on, a directory's entries (creations, renames, removals)
from the directory's. Of all else any subset may have reached the disk: of the changes of one
directory each by itself, a rename within it being one change; of an extent that was written all,
half, zeros in its place, or nothing.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath

from tests.kit.faults.disk import Call

EXHAUSTIVE = 1 << 12
"""States of a disk at one moment up to which all are made, and drawn by chance beyond."""

_LOSSES = ("nothing", "half", "zeros")

Tree = bytes | tuple
"""What a disk holds: of a file its bytes, of a directory pairs of a name and a Tree."""
Wanted = Callable[[PurePath], bool]
"""Whether what lies at a path, counted from the root, is looked at."""


class File:
    """Durable bytes, and what was done to them since: new extents, or a new size."""

    def __init__(self) -> None:
        self.durable = b""
        self.pending: list[tuple[int, bytes | None]] = []

    def sync(self) -> None:
        self.durable, self.pending = self.now(), []

    def now(self) -> bytes:
        return self._with(["all"] * len(self.pending))

    def trees(self, path: PurePath, wanted: Wanted) -> Iterator[bytes]:
        for fates in itertools.product(("all", *_LOSSES), repeat=len(self.pending)):
            yield self._with(fates)

    def draw(self, rng: random.Random, keeps: float) -> bytes:
        fates = ["all" if rng.random() < keeps else rng.choice(_LOSSES) for _ in self.pending]
        return self._with(fates)

    def _with(self, fates: Sequence[str]) -> bytes:
        if not self.pending:
            return self.durable  # the same object: trees are compared often
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
    """Durable entries, and the changes since: each of one name, or of both names of a rename."""

    def __init__(self) -> None:
        self.durable: dict[str, Node] = {}
        self.entries: dict[str, Node] = {}
        """As a running machine shows them."""
        self.pending: list[dict[str, Node | None]] = []

    def change(self, names: dict[str, Node | None]) -> None:
        self.pending.append(names)
        _apply(self.entries, names)

    def sync(self) -> None:
        self.durable, self.pending = dict(self.entries), []

    def trees(self, path: PurePath, wanted: Wanted) -> Iterator[Tree]:
        """Every state that it may be in, of what is wanted; many may be alike."""
        for entries in self._subsets(path, wanted):
            below = [  # cut, that no product of them is beyond measure
                itertools.islice(node.trees(path / name, wanted), EXHAUSTIVE + 1)
                for name, node in entries
            ]
            for contents in itertools.product(*below):
                yield tuple(zip((name for name, _ in entries), contents, strict=True))

    def _subsets(self, path: PurePath, wanted: Wanted) -> Iterator[tuple[tuple[str, Node], ...]]:
        """Its wanted entries after each subset of the pending changes, each once."""
        seen = set()
        touching = [names for names in self.pending if any(wanted(path / one) for one in names)]
        for kept in itertools.product((False, True), repeat=len(touching)):
            entries = dict(self.durable)
            for names in itertools.compress(touching, kept):
                _apply(entries, names)
            found = tuple((n, entries[n]) for n in sorted(entries) if wanted(path / n))
            if found not in seen:
                seen.add(found)
                yield found

    def draw(self, rng: random.Random, keeps: float) -> Tree:
        """One state, of all that it holds; each change is there with probability `keeps`."""
        entries = dict(self.durable)
        for names in self.pending:
            if rng.random() < keeps:
                _apply(entries, names)
        return tuple((name, entries[name].draw(rng, keeps)) for name in sorted(entries))


Node = File | Directory


def _apply(entries: dict[str, Node], names: Mapping[str, Node | None]) -> None:
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """A file system below `root`, call by call."""

    def __init__(self, root: str) -> None:
        self._root, self.top = PurePath(root), Directory()
        self._files: dict[int, File] = {}
        """By inode."""

    def apply(self, call: Call) -> None:
        """Do what was done. Calls on what lies outside or is removed already change nothing."""
        place = self._find(call.path)
        if place is None:
            return
        folder, name, node = place
        if call.op == "create":
            self._files[call.inode] = File()
            folder.change({name: self._files[call.inode]})
        elif call.op == "mkdir":
            folder.change({name: Directory()})
        elif call.op == "unlink":
            folder.change({name: None})
        elif call.op in ("rename", "link"):
            self._move(folder, name, node, call)
        elif call.path.endswith(" (deleted)"):
            return
        else:
            node = node or self._renamed(folder, name, call)
            self._change(node, call)

    def _renamed(self, folder: Directory, name: str, call: Call) -> File:
        """The file that was given this name by a call that was not seen."""
        node = self._files[call.inode]
        old = next(one for one, other in folder.entries.items() if other is node)
        folder.change({old: None, name: node})
        return node

    def _change(self, node: Node, call: Call) -> None:
        if call.op == "fsync":
            node.sync()
        elif call.op == "extend":
            size = max(call.offset, len(node.now()))
            node.pending.append((size, None))
        else:
            node.pending.append((call.offset, call.data if call.op == "write" else None))

    def _move(self, folder: Directory, name: str, node: Node, call: Call) -> None:
        there, new, _ = self._find(call.other)
        gone = {name: None} if call.op == "rename" else {}
        if there is folder:
            folder.change({**gone, new: node})
        else:
            there.change({new: node})
            folder.change(gone)

    def _find(self, path: str) -> tuple[Directory, str, Node | None] | None:
        if not PurePath(path).is_relative_to(self._root):
            return None
        parts = PurePath(path).relative_to(self._root).parts
        if not parts:
            return Directory(), "", self.top
        folder = self.top
        for part in parts[:-1]:
            folder = folder.entries.get(part)
            if not isinstance(folder, Directory):
                return None
        return folder, parts[-1], folder.entries.get(parts[-1])

    def trees(self, wanted: Wanted, rng: random.Random, draws: int) -> Iterator[Tree]:
        """All states after a power cut now, of what is wanted; where there are more than
        EXHAUSTIVE, `draws` of them."""
        every = list(itertools.islice(self.top.trees(PurePath(), wanted), EXHAUSTIVE + 1))
        if len(every) <= EXHAUSTIVE:
            yield from every
            return
        for _ in range(draws):
            yield self.draw(rng)

    def draw(self, rng: random.Random) -> Tree:
        """One state of the whole disk by chance: at times nearly all or nearly nothing was kept."""
        return self.top.draw(rng, rng.choice((0.05, 0.3, 0.5, 0.7, 0.95)))

    def durable(self, path: PurePath) -> bytes:
        """What every power cut leaves of a file at `path` from the root, if its name is durable."""
        node: Node | None = self.top
        for part in path.parts:
            node = node.durable.get(part) if isinstance(node, Directory) else None
        return node.durable if isinstance(node, File) else b""

    def now(self, wanted: Wanted) -> Tree:
        """What a running machine shows of what is wanted."""
        return _show(self.top, PurePath(), wanted)

    def num_pending(self) -> int:
        """Un-synced operations on all that some power cut may leave."""
        found: dict[int, Node] = {}
        todo: list[Node] = [self.top]
        while todo:
            node = todo.pop()
            if id(node) not in found:
                found[id(node)] = node
                if isinstance(node, Directory):
                    changed = (n for names in node.pending for n in names.values() if n is not None)
                    todo += [*node.durable.values(), *changed]
        return sum(len(node.pending) for node in found.values())


def _show(node: Node, path: PurePath, wanted: Wanted) -> Tree:
    if isinstance(node, File):
        return node.now()
    names = [name for name in sorted(node.entries) if wanted(path / name)]
    return tuple((name, _show(node.entries[name], path / name, wanted)) for name in names)
