"""Optimizer options of each parameter, computed from its name and the configuration."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from optimus.config import MAX_PATTERNS, OptimConfig
from optimus.errors import ConfigError

if TYPE_CHECKING:  # `optimus plan` imports this module without torch
    import torch


@dataclass(frozen=True)
class ParamOptions:
    """Options of the optimizer for a parameter. All parameters of a chunk have the same options."""

    weight_decay: float | None = None
    """Weight decay. None selects `optim.weight_decay`."""
    lr_scale: float = 1.0
    """Factor of the learning rate."""
    frozen: bool = False
    """True for a parameter that is not trained, and that has no gradient and no optimizer
    states."""
    dtype: torch.dtype | None = None
    """Dtype of the parameter. None selects the training dtype."""


DEFAULT_OPTIONS = ParamOptions()


def options_of(name: str, optim: OptimConfig) -> ParamOptions:
    """Return the options of the parameter `name`: frozen if a pattern of `optim.frozen` matches,
    else those of the first entry of `optim.groups` whose pattern matches, else the default."""
    if any(_matches(pattern, name) for pattern in optim.frozen):
        return ParamOptions(frozen=True)
    for group in optim.groups:
        if _matches(group.pattern, name):
            return ParamOptions(group.weight_decay, group.lr_scale)
    return DEFAULT_OPTIONS


def check_patterns(optim: OptimConfig, names: Collection[str]) -> None:
    """Check the patterns of `optim.frozen` and `optim.groups` against the names of all parameters.

    Raises:
        ConfigError: A pattern matches no parameter or has no effect, or no parameter is left to
            train.
    """
    words = (name.split(".") for name in names)
    # Replace each number in a name by N, as in blocks.N.mlp.down_proj.weight.
    kinds = {".".join("N" if word.isdigit() else word for word in name) for name in words}
    known = ", ".join(sorted(kinds))
    left = list(names)
    for pattern in optim.frozen:
        if not any(_matches(pattern, name) for name in names):
            raise ConfigError(
                f"optim.frozen names {pattern!r}, which matches no parameter; the parameters are "
                f"{known}"
            )
        left = [name for name in left if not _matches(pattern, name)]
    trained = bool(left)
    for index, group in enumerate(optim.groups):
        key = f"optim.groups[{index}].pattern = {group.pattern!r}"
        if not any(_matches(group.pattern, name) for name in names):
            raise ConfigError(f"{key} matches no parameter; the parameters are {known}")
        rest = [name for name in left if not _matches(group.pattern, name)]
        if len(rest) == len(left):
            raise ConfigError(
                f"{key} has no effect: optim.frozen or earlier groups match all of its parameters; "
                "remove this group, or change optim.frozen or the order of optim.groups"
            )
        left = rest
    if not trained:
        raise ConfigError(
            f"optim.frozen = {list(optim.frozen)} leaves nothing to train; name fewer parameters"
        )


def _matches(pattern: str, name: str) -> bool:
    return _compiled(pattern).match(name) is not None


@functools.lru_cache(maxsize=4 * MAX_PATTERNS)
def _compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern. The results are cached here, because some
    versions of fnmatch cache only 256 results, and a configuration can have more patterns."""
    return re.compile(fnmatch.translate(pattern))
