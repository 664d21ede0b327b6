"""What must hold before chunks are made: each parameter has groups, and ranks lay out alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from optimus.chunks.states import Home
from optimus.distributed.collectives import Group, all_gather_objects, ranks_of
from optimus.errors import ConfigError


def homes_of(names: Iterable[str], home_of: Callable[[str], Home | None]) -> dict[str, Home]:
    """The home of every parameter; ConfigError names one that has none."""
    homes = {}
    for name in names:
        home = home_of(name)
        if home is None:
            raise ConfigError(
                f"parameter {name} has no groups: nothing says which ranks add up its gradient and "
                "share its optimizer state; give it a placement"
            )
        homes[name] = home
    return homes


def check_alike(named: Mapping[str, Tensor], homes: Mapping[str, Home], everyone: Group) -> None:
    """Raise the same ConfigError on every rank, naming the first parameter, unless ranks that add
    up gradients have the same parameters in the same order.

    A collective of all ranks, a few hashes of each. On the meta device there are no other ranks.
    """
    if everyone.size == 1 or any(parameter.is_meta for parameter in named.values()):
        return
    classes: dict[str, list[str]] = {}
    sizes = {}
    for name, home in homes.items():
        if home.adders.size > 1:
            label = f"{home.adders.axes} from rank {ranks_of(home.adders)[0]}, stage {home.stage}"
            classes.setdefault(label, []).append(_line(name, named[name], home))
            sizes[label] = home.adders.size
    mine = {label: (sizes[label], _digest(lines)) for label, lines in classes.items()}
    every = all_gather_objects(mine, everyone, dict[str, tuple[int, str]])
    odd = next((label for label in _labels(every) if _differ(label, every)), None)
    if odd is not None:
        _refuse(odd, all_gather_objects(classes.get(odd), everyone, list[str] | None))


def _line(name: str, parameter: Tensor, home: Home) -> str:
    return f"{name} {list(parameter.shape)} {home.setting}"


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _labels(every: list[dict[str, tuple[int, str]]]) -> list[str]:
    return sorted({label for one in every for label in one})


def _differ(label: str, every: list[dict[str, tuple[int, str]]]) -> bool:
    told = [one[label] for one in every if label in one]
    return len(told) != told[0][0] or len(set(told)) > 1


def _refuse(label: str, every: list[list[str] | None]) -> None:
    """`every` rank's parameters of one class, None where it has none of it."""
    held = [(rank, lines) for rank, lines in enumerate(every) if lines is not None]
    first, reference = held[0]
    remedy = "give all ranks the same parameters in the same order"
    for rank, lines in held[1:]:
        for index in range(max(len(lines), len(reference))):
            ours, theirs = (one[index : index + 1] for one in (reference, lines))
            if ours != theirs:
                raise ConfigError(
                    f"parameter {(ours or theirs)[0]}: of rank {first}, and rank {rank} has "
                    f"{theirs[0] if ours and theirs else 'none'} in its place, although both "
                    f"add up gradients ({label}); {remedy}",
                )
    raise ConfigError(
        f"parameter {reference[0]}: of rank {first}, but not all ranks that should add up its "
        f"gradient have it ({label}); {remedy}",
    )
