"""Random mutations of files, as caused by damage or by an attacker. This module reads and writes no
file.

`mutate(random, content, syntax)` draws a `Change`: other content of a file, or a replacement of the
file, such as a FIFO or a link. Generators with the same seed draw the same change on all machines.
"""

from __future__ import annotations

import ast
import copy
import json
import math
import random
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CANARY = "optimus-canary-5b1e3d"
"""Text of files outside the directory of a case. A command that prints or copies this text has a
fault."""
OUTSIDE = "../outside/secret"
"""Name of a file that contains CANARY, relative to the directory of the case."""
LARGE_BYTES = 1 << 36
"""Length of a sparse file, larger than the memory limit of a command."""

REPLACEMENTS = (
    *("fifo", "directory", "socket", "absent", "large"),
    *("dangling", "endless", "foreign", "copy"),
)
"""Kinds of replacements of a file. `large` is a sparse file. The last four are links: to a path
that does not exist, to /dev/zero, to a file outside the directory, and to a copy of the file."""

_DEEP, _DEEP_TABLE, _LONG, _HUGE, _POWER = (f"@{name}@" for name in "ABCDE")
_RAW = {
    f'"{_DEEP}"': "[" * 100_000 + "]" * 100_000,
    f'"{_DEEP_TABLE}"': '{"a":' * 50_000 + "1" + "}" * 50_000,
    f'"{_LONG}"': '"' + "x" * 300_000 + '"',
    f'"{_HUGE}"': "9" * 5000,
    f'"{_POWER}"': "1e999",
}
"""JSON texts with extreme values. A key is the JSON string that its text replaces."""

