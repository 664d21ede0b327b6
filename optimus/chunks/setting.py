"""How the optimizer treats a parameter: a pure function of its name and the configuration."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from optimus.config import OptimConfig
from optimus.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """Part of a chunk's key, so that all of a chunk is treated alike."""

    weight_decay: float | None = None
    """None: the optimizer's own."""
    lr_scale: float = 1.0
    """The learning rate is multiplied by it."""
    frozen: bool = False
    """Not trained: neither gradient nor optimizer state."""


PLAIN = Setting()


def setting_of(name: str, optim: OptimConfig) -> Setting:
    """That of `optim.frozen`, else of the first of `optim.groups` whose pattern matches."""
    if any(fnmatchcase(name, pattern) for pattern in optim.frozen):
        return Setting(frozen=True)
    for group in optim.groups:
        if fnmatchcase(name, group.pattern):
            return Setting(group.weight_decay, group.lr_scale)
    return PLAIN


def check_patterns(optim: OptimConfig, names: Collection[str]) -> None:
    """Raise ConfigError for a pattern that treats none of the whole model's parameters, and if
    nothing is left to train."""
    patterns = [(f"optim.frozen names {text!r}, which", text) for text in optim.frozen]
    patterns += [
        (f"optim.groups[{index}].pattern = {group.pattern!r}", group.pattern)
        for index, group in enumerate(optim.groups)
    ]
    some = ", ".join(sorted({_any_layer(name) for name in names}))
    for what, pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(f"{what} matches no parameter; they are called {some}")
    for index, group in enumerate(optim.groups):
        others = [one.pattern for one in optim.groups[:index]] + list(optim.frozen)
        left = [name for name in names if not any(fnmatchcase(name, one) for one in others)]
        if not any(fnmatchcase(name, group.pattern) for name in left):
            raise ConfigError(
                f"optim.groups[{index}].pattern = {group.pattern!r}: optim.frozen or groups before "
                "it take all that it matches; leave it out, or put it first"
            )
    if all(setting_of(name, optim).frozen for name in names):
        raise ConfigError(
            f"optim.frozen = {list(optim.frozen)} leaves nothing to train; name fewer parameters"
        )


def _any_layer(name: str) -> str:
    """blocks.7.mlp.down_proj.weight as blocks.N.mlp.down_proj.weight."""
    return ".".join("N" if part.isdigit() else part for part in name.split("."))
