"""Device memory of the ranks of each layout of a search. The bytes are equal to those of
`rank_memory`.

The memory of a rank is the sum of its model states and their cache, its temporary gradients and its
activations. States and gradients are computed by arithmetic (`StateSizes`). For activations, a few
layers are run on the meta device (`profile_model`), once for each combination of microbatch size,
ep, tp, recomputed modules, and divided or undivided backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optimus.config import Config
from optimus.distributed.mesh import Coordinate
from optimus.errors import refuse_if
from optimus.parallel.placement import share
from optimus.planner.expert_loads import RunLoads
from optimus.planner.layouts import Layout, LayoutChecks
from optimus.planner.memory import (
    bytes_of_stage,
    concentration,
    depends_on_load,
    input_bytes,
    interpolate,
)
from optimus.planner.peaks import StageBytes, peaks_of
from optimus.planner.states import StateSizes
from optimus.rank.profile import ModelProfile, Profiled, kinds_of_layers, profile_model

_Group = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""A pair: a tuple of pipeline ranks with equal layers; and for each stage of such a rank, a tuple
with the kinds of the layers."""


class LayoutMemory:
    """Bytes on the device of the fullest rank of each layout of a run.

    Args:
        config: The configuration.
        checks: The checks of the layouts of `config`.
        limit_bytes: Memory of a rank. If the states alone exceed this limit, the result is the
            number of bytes of the states, without activations.
        profiled: Known profiles of segments, to which this object adds the profiles that it
            computes.
        loads: Loads of the experts in a run. The memory is computed for the update with the worst
            load. None for uniform routing.
    """

    def __init__(
        self,
        config: Config,
        checks: LayoutChecks,
        limit_bytes: int | None = None,
        profiled: Profiled | None = None,
        loads: RunLoads | None = None,
    ) -> None:
        self._config, self._checks, self._limit = config, checks, limit_bytes
        self._loads = loads
        self._profiled = {} if profiled is None else profiled
        self._states: dict[tuple[str, str, bool], StateSizes] = {}
        self._of_ranks: dict[Any, list[tuple[int, ...]]] = {}
        self._groups: dict[Any, list[_Group]] = {}
        self._models: dict[Any, list[ModelProfile]] = {}
        self._stages: dict[Any, StageBytes] = {}
        self._activations: dict[Any, list[list[int]]] = {}
        self._inputs: dict[tuple[int, int], int] = {}
        self._weights: dict[tuple[int, ...], dict[int, float]] = {}

    def __call__(self, layout: Layout) -> int:
        """Return the bytes on the device of the fullest rank. Raises ConfigError if
        optim.cache_chunks is too small."""
        states = self._bytes_of_states(layout)
        most = max(map(max, states))
        if self._limit is not None and most > self._limit:
            return most
        activations = self._activations_of(layout)
        return max(
            first + second
            for of_states, of_activations in zip(states, activations, strict=True)
            for first, second in zip(of_states, of_activations, strict=True)
        )

    def activations(self, layout: Layout) -> tuple[int, int]:
        """Return a pair: the bytes of activations of the first and of the last pipeline rank. The
        search places the states of these two ranks only. Their activations do not depend on the
        placement, so they are known before it."""
        # The first pipeline rank is alone in its group, and so is the last.
        of_groups = self._activations_of(layout)
        return max(of_groups[0]), max(of_groups[-1])

    def microbatches(self, layout: Layout) -> int:
        """Return the number of microbatches of a rank in a step."""
        train = self._config.train
        tokens = layout.microbatch_size * train.seq_len
        return train.global_batch_tokens // (tokens * layout.dp * layout.ep)

    def _coordinates(self, layout: Layout) -> list[int]:
        """Return tp indices. The tp ranks can have different numbers of vocabulary rows. For each
        number, the result has the index of a rank with this number."""
        return _different_shares(self._config.model.vocab_size, layout.tp)

    def _bytes_of_states(self, layout: Layout) -> list[tuple[int, ...]]:
        """Return, for each group of pipeline ranks and each tp index of `_coordinates`, the bytes
        of states, cache and gradients of the rank."""
        by_segment = layout.schedule != "zb-h1" and not self._config.train.compile
        key = layout[:4], layout.virtual_stages, by_segment, layout.sharding, layout.resident
        if key in self._of_ranks:
            return self._of_ranks[key]
        # With sequence parallelism and tp > 1, the gradients of norms are also reduced over tp.
        settings = layout.sharding, layout.resident, layout.tp > 1
        if settings not in self._states:
            self._states[settings] = StateSizes(layout.apply(self._config))
        sizes, stages = self._states[settings], self._checks.stages(layout)
        mesh, slots, least = layout.mesh, layout.slots(self._config), 0
        result = []
        for ranks, _ in self._groups_of(layout):
            of_group = []
            for tp in self._coordinates(layout):
                rank = sizes.of_rank(mesh, stages, Coordinate(ranks[0], 0, 0, tp))
                of_group.append(rank.sizes["total"] + rank.temporary[by_segment])
                least = max(least, rank.fewest_slots)
            result.append(tuple(of_group))
        refuse_if(0 < slots < least, f"optim.cache_chunks = {slots} is too small for a block")
        self._of_ranks[key] = result
        return result

    def _groups_of(self, layout: Layout) -> list[_Group]:
        """Return groups of pipeline ranks with equal layers. The ranks of a group differ only in
        their positions in the schedule."""
        key = layout.pp, layout.virtual_stages
        if key not in self._groups:
            stages, groups = self._checks.stages(layout), dict[Any, list[int]]()
            for rank in range(layout.pp):
                kinds = tuple(
                    tuple(kinds_of_layers(self._config, stage).values())
                    for stage in stages[rank :: layout.pp]
                )
                ends = rank == 0, rank == layout.pp - 1
                # With loads, layers of the same kind differ, so each rank is a group.
                number = 0 if self._loads is None else rank
                groups.setdefault((ends, kinds, number), []).append(rank)
            self._groups[key] = [(tuple(ranks), kinds) for (_, kinds, _), ranks in groups.items()]
        return self._groups[key]

    def _activations_of(self, layout: Layout) -> list[list[int]]:
        """Return the bytes of activations and inputs, for each group of pipeline ranks and each tp
        index of `_coordinates`. These are the bytes of the pipeline rank that needs the most memory
        in its group."""
        key = layout[:8]
        if key not in self._activations:
            microbatches = self.microbatches(layout)
            inputs = self._input_bytes(layout.microbatch_size, microbatches)
            count = len(self._coordinates(layout))
            self._activations[key] = [
                [
                    inputs + self._peak(layout, index, ranks, kinds, microbatches)
                    for index in range(count)
                ]
                for ranks, kinds in self._groups_of(layout)
            ]
        return self._activations[key]

    def _peak(
        self,
        layout: Layout,
        index: int,
        ranks: tuple[int, ...],
        kinds: Sequence[tuple[int, ...]],
        microbatches: int,
    ) -> int:
        last = layout.pp * layout.virtual_stages - 1
        of_schedule = layout.schedule, layout.pp, layout.virtual_stages, microbatches
        stages, weights = [], self._weights_of(layout, ranks[0])
        for number, of_stage in zip(range(ranks[0], last + 1, layout.pp), kinds, strict=True):
            ends = number == 0, number == last
            if weights:
                stages.append(self._loaded_bytes(layout, index, number, of_stage, ends, weights))
            else:
                stages.append(self._stage_bytes(layout, index, number, of_stage, ends))
        boundary = self._model(layout, index, ranks[0]).boundary
        return peaks_of(*of_schedule, ranks).bytes(stages, boundary)

    def _stage_bytes(
        self,
        layout: Layout,
        index: int,
        number: int,
        kinds: tuple[int, ...],
        ends: tuple[bool, bool],
    ) -> StageBytes:
        model = self._model(layout, index, number)
        key = id(model), kinds, ends
        if key not in self._stages:
            self._stages[key] = bytes_of_stage(model.stage(kinds, *ends))
        return self._stages[key]

    def _weights_of(self, layout: Layout, rank: int) -> dict[int, float]:
        """Return a dict from each MoE layer of a pipeline rank to the result of `concentration` for
        the ep rank with the largest load. Return an empty dict if the memory does not depend on
        loads."""
        config, mesh = self._config, layout.mesh
        if self._loads is None or not depends_on_load(config, mesh, "cuda"):
            return {}
        key = layout.ep, layout.pp, layout.virtual_stages, rank
        if key not in self._weights:
            loads = self._loads.at(layout.ep)["worst"].imbalances
            stages = self._checks.stages(layout)[rank :: layout.pp]
            layers = [layer for stage in stages for layer in stage if layer in loads]
            ep = max(range(layout.ep), key=lambda ep: sum(loads[layer][ep] for layer in layers))
            self._weights[key] = {
                layer: concentration(config, mesh, layer, loads[layer][ep], "cuda")
                for layer in layers
            }
        return self._weights[key]

    def _loaded_bytes(
        self,
        layout: Layout,
        index: int,
        number: int,
        kinds: tuple[int, ...],
        ends: tuple[bool, bool],
        weights: Mapping[int, float],
    ) -> StageBytes:
        """Return the bytes of a stage whose layers have the loads of `_weights_of`."""
        layers = self._checks.stages(layout)[number]
        balanced, concentrated = (
            self._model(layout, index, number, is_concentrated).stage(kinds, *ends)
            for is_concentrated in (False, True)
        )
        of_segment = {n + ends[0]: weights.get(layer, 0.0) for n, layer in enumerate(layers)}
        return bytes_of_stage(interpolate(balanced, concentrated, of_segment, len(layers)))

    def _model(
        self, layout: Layout, index: int, stage: int, concentrated: bool = False
    ) -> ModelProfile:
        """Return the profiles of the segments of a stage. `index` is an index in `_coordinates`,
        and `concentrated` is as for `profile_model`."""
        divides = layout.schedule == "zb-h1"
        if self._config.optim.frozen:  # frozen segments differ by stage
            stages = self._checks.stages(layout)
            of_stage = stages[stage], stage == 0, stage == len(stages) - 1
            tp = self._coordinates(layout)[index]
            return profile_model(
                layout.apply(self._config),
                layout.mesh,
                Coordinate(0, 0, 0, tp),
                *of_stage,
                divides,
                self._profiled,
                concentrated=concentrated,
            )
        settings = layout.ep, layout.tp, layout.microbatch_size, layout.recompute
        key = *settings, divides, concentrated
        if key not in self._models:
            config = layout.apply(self._config)
            whole = range(config.model.num_layers), True, True
            self._models[key] = [
                profile_model(
                    config,
                    layout.mesh,
                    Coordinate(0, 0, 0, tp),
                    *whole,
                    divides,
                    self._profiled,
                    concentrated=concentrated,
                )
                for tp in self._coordinates(layout)
            ]
        return self._models[key][index]

    def _input_bytes(self, microbatch_size: int, microbatches: int) -> int:
        key = microbatch_size, microbatches
        if key not in self._inputs:
            train = self._config.train.model_copy(update={"microbatch_size": microbatch_size})
            config = self._config.model_copy(update={"train": train})
            self._inputs[key] = input_bytes(config, microbatches)
        return self._inputs[key]


def _different_shares(size: int, count: int) -> list[int]:
    """Divide `size` elements over `count` ranks. Return the index of a rank for each different
    number of elements that ranks get."""
    lengths: dict[int, int] = {}
    for index in {0, count - 1} if size % count else {0}:
        start, stop = share(size, index, count)
        lengths.setdefault(stop - start, index)
    return list(lengths.values())
