"""Bugs that the tests of GPU kernels must detect. Each bug replaces code in one file of csrc."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from optimus_kernels import build
from optimus_kernels.library import Native
from tests.kernels import op_checks as checks

MANY = checks.ROUTINGS[-1]
PRIMES = checks.ROUTINGS[1]


def check_route(native: Native) -> None:
    """Check the `route` kernel. The outputs are zeros before the call, so an element that the
    kernel does not write still has a valid row number."""
    chosen, expected = MANY.chosen("cpu"), checks.case(MANY, "cpu")
    outs = [torch.zeros_like(rows) for rows in expected]
    words = native.route_scratch(*chosen.shape, MANY.total)
    scratch = torch.zeros(words, dtype=torch.int32)
    pointers = [tensor.data_ptr() for tensor in (*outs, scratch)]
    sizes = (*chosen.shape, 0, MANY.total)
    native.call("route", chosen, chosen.data_ptr(), *sizes, *pointers, words)
    assert all(map(torch.equal, outs, expected))


@dataclass(frozen=True)
class Bug:
    """Bug that replaces `old` by `new` in csrc/`file`, so that `check` fails. To save time, the
    SYCL tests compile only the C++ functors whose names contain `functor`."""

    name: str
    file: str
    old: str
    new: str
    functor: str
    check: Callable[[Native], None]

    def plant(self, into: Path) -> Path:
        """Copy csrc into the folder `into`, insert the bug, and return the path of the copy."""
        copy = into / "csrc"
        shutil.copytree(build.csrc(), copy)
        text = (copy / self.file).read_text()
        assert self.old in text, f"{self.file} does not contain {self.old!r}"
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
        "sub-groups process the same elements",
        *(KERNELS, "part * item.lanes() + item.lane()", "item.lane() + 0 * part", "Gather<float"),
        lambda native: checks.check_gather(PRIMES, 1056, torch.float32, "cpu"),
    ),
    Bug(
        "a gradient is written to the slot with the number of its row",
        *(KERNELS, "if (item.lane() == 0) dweights[slot]", "if (item.lane() == 0) dweights[row]"),
        "SwigluBackward<float",
        lambda native: checks.check_swiglu_backward(PRIMES, 64, torch.float32, "cpu"),
    ),
)
