"""Base class of the sections of configurations, and types of their numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
InitStd = Annotated[float, Field(ge=0, le=1e6)]
Rotations = Annotated[float, Field(ge=0, le=1e6)]


class Section(BaseModel):
    """Base class of the sections of a configuration. A section is immutable, and its validation
    refuses unknown keys and values of the wrong type."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
