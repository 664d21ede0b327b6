"""Model states of a data-parallel rank: parameters, gradients, masters and AdamW moments, all flat.

Every tensor starts on a multiple of 16 elements (64 bytes in fp32) of its buffer, with zeros in
between. Matrix products on unaligned views round differently, and the fused AdamW takes another
formula for a tail shorter than its vectors; so alignment is part of exactness, not only of speed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimus.config import OptimConfig
from optimus.dist.collectives import ALONE, Group, all_gather, all_reduce_max

ALIGNMENT = 16
_NORM_BLOCK = 4096
_WIDENS_NATIVELY = hasattr(torch.Tensor, "grad_dtype")  # torch 2.9 and later: fp32 .grad of bf16


@dataclass(frozen=True)
class Slot:
    """Where one parameter, or one further use of it, lies in the flat buffers."""

    name: str
    owner: str
    shape: torch.Size
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.end].view(self.shape)


@dataclass(frozen=True)
class Home:
    """Where a parameter's gradient belongs: its pipeline stage, the ranks that add it up, and
    whether this rank's copy is the one that counts in the norm."""

    stage: int = 0
    sum_group: Group = ALONE
    partial_over: Group = ALONE
    """Ranks whose gradients are parts of one besides: tensor-parallel ones, of some norms."""
    counts: bool = True


@dataclass(frozen=True)
class Section:
    """Part of the gradient buffer that is ready with one stage and added over one group. Its length
    is a multiple of 16 elements for each rank of the group."""

    stage: int
    group: Group
    partial_over: Group
    start: int
    end: int


