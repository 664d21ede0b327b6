"""Layouts of a run, the space of layouts of a search, and checks of layouts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from optimus.config import Config, OffloadConfig
from optimus.config.checks import check
from optimus.data.batch import plan_batch
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError, refuse_if
from optimus.parallel.divisible import check_divisible
from optimus.parallel.pipeline.plan import plan_stages
from optimus.parallel.pipeline.schedules import check_virtual_stages

STATES = (
    ("none", "all"),
    ("none", "parameters"),
    *itertools.product(("so", "epso"), ("all", "parameters", "cache")),
)
"""Pairs of `optim.sharding` and `optim.resident` that a search tries."""
SCHEDULES = (
    ("1f1b", 1),
    ("zb-h1", 1),
    ("gpipe", 1),
    *(("interleaved", v) for v in (2, 3, 4, 6, 8)),
)
"""Pairs of `parallel.schedule` and `parallel.virtual_stages` that a search tries."""
MICROBATCH_SIZES = (1, 2, 4, 8)
RECOMPUTE = ((), ("norm",), ("attention",), ("norm", "attention"), ("block",))
RECOMPUTE_EXPERTS = (("experts",), ("moe",), ("norm", "attention", "moe"))
"""RECOMPUTE: values of `recompute.modules` that a search tries for all models. RECOMPUTE_EXPERTS:
additional values for models with experts."""


class Layout(NamedTuple):
    """Values of the settings that a search chooses."""

    pp: int
    dp: int
    ep: int
    tp: int
    schedule: str
    virtual_stages: int
    microbatch_size: int
    recompute: tuple[str, ...]
    sharding: str
    resident: str
    offload: str = "off"

    @property
    def mesh(self) -> Mesh:
        """The sizes of the axes."""
        return Mesh(*self[:4])

    def apply(self, config: Config) -> Config:
        """Return `config` with the values of the layout. A setting that has no effect with these
        values is set to its default."""
        parallel, offload = config.parallel, config.offload
        if self.offload != offload.mode:
            if self.offload == "off":  # the other settings of [offload] have no effect
                offload = OffloadConfig()
            else:
                offload = offload.model_copy(update={"mode": self.offload})
        return config.model_copy(
            update={
                "parallel": parallel.model_copy(
                    update={
                        **self.mesh._asdict(),
                        "schedule": self.schedule,
                        "virtual_stages": self.virtual_stages,
                        "stage_layers": (),
                        "sequence_parallel": parallel.sequence_parallel and self.tp > 1,
                    }
                ),
                "train": config.train.model_copy(update={"microbatch_size": self.microbatch_size}),
                "recompute": config.recompute.model_copy(update={"modules": self.recompute}),
                "optim": config.optim.model_copy(
                    update={
                        "sharding": self.sharding,
                        "resident": self.resident,
                        "cache_chunks": self.slots(config),
                    }
                ),
                "offload": offload,
            }
        )

    def slots(self, config: Config) -> int:
        """Return the value of `optim.cache_chunks` with this layout. Return 0 if the layout has no
        cache, or if offload.mode = "auto", since a run then chooses the value."""
        has_cache = self.resident == "cache" or config.offload.host_share
        return config.optim.cache_chunks if has_cache and self.offload != "auto" else 0

    def settings(self) -> dict[str, Any]:
        """Return a dict from keys such as "parallel.pp" to the values of the layout."""
        return dict(zip(_KEYS, self, strict=True))

    def describe(self) -> str:
        """Return the layout as overrides `section.key=value`, separated by spaces."""
        return " ".join(f"{key}={override(value)}" for key, value in self.settings().items())


_KEYS = (
    *(f"parallel.{name}" for name in ("pp", "dp", "ep", "tp", "schedule", "virtual_stages")),
    *("train.microbatch_size", "recompute.modules", "optim.sharding", "optim.resident"),
    "offload.mode",
)
"""Keys of the fields of `Layout`."""


def override(value: Any) -> str:
    """Return a value of a layout as the text after `=` in an override `section.key=value`."""
    if isinstance(value, tuple):
        return "[" + ",".join(f'"{name}"' for name in value) + "]"
    return str(value)


def layout_of(config: Config, world_size: int) -> Layout:
    """Return the layout of a configuration on `world_size` ranks."""
    parallel = config.parallel
    model_size = parallel.pp * parallel.ep * parallel.tp
    return Layout(
        parallel.pp,
        parallel.dp or max(1, world_size // model_size),
        parallel.ep,
        parallel.tp,
        parallel.schedule,
        parallel.virtual_stages,
        config.train.microbatch_size,
        tuple(config.recompute.modules),
        config.optim.sharding,
        config.optim.resident,
        config.offload.mode,
    )


def layout_changes(before: Layout, after: Layout) -> dict[str, Any]:
    """Return a dict from keys such as "parallel.pp" to the values of `after`, for the settings in
    which `after` differs from `before`."""
    old, new = before.settings(), after.settings()
    return {key: value for key, value in new.items() if value != old[key]}


@dataclass(frozen=True)
class Space:
    """The space of a search: all combinations of the values of its fields."""

    pp: Sequence[int]
    ep: Sequence[int]
    tp: Sequence[int]
    schedules: Sequence[tuple[str, int]] = SCHEDULES
    microbatch_sizes: Sequence[int] = MICROBATCH_SIZES
    recompute: Sequence[tuple[str, ...]] = RECOMPUTE
    states: Sequence[tuple[str, str]] = STATES

    def layouts(self, world_size: int) -> Iterator[Layout]:
        """Yield all layouts of the space whose mesh has `world_size` ranks."""
        for pp, ep, tp in itertools.product(self.pp, self.ep, self.tp):
            if world_size % (pp * ep * tp):
                continue
            mesh = (pp, world_size // (pp * ep * tp), ep, tp)
            for (schedule, virtual), size, modules, states in itertools.product(
                self.schedules, self.microbatch_sizes, self.recompute, self.states
            ):
                yield Layout(*mesh, schedule, virtual, size, modules, *states)


def space_of(config: Config, world_size: int) -> Space:
    """Return the space of a model. Each axis has the divisors of the number of ranks, up to the
    number of layers for pp, of experts for ep, and of attention heads for tp."""
    model = config.model
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    most_experts = max(1, *model.experts_by_layer)
    return Space(
        pp=[n for n in divisors if n <= model.num_layers],
        ep=[n for n in divisors if n <= most_experts],
        tp=[n for n in divisors if n <= model.num_attention_heads],
        recompute=RECOMPUTE + (RECOMPUTE_EXPERTS if most_experts > 1 else ()),
    )


class LayoutChecks:
    """Checks of the layouts of a run. A check reads only some settings of a layout. If several
    layouts have equal values of these settings, the check runs once for all of them.

    Args:
        config: The configuration, with the settings that layouts do not set.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        optim, mode = config.optim, config.offload.mode
        states = optim.sharding, optim.resident, mode if mode == "manual" else "off"
        self._base = Layout(1, 1, 1, 1, "1f1b", 1, 1, (), *states)
        self._verdicts: dict[Any, str] = {}
        self._stages: dict[int, tuple[range, ...]] = {}

    def stages(self, layout: Layout) -> tuple[range, ...]:
        """Return the layers of each stage. Raises ConfigError as `plan_stages`."""
        number = layout.pp * layout.virtual_stages
        if number not in self._stages:
            self._stages[number] = plan_stages(layout.apply(self._config), layout.pp)
        return self._stages[number]

    def refusal_of_mesh(self, layout: Layout) -> str:
        """Return the reason why the sizes of the axes and the schedule are impossible; "" if they
        are possible."""
        mesh = self._verdict(
            layout[:4], lambda: check_divisible(layout.apply(self._config), layout.mesh)
        )
        return mesh or self._verdict(layout[:6], lambda: self._check_parallel(layout))

    def refusal(self, layout: Layout) -> str:
        """Return the reason why `layout` is refused, or "" if it is accepted. The mesh and the
        schedule of `layout` must be possible (`refusal_of_mesh`)."""
        ranks, size = layout.dp * layout.ep, layout.microbatch_size
        train = self._config.train
        return (
            self._verdict(
                ("batch", ranks, size),
                lambda: plan_batch(train.model_copy(update={"microbatch_size": size}), ranks),
            )
            or self._verdict(
                ("recompute", layout.recompute),
                lambda: self._check(self._base._replace(recompute=layout.recompute)),
            )
            or self._verdict(
                layout[8:],
                lambda: self._check(Layout(*self._base[:8], *layout[8:])),
            )
        )

    def _verdict(self, key: Any, make: Callable[[], object]) -> str:
        if key not in self._verdicts:
            try:
                make()
                self._verdicts[key] = ""
            except ConfigError as error:
                self._verdicts[key] = reason_of(error)
        return self._verdicts[key]

    def _check(self, layout: Layout) -> None:
        check(layout.apply(self._config))

    def _check_parallel(self, layout: Layout) -> None:
        refuse_if(
            layout.pp == 1 and (layout.schedule, layout.virtual_stages) != ("1f1b", 1),
            "with one pipeline rank, all schedules are equal to 1f1b, which is searched instead",
        )
        self._check(Layout(*layout[:6], *self._base[6:]))
        check_virtual_stages(layout.schedule, layout.virtual_stages)
        self.stages(layout)


def reason_of(error: ConfigError) -> str:
    """Return the cause in the message of an error, without numbers and without the remedy, so that
    errors with the same cause are counted together."""
    cause = re.sub(r" \(.*?\)", "", str(error).split("; ")[0])
    return re.sub(r"(?<![\w.])\d[\d,]*(?!\w)", "N", cause)
