"""Bugs that a test of GPU kernels must find: one place of one file of csrc that reads otherwise."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from optimus_kernels import build
from optimus_kernels.library import Native
from tests.helpers import kernel_checks as checks

MANY = checks.ROUTINGS[-1]
PRIMES = checks.ROUTINGS[1]


def check_route(native: Native) -> None:
    """As checks.check_route, into zeros: whatever a bug computes from them is a row that exists."""
    chosen, twin = MANY.chosen("cpu"), checks.case(MANY, "cpu")
    outs = [torch.zeros_like(one) for one in twin]
    words = native.route_scratch(*chosen.shape, MANY.total)
    scratch = torch.zeros(words, dtype=torch.int32)
    pointers = [one.data_ptr() for one in (*outs, scratch)]
    sizes = (*chosen.shape, 0, MANY.total)
    native.call("route", chosen, chosen.data_ptr(), *sizes, *pointers, words)
    assert all(map(torch.equal, outs, twin))


@dataclass(frozen=True)
class Bug:
    """`old` -> `new` in csrc/`file`; `check` fails then. `functor` is the part that it is in."""

    name: str
    file: str
    old: str
    new: str
    functor: str
    check: Callable[[Native], None]

    def plant(self, into: Path) -> Path:
        """A copy of csrc with the bug."""
        copy = into / "csrc"
        shutil.copytree(build.csrc(), copy)
        text = (copy / self.file).read_text()
        assert self.old in text, f"{self.file} does not hold {self.old!r}"
        (copy / self.file).write_text(text.replace(self.old, self.new))
        return copy


ROUTE, KERNELS = "include/gpu/route.h", "include/gpu/kernels.h"
BUGS = (
    Bug(
        "no barrier",
        *(ROUTE, "item.barrier();", "", "Route"),
        check_route,
    ),
    Bug(
        "lanes disagree",
        *(ROUTE, "before += item.sum(value);", "before += value;", "Route"),
        check_route,
    ),
    Bug(
        "the next token's slots",
        *(KERNELS, "slot = token * top_k;", "slot = (token + 1) % tokens * top_k;", "Reduce<float"),
        lambda native: checks.check_reduce(PRIMES, 64, torch.float32, True, "cpu"),
    ),
    Bug(
        "every part is the first",
        *(KERNELS, "part * item.lanes() + item.lane()", "item.lane() + 0 * part", "Gather<float"),
        lambda native: checks.check_gather(PRIMES, 1056, torch.float32, "cpu"),
    ),
    Bug(
        "a row's gradient for another slot",
        *(KERNELS, "if (item.lane() == 0) dweights[slot]", "if (item.lane() == 0) dweights[row]"),
        "SwigluBackward<float",
        lambda native: checks.check_swiglu_backward(PRIMES, 64, torch.float32, "cpu"),
    ),
)