class ModelStates:
    """Owns the flat buffers and makes the model's parameters and gradients views of them.

    `masters` [P] fp32; `params` [P] in the training dtype (the masters themselves in fp32);
    `exp_avg`, `exp_avg_sq` [P] fp32; `grads` [G] fp32 holds a slot per parameter and, behind them,
    one per further use of a tied one (CONTRACT.md: one accumulator per use). `sections` divide
    [0, G) by stage and by the group that adds.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: torch.dtype,
        optim: OptimConfig,
        home_of: Callable[[str], Home] = lambda name: Home(),
        model_group: Group = ALONE,
        compiled: bool = False,
    ) -> None:
        """`home_of` is asked for every parameter and further use by name. `model_group` holds one
        whole model, over which the gradient norm is joined. `compiled`: torch.compile will trace
        the model; it takes no parameter whose gradient is of another dtype, so that each is widened
        in a hook as on older torch."""
        named = dict(model.named_parameters())
        self._home_of, self._model_group = home_of, model_group
        shapes = {name: p.shape for name, p in named.items()}
        self.slots, self.sections = _lay_out(shapes, home_of, 0)
        size = self.sections[-1].end
        device = next(iter(named.values())).device
        self.masters = torch.zeros(size, dtype=torch.float32, device=device)
        self.exp_avg, self.exp_avg_sq = (torch.zeros_like(self.masters) for _ in range(2))
        self.params = self.masters if dtype is torch.float32 else self.masters.to(dtype)
        for slot in self.slots:
            slot.view(self.masters).copy_(named[slot.name].data)
            slot.view(self.params).copy_(named[slot.name].data)
            named[slot.name].data = slot.view(self.params)

        model.separate_tied_uses()
        aliases = model.tied_uses()
        owners = {p.data_ptr(): name for name, p in named.items()}
        tied, tied_sections = _lay_out({n: a.shape for n, a in aliases.items()}, home_of, size)
        self.tied_slots = [
            Slot(slot.name, owners[aliases[slot.name].data_ptr()], slot.shape, slot.offset)
            for slot in tied
        ]
        self.sections += tied_sections
        self.grads = torch.zeros(self.sections[-1].end, dtype=torch.float32, device=device)
        self._leaves = {**named, **aliases}
        self._accumulates_natively = dtype is torch.float32 or (_WIDENS_NATIVELY and not compiled)
        if not self._accumulates_natively:
            for name, leaf in self._leaves.items():
                leaf.register_post_accumulate_grad_hook(self._widener(name))
        self.accumulate_into(self.grads)
        self._optimizer = self._make_optimizer(optim)

    def _make_optimizer(self, optim: OptimConfig) -> torch.optim.AdamW:
        whole = nn.Parameter(self.masters)
        whole.grad = self.grads[: self.masters.numel()]  # what tied uses add lies behind
        optimizer = torch.optim.AdamW(
            [whole],
            lr=optim.lr,
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            fused=True,
        )
        self._updates = torch.zeros((), dtype=torch.float32, device=self.masters.device)
        optimizer.state[whole] = {
            "step": self._updates,
            "exp_avg": self.exp_avg,
            "exp_avg_sq": self.exp_avg_sq,
        }
        return optimizer

    def accumulate_into(self, flat: Tensor) -> None:
        """Let backward add into `flat` [G] fp32, called `target`, from now on."""
        self.target = flat
        self._targets = {s.name: s.view(flat) for s in (*self.slots, *self.tied_slots)}
        for name, leaf in self._leaves.items():
            if not self._accumulates_natively:
                leaf.grad = None
                continue
            if leaf.dtype is not torch.float32:
                leaf.grad_dtype = torch.float32
            leaf.grad = self._targets[name]

    def _widener(self, name: str):
        """For torch without `grad_dtype`: add the bf16 gradient of one backward in fp32."""

        def widen(leaf: Tensor) -> None:
            self._targets[name].add_(leaf.grad)
            leaf.grad = None

        return widen

    def check_gradients_in_place(self) -> None:
        """Assert that no `.grad` was replaced: a replaced one would be lost in silence."""
        if self._accumulates_natively:
            for name, leaf in self._leaves.items():
                in_place = (
                    leaf.grad is not None and leaf.grad.data_ptr() == self._targets[name].data_ptr()
                )
                assert in_place, f"the gradient of {name} was replaced; it must accumulate in place"

    def add_tied_uses(self) -> None:
        """Add the gradients of further uses of a parameter to its own, in first-use order."""
        owners = {slot.name: slot for slot in self.slots}
        for slot in self.tied_slots:
            owners[slot.owner].view(self.grads).add_(slot.view(self.grads))

    def grad_norm(self) -> float:
        """The global 2-norm of the gradients: fixed blocks of each parameter, joined exactly.

        The partition depends on the parameter alone and `math.fsum` on no order at all, so the
        bits do not depend on how parameters are spread over stages or buffers. What several ranks
        hold counts once.
        """
        counted = [slot for slot in self.slots if self._home_of(slot.name).counts]
        flats = [self.grads[slot.offset : slot.end] for slot in counted]
        total = math.fsum(self._from_all([_sum_of_squares(flat) for flat in flats]))
        if not math.isfinite(total):  # squares beyond fp32, although each gradient may be finite
            total = math.fsum(self._from_all([flat.double().square().sum() for flat in flats]))
        return math.sqrt(total)

    def _from_all(self, own: list[Tensor]) -> list[float]:
        """The fp64 scalars of all ranks that together hold one model."""
        group = self._model_group
        if group.size == 1:
            return torch.stack(own).tolist()
        device = self.grads.device
        longest = torch.tensor([len(own)], device=device)
        all_reduce_max(longest, group)
        padded = torch.zeros(int(longest), dtype=torch.float64, device=device)
        padded[: len(own)] = torch.stack(own) if own else 0.0
        every = padded.new_empty(group.size * len(padded))
        all_gather(every, padded, group)
        return every.tolist()

    def scale_grads(self, factor: float) -> None:
        """Multiply all gradients, for clipping."""
        self.grads.mul_(factor)

    def update(self, lr: float) -> None:
        """One AdamW update of masters and moments from `grads`, then of the parameters."""
        self._optimizer.param_groups[0]["lr"] = lr
        self._optimizer.step()
        self.publish()

    def publish(self) -> None:
        """Make the parameters what the masters say."""
        if self.params is not self.masters:
            self.params.copy_(self.masters)

    @property
    def num_updates(self) -> int:
        """Updates that AdamW has made; its bias correction depends on it."""
        return int(self._updates)

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._updates.fill_(number)

    def named_gradients(self) -> dict[str, Tensor]:
        """Views of the buffer that backward adds into, by name of the use."""
        return dict(self._targets)

    def named(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat [P] buffer by parameter name."""
        return {slot.name: slot.view(flat) for slot in self.slots}


def _lay_out(
    shapes: dict[str, torch.Size], home_of: Callable[[str], Home], start: int
) -> tuple[list[Slot], list[Section]]:
    """Slots one behind the other, those of one stage and group together; from `start` on."""
    together: dict[tuple[int, Group, Group], list[str]] = {}
    for name in shapes:
        home = home_of(name)
        key = (home.stage, home.sum_group, home.partial_over)
        together.setdefault(key, []).append(name)
    slots, sections, offset = [], [], start
    for key in sorted(together, key=lambda key: key[0]):
        stage, group, partial_over = key
        first = offset
        for name in together[key]:
            slots.append(Slot(name, name, shapes[name], offset))
            offset = _round_up(offset + shapes[name].numel(), ALIGNMENT)
        offset = first + _round_up(offset - first, ALIGNMENT * group.size)
        sections.append(Section(stage, group, partial_over, first, offset))
    return slots, sections


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _sum_of_squares(flat: Tensor) -> Tensor:
    """fp64 scalar: norms of blocks in fp32 (fast), squared and added in fp64."""
    whole = flat.numel() // _NORM_BLOCK * _NORM_BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _NORM_BLOCK), dim=1)
    rest = torch.linalg.vector_norm(flat[whole:])
    return blocks.double().square().sum() + rest.double().square()