_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 7, 255, 65536),
    *(1 << 31, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64, 1 << 100, -(1 << 63), -(1 << 100)),
    *(0.5, -0.0, 1e308, math.nan, math.inf, -math.inf),
    *("", "x", "0", "train", "uint32", [], {}, [None], [[]], [0, 1], {"a": 1}, [1.5], ["x"]),
    *(OUTSIDE, f"../{OUTSIDE}", "/etc/hostname", "/dev/zero", "..", ".", "/", "a/b", "a\0b"),
    *("\x1b]0;x\x07", "\x1b[31m", "\r\n", "\ud800", "\u202e", "\x7f\x85", "%s{0}"),
    *(_DEEP, _DEEP_TABLE, _LONG, _HUGE, _POWER),
)
_SHIFTS: tuple[Callable[[Any], Any], ...] = (
    *(lambda n, by=by: n + by for by in (1, -1, 8, -8, 16, 64, -64, 128, 4096, 1 << 32)),
    *(lambda n: -n, lambda n: 2 * n, lambda n: n // 2, lambda n: n * 1000, float, str),
)


@dataclass(frozen=True)
class Change:
    """Mutation of a file: new `content`, or a `replacement` of the file, for example by a link."""

    how: str
    """Description for the report."""
    content: bytes = b""
    replacement: str = ""
    """One of REPLACEMENTS; "": the file has the new content."""
    is_structural: bool = False
    """True if the content is still well formed in its syntax."""


def mutate(number: random.Random, content: bytes, syntax: str) -> Change:
    """Draw a change.

    Args:
        number: The random generator.
        content: Content of the file.
        syntax: A key of STRUCTURES, or "bytes".
    """
    if number.random() < 0.12:
        replacement = number.choice(REPLACEMENTS)
        return Change(replacement, replacement=replacement)
    structure = STRUCTURES.get(syntax)
    if structure is not None and number.random() < 0.7:
        return Change(*structure(number, content), is_structural=True)
    return Change(*_change_bytes(number, content))


_MAX_KEYS, _MAX_ITEMS, _MAX_LINES = 20, 3, 12
"""Limits of `all_changes`: the number of changed entries of a dict, of changed items of a list, and
of changed lines of a file. The last entry, item and line are always changed."""


def all_changes(content: bytes, syntax: str) -> Iterator[Change]:
    """Yield all changes of a file that `_changed_trees` defines. For example, each field of the
    file is set to each of _VALUES in turn.

    Args:
        content: Content of the file.
        syntax: A key of STRUCTURES, or "bytes". For "npy" and "bytes", no change is yielded.
    """
    if syntax == "json lines":
        lines = content.splitlines()
        for at in sorted({*range(len(lines))[: _MAX_LINES - 1], len(lines) - 1}):
            for how, tree in _changed_trees(json.loads(lines[at])):
                changed = [*lines[:at], to_json(tree), *lines[at + 1 :], b""]
                yield Change(f"line {at}: {how}", b"\n".join(changed), is_structural=True)
    elif syntax in _TREES:
        parse, write = _TREES[syntax]
        for how, tree in _changed_trees(parse(content)):
            yield Change(how, write(tree, content), is_structural=True)


def _changed_trees(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield pairs (description, changed tree). In each changed tree, one node is deleted, doubled,
    renamed, wrapped, shifted or replaced by one of _VALUES, or one dict gets an unknown key."""
    holder = [tree]
    for container, key, name in _nodes(holder, (), is_limited=True):
        old = container[key]
        new: list[Any] = [*_VALUES, [old], {"a": old}]
        if isinstance(old, (int, float)) and not isinstance(old, bool):
            new += [shift(old) for shift in _SHIFTS]
        for value in new:
            container[key] = value
            yield f"{name}: set to {value!r}"[:120], holder[0]
        container[key] = old
        if isinstance(old, dict):
            container[key] = {**old, "x": 1}
            yield f"{name}: unknown key", holder[0]
            container[key] = old
        if isinstance(container, list):
            container.insert(key, old)
            yield f"{name}: doubled", holder[0] if container is not holder else [old, old]
            del container[key]
            if container is not holder:
                del container[key]
                yield f"{name}: deleted", holder[0]
                container.insert(key, old)
        else:
            entries = dict(container)
            for names in ((), ("x",), ("../x",), (str(key).upper(),)):
                container.clear()
                for k, v in entries.items():
                    for renamed in names if k == key else (k,):
                        container[renamed] = v
                yield f"{name}: renamed {names}", holder[0]
            container.clear()
            container.update(entries)


def _change_bytes(number: random.Random, content: bytes) -> tuple[str, bytes]:
    size, data = len(content), bytearray(content)
    at = _position(number, size)
    length = min(number.choice((1, 1, 2, 4, 8, 64, 512)), max(size - at, 1))
    kind = number.choice(("flip", "flip", "cut", "insert", "double", "fill", "number", "drop"))
    if not size:
        kind = "insert"
    if kind == "flip":
        for _ in range(number.choice((1, 1, 1, 2, 8))):
            at = _position(number, size)
            data[at] ^= 1 << number.randrange(8)
    elif kind == "cut":
        at = number.choice((0, 1, at, size - 1))
        del data[at:]
    elif kind == "insert":
        data[at:at] = number.randbytes(length) if number.random() < 0.7 else bytes(length)
    elif kind == "double":
        data[at:at] = data[at : at + length]
    elif kind == "fill":
        data[at : at + length] = bytes([number.choice((0, 255))]) * length
    elif kind == "number":
        width = number.choice((1, 2, 4, 8))
        value = number.choice((0, 1, 2, 1 << 31, 1 << 32, 1 << 40, 1 << 62, 1 << 63, -1, -2))
        at -= at % width
        data[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    else:
        del data[at : at + length]
    return f"{kind} at {at} of {size}", bytes(data)


def _position(number: random.Random, size: int) -> int:
    """Draw the position of a byte. Positions near the start and the end, where headers and footers
    are, are more frequent."""
    if not size:
        return 0
    near = min(size, 64)
    return number.choice(
        (number.randrange(size), number.randrange(near), size - 1 - number.randrange(near))
    )


def _change_json(number: random.Random, content: bytes) -> tuple[str, bytes]:
    tree = json.loads(content)
    holder = [tree]
    how = change_tree(number, holder)
    return how, to_json(holder[0], indent=1)


def to_json(tree: Any, indent: int | None = None) -> bytes:
    """Return JSON text of a tree. Strings that are keys of _RAW are replaced by their JSON
    texts."""
    text = json.dumps(tree, indent=indent)
    for mark, raw in _RAW.items():
        text = text.replace(mark, raw)
    return text.encode("utf-8", "surrogatepass")


def change_tree(number: random.Random, holder: list[Any]) -> str:
    """Change one to three nodes of the tree holder[0]. Return a description."""
    changes = []
    for _ in range(number.choice((1, 1, 1, 1, 2, 3))):
        holder[:] = holder or [None]
        nodes = list(_nodes(holder, ()))
        container, key, name = number.choice(nodes)
        changes.append(f"{name}: {_change_node(number, container, key, nodes)}")
    holder[:] = holder or [None]
    return "; ".join(changes)


def _nodes(
    container: Any, path: tuple[str, ...], is_limited: bool = False
) -> Iterator[tuple[Any, Any, str]]:
    """Yield the nodes below a container as (container, key, name). With `is_limited`, yield at most
    _MAX_KEYS entries of each dict and at most _MAX_ITEMS items of each list."""
    items = [*(container.items() if isinstance(container, dict) else enumerate(container))]
    most = _MAX_KEYS if isinstance(container, dict) else _MAX_ITEMS
    if is_limited and len(items) > most:
        items[most - 1 :] = items[-1:]
    for key, value in items:
        keys = (*path, str(key)[:40])
        yield container, key, ".".join(keys[1:]) or "all"
        if isinstance(value, (dict, list)):
            yield from _nodes(value, keys, is_limited)


def _change_node(
    number: random.Random, container: Any, key: Any, nodes: list[tuple[Any, Any, str]]
) -> str:
    """Change a node. Return a description."""
    value = container[key]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if is_number and number.random() < 0.5:
        try:
            container[key] = number.choice(_SHIFTS)(value)
        except (ValueError, OverflowError):
            container[key] = -1
        return f"{value} -> {container[key]!r}"[:80]
    kind = number.choice(("set", "set", "set", "delete", "add", "swap", "wrap", "double", "name"))
    if kind == "delete":
        del container[key]
    elif kind == "add" and isinstance(container, dict):
        name = number.choice(("", "x", "__class__", "name", "\x1b[0m"))
        container[name] = copy.deepcopy(number.choice(_VALUES))
    elif kind == "swap":
        other, other_key, other_name = number.choice(nodes)
        if _contains(value, other) or _contains(other[other_key], container):
            container[key] = None
        else:
            container[key], other[other_key] = other[other_key], value
            return f"swapped with {other_name}"
    elif kind == "wrap":
        container[key] = [value] if number.random() < 0.5 else {"a": value}
    elif kind == "double" and isinstance(container, list):
        container.insert(key, value)
    elif kind == "name" and isinstance(container, dict):
        name = number.choice(("x", "../x", "a\0b", str(key).upper(), _LONG, "\ud800"))
        container[name] = container.pop(key)
        return f"renamed {name!r}"[:80]
    else:
        # Copy the value, since a later change of a list in _VALUES would affect other cases.
        container[key] = new = copy.deepcopy(number.choice(_VALUES))
        return f"set to {new!r}"[:80]
    return kind


def _contains(tree: Any, node: Any) -> bool:
    """Return True if `node` is `tree` or a node below `tree`."""
    if tree is node:
        return True
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return any(_contains(value, node) for value in values)


def _change_lines(number: random.Random, content: bytes) -> tuple[str, bytes]:
    """Change the JSON value of one line, or add, remove or exchange lines."""
    lines = content.splitlines()
    at = number.randrange(len(lines))
    kind = number.choice(("tree", "tree", "tree", "double", "delete", "swap", "other"))
    if kind == "tree":
        holder = [json.loads(lines[at])]
        how = change_tree(number, holder)
        lines[at] = to_json(holder[0])
        kind = f"tree: {how}"
    elif kind == "double":
        lines.insert(at, lines[at])
    elif kind == "delete":
        del lines[at]
    elif kind == "swap":
        other = number.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
    else:
        value = number.choice(_VALUES)
        lines.insert(at, to_json(value))
        kind = f"new line {value!r}"[:80]
    return f"line {at}: {kind}", b"\n".join([*lines, b""])


def _change_toml(number: random.Random, content: bytes) -> tuple[str, bytes]:
    text = content.decode()
    if number.random() < 0.15:
        line = number.choice(
            (
                'base = "run.toml"',
                'base = ["/dev/zero", "."]',
                "base = 5",
                "x = " + "[" * 100_000,
                "x = " + "[" * 100_000 + "]" * 100_000,
                f"[{'a.' * 90}b]",
                f"[{'a.' * 50_000}b]",
                f"x = {'9' * 5000}",
                "x = 0x" + "f" * 100_000,
                "x = 1979-05-27T07:32:00Z",
                "[[model]]",
                "\N{BYTE ORDER MARK}",
            )
        )
        lines = text.splitlines()
        lines.insert(number.choice((0, number.randrange(len(lines) + 1))), line)
        return f"line {line[:40]!r}", "\n".join(lines).encode()
    holder = [tomllib.loads(text)]
    how = change_tree(number, holder)
    return how, _to_toml(holder[0])


def _to_toml(tree: Any) -> bytes:
    """Return TOML text of a tree, with the replacements of _RAW."""
    table = tree if isinstance(tree, dict) else {"x": tree}
    text = "".join(f"{_toml_key(key)} = {_toml(value)}\n" for key, value in table.items())
    for mark, raw in _RAW.items():
        text = text.replace(mark, raw)
    return text.encode("utf-8", "surrogatepass")


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def _toml_key(key: str) -> str:
    return key if key.isidentifier() and key.isascii() else json.dumps(key, ensure_ascii=False)


def _change_safetensors(number: random.Random, content: bytes) -> tuple[str, bytes]:
    """Change the tree of the header, and correct the length of the header. Bytes of tensors do not
    change."""
    holder = [_safetensors_header(content)]
    how = change_tree(number, holder)
    return how, _with_header(holder[0], content)


def _safetensors_header(content: bytes) -> Any:
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def _with_header(tree: Any, content: bytes) -> bytes:
    """Return the content of a safetensors file with another header."""
    header, start = to_json(tree), 8 + int.from_bytes(content[:8], "little")
    return len(header).to_bytes(8, "little") + header + content[start:]


def _change_padded(number: random.Random, content: bytes) -> tuple[str, bytes]:
    """Change the padded JSON text in the first 4096 bytes."""
    holder = [json.loads(content[:4096])]
    how = change_tree(number, holder)
    return how, _with_padded(holder[0], content)


def _with_padded(tree: Any, content: bytes) -> bytes:
    return to_json(tree)[:4095].ljust(4095) + b"\n" + content[4096:]


def _change_npy(number: random.Random, content: bytes) -> tuple[str, bytes]:
    """Change a field in the header of a .npy file, or remove rows at the end of the file."""
    length = 10 + int.from_bytes(content[8:10], "little")
    fields, data = ast.literal_eval(content[10:length].decode()), content[length:]
    key = number.choice(("descr", "descr", "fortran_order", "shape", "shape", "shape", "rows"))
    if key == "descr":
        kinds = ("<u2", "<u4", "<i8", "|O", "<f8", ">u2", "|S2", "|V0", "x", "<M8[s]", "<U4", "")
        fields[key] = number.choice((*kinds, [("a", "<u2")], 5))
    elif key == "fortran_order":
        fields[key] = number.choice((True, None, 5))
    elif key == "shape":
        sizes = [-1, 0, 1, 1 << 31, 1 << 62, 1 << 63, 1 << 100, True, 0.5]
        shape = list(fields[key])
        shape[number.randrange(len(shape))] = number.choice(sizes)
        fields[key] = tuple(shape) if number.random() < 0.8 else number.choice(((), 5, shape, "x"))
    else:
        row = max(len(data) // max(fields["shape"][0], 1), 1)
        keep = number.randrange(fields["shape"][0] + 1)
        fields["shape"] = (keep, *fields["shape"][1:])
        data = data[: keep * row]
    text = repr(fields).encode()
    header = content[:8] + (length - 10).to_bytes(2, "little") + text.ljust(length - 11) + b"\n"
    return f"{key}: {text.decode()}", header + data


STRUCTURES: Mapping[str, Callable[[random.Random, bytes], tuple[str, bytes]]] = {
    "json": _change_json,
    "json lines": _change_lines,
    "toml": _change_toml,
    "safetensors": _change_safetensors,
    "padded json": _change_padded,
    "npy": _change_npy,
}
"""For each syntax, the function that changes a file so that the changed file is well formed."""

_TREES: Mapping[str, tuple[Callable[[bytes], Any], Callable[[Any, bytes], bytes]]] = {
    "json": (json.loads, lambda tree, content: to_json(tree, indent=1)),
    "toml": (lambda content: tomllib.loads(content.decode()), lambda tree, _: _to_toml(tree)),
    "safetensors": (_safetensors_header, _with_header),
    "padded json": (lambda content: json.loads(content[:4096]), _with_padded),
}
"""For each syntax with a single tree, two functions: `read(content)` returns the tree of a file,
and `write(tree, content)` returns the content of the file with another tree."""
