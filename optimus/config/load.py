"""From TOML files and command-line overrides to one validated, frozen `Config`."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from optimus.config.checks import check
from optimus.config.sections import Config
from optimus.errors import ConfigError, one_line

Tree = dict[str, Any]
_TO_COME = ("resilience",)


def load_config(path: str | os.PathLike, overrides: Sequence[str] = ()) -> Config:
    """Read a TOML file and its bases, apply `section.key=value` overrides, validate, cross-check.

    Raises ConfigError with one line naming the key, the value and the nearest legal one.
    """
    tree = read_tree(Path(path))
    given = [_apply_override(tree, override) for override in overrides]
    return make_config(tree, str(path), given)


def make_config(
    tree: Mapping[str, Any],
    source: str = "configuration",
    overridden: Sequence[Sequence[str]] = (),
) -> Config:
    """Validate a tree of plain values as a `Config`; those at `overridden` were given on the
    command line, the others by `source`."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        wrong = [str(part) for part in error.errors(include_url=False)[0]["loc"]]
        by_hand = any(a == b[: len(a)] or b == a[: len(b)] for a in [wrong] for b in overridden)
        raise ConfigError(f"{'command line' if by_hand else source}: {explain(error)}") from None
    check(config)
    return config


def read_tree(path: Path, _seen: tuple[Path, ...] = ()) -> Tree:
    """The file's tables laid over those of its `base` files (a name or a list; later ones win)."""
    path = path.resolve()
    if path in _seen:
        raise ConfigError(
            f"{path}: base = inherits from itself through {_seen[-1]}; break the circle"
        )
    try:
        own = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file{_nearest_file(path)}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not readable as TOML: {one_line(error)}") from None
    bases = own.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{path}: base = {bases!r} must be a file name or a list of file names")
    tree: Tree = {}
    for base in bases:
        _merge(tree, read_tree(path.parent / base, (*_seen, path)))
    return _merge(tree, own)


def dump_toml(config: Config) -> str:
    """The resolved configuration as TOML; `load_config` reads it back to an equal value."""
    lines: list[str] = []
    for name, section in config.model_dump(exclude_none=True).items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in section.items()]
        lines.append("")
    return "\n".join(lines)


def explain(error: ValidationError) -> str:
    """The first thing wrong, as `key = value: what is wrong; remedy`."""
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    key = ".".join(location)
    if key in _TO_COME:
        return f"[{key}] is not available in this version; drop the section"
    if first["type"] == "extra_forbidden":
        return f"unknown key {key} = {first['input']!r}; {_legal_names(location)}"
    if first["type"] == "missing":
        return f"{key} is missing; give it in the file or as {key}=VALUE"
    return f"{key} = {first['input']!r}: {_reason(first)}"


def _reason(first: Mapping[str, Any]) -> str:
    if first["type"] == "literal_error":
        expected = first["ctx"]["expected"]
        choices = [choice.strip("' ") for choice in expected.replace(" or ", ",").split(",")]
        near = difflib.get_close_matches(str(first["input"]), choices, n=1, cutoff=0.5)
        return f"must be {expected}" + (f"; did you mean {near[0]!r}?" if near else "")
    if first["type"] == "value_error":  # from a validator of ours
        return str(first["ctx"]["error"])
    message = first["msg"][0].lower() + first["msg"][1:]
    return message.replace("input should", "it should")


def _legal_names(location: Sequence[str]) -> str:
    """A spelling hint, or all keys of the section in which an unknown one stood."""
    section: type[BaseModel] = Config
    for part in location[:-1]:
        if not part.isdigit():  # an entry of a list of tables has their keys
            section = _section_type(section.model_fields[part].annotation)
    wrong, names = location[-1], list(section.model_fields)
    prefix = ".".join(location[:-1])
    near = difflib.get_close_matches(wrong, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {'.'.join([*location[:-1], near[0]])}?"
    elsewhere = [
        f"{name}.{wrong}"
        for name, field in Config.model_fields.items()
        if wrong in _section_type(field.annotation).model_fields
    ]
    if elsewhere:
        return f"did you mean {elsewhere[0]}?"
    return f"the keys of {f'[{prefix}]' if prefix else 'the file'} are {', '.join(names)}"


def _section_type(annotation: Any) -> type[BaseModel]:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    raise AssertionError(f"{annotation} is no section")


def _apply_override(tree: Tree, override: str) -> list[str]:
    """Put the value in its place; returns which that is."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) < 2 or not all(parts):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    table: Any = tree
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {part} is a value, not a section")
    table[parts[-1]] = _parse_value(text.strip())
    return parts


def _parse_value(text: str) -> Any:
    """A TOML value where it is one, otherwise the text itself, so that quotes may be left out."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        return text


def _merge(tree: Tree, over: Mapping[str, Any]) -> Tree:
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(tree.get(key), dict):
            _merge(tree[key], value)
        else:
            tree[key] = value
    return tree


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{escaped}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + "}"
    return repr(value)


def _nearest_file(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".toml"]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""
