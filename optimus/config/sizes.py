"""Sizes of memory in configurations, such as "20GB"."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

_UNITS = {"": 1, "B": 1, "kB": 1000} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?(kB|[KMGT]i?B|B)?")


def parse_bytes(text: str) -> int:
    """Convert a size such as "500GB", "1.5TiB" or "4096" to a number of bytes; "" to 0. Raises
    ValueError for another text."""
    if not text:
        return 0
    match = _BYTES.fullmatch(text)
    if match is None:
        raise ValueError('must be a size such as "500GB" or "1.5TiB"')
    size = int(float(match[1]) * _UNITS[match[2] or ""])
    if not size:
        raise ValueError("must be at least 1 byte")
    return size


def _as_text(value: Any) -> Any:
    return str(value) if type(value) is int else value


def _check(text: str) -> str:
    parse_bytes(text)
    return text


Size = Annotated[str, BeforeValidator(_as_text), AfterValidator(_check)]
"""Type of a setting with a size: a number of bytes, or a text such as "20GB"; "" for no size."""
