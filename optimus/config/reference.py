"""Generate the reference of all settings from the docstrings of `optimus.config.sections`.

`python -m optimus.config.reference > docs/configuration.md` writes the page.
"""

from __future__ import annotations

import typing
from types import NoneType
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from optimus.config.sections import Config

_INTRODUCTION = """# Settings

Generated from `optimus/config/sections.py`; `optimus train --settings` prints the same text. A
configuration is a TOML file with these sections. With `base = "other.toml"` (or a list of files)
the file inherits the settings of other files; settings in the file itself take precedence.
`section.key=value` on the command line replaces a setting. For optional settings, 0 means "off" or
"derived from other settings".
"""


def settings_text(markdown: bool = True) -> str:
    """Return the types, defaults and meanings of all settings, as Markdown or as plain text."""
    blocks = [_INTRODUCTION] if markdown else []
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, BaseModel)
        title = f"## [{name}]" if markdown else f"[{name}]"
        blocks.append(
            "\n".join([title, "", _unwrapped(section.__doc__), "", *_rows(section, markdown)])
        )
    return "\n\n".join(block.strip() for block in blocks) + "\n"


def _rows(section: type[BaseModel], markdown: bool) -> list[str]:
    fields = section.model_fields.items()
    if not markdown:
        return [
            f"  {key} ({type_name(field.annotation)}, {_default(field)}): "
            f"{_unwrapped(field.description)}"
            for key, field in fields
        ]
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return head + [
        f"| `{key}` | {type_name(field.annotation)} | {_default(field)} | "
        f"{_unwrapped(field.description)} |"
        for key, field in fields
    ]


def type_name(annotation: Any) -> str:
    """Return the text that describes a type, such as `"fp32", "bf16"` or `list of integer`."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return ", ".join(f'"{choice}"' for choice in arguments)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin in (tuple, list):
        return f"list of {type_name(arguments[0])}"
    if arguments:  # a union with None
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


def _unwrapped(text: str | None) -> str:
    return " ".join((text or "").split())


if __name__ == "__main__":
    print(settings_text(), end="")
