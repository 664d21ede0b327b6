"""The reference of all settings, made from the docstrings of `sections`.

`python -m optimus.config.reference > docs/configuration.md` writes the page; a test keeps it true.
"""

from __future__ import annotations

import typing
from types import NoneType
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from optimus.config.sections import Config

_INTRODUCTION = """# Settings

Made from `optimus/config/sections.py`; `optimus train --settings` prints the same. A configuration
is a TOML file of these sections; `base = "other.toml"` (or a list) lays it over other files, and
`section.key=value` on the command line over all of them. Zero means "derived" or "off" where a
setting can be left out.
"""


def settings_text(markdown: bool = True) -> str:
    """Every section and key with type, default and meaning, as Markdown or plain text."""
    parts = [_INTRODUCTION] if markdown else []
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        title = f"## [{name}]" if markdown else f"[{name}]"
        parts.append(
            "\n".join([title, "", _folded(section.__doc__), "", *_rows(section, markdown)])
        )
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _rows(section: type[BaseModel], markdown: bool) -> list[str]:
    fields = section.model_fields.items()
    if not markdown:
        return [
            f"  {key} ({type_name(field.annotation)}, {_default(field)}): "
            f"{_folded(field.description)}"
            for key, field in fields
        ]
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return head + [
        f"| `{key}` | {type_name(field.annotation)} | {_default(field)} | "
        f"{_folded(field.description)} |"
        for key, field in fields
    ]


def type_name(annotation: Any) -> str:
    """A type as users write it: `"fp32", "bf16"`, `list of integer`, ..."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f'"{choice}"' for choice in arguments)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin in (tuple, list):
        return f"list of {type_name(arguments[0])}"
    if arguments:  # a union
        return " or ".join(type_name(a) for a in arguments if a is not NoneType)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "table of " + ", ".join(annotation.model_fields)
    return {bool: "true or false", int: "integer", float: "number", str: "text"}[annotation]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.default
    if value is None:
        return "absent"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return str(list(value))
    return f'"{value}"' if isinstance(value, str) else str(value)


def _folded(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    print(settings_text(), end="")
