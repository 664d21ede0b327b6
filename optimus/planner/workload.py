"""The operations, collectives and bytes of a training step, for `optimus.planner.step_time`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from optimus.config import Config, ModelConfig
from optimus.config.axes import Axes
from optimus.config.hardware import BYTES
from optimus.distributed.mesh import Mesh
from optimus.errors import ConfigError, refuse_if
from optimus.parallel.expert_load import arrivals
from optimus.parallel.pipeline.plan import plan_stages
from optimus.planner.machine_rates import UpdateBytes
from optimus.planner.state_traffic import ENDS, StateTraffic
from optimus.planner.step_time import Groups, Layers, Step
from optimus.planner.topology import Topology, placed_groups
from optimus.rank.operations import Exchange, ModelWork, Operation, SegmentWork

_STATE_BYTES = 24
"""Bytes that AdamW reads and writes for the fp32 master and the moments of a parameter."""

Works = dict[bool, ModelWork]
"""A dict from values of the argument `concentrated` of `profile_work` to its results."""


class Weights(NamedTuple):
    """Number of parameters that a rank has in all of its stages."""

    experts: float
    """Parameters of experts. ep divides the experts over ranks."""
    others: float
    """All other parameters."""


def step_of(
    config: Config,
    mesh: Mesh,
    stages: tuple[range, ...] | None = None,
    on_cpu: bool = False,
    works: Works | None = None,
    imbalances: Mapping[int, float] | None = None,
    segments: Segments | None = None,
    traffic: StateTraffic | None = None,
    topology: Topology | None = None,
) -> Step:
    """Return the operations, collectives and bytes of a step on the ranks of `mesh`.

    Args:
        config: The run.
        mesh: Sizes of the axes.
        stages: Layers of each pipeline stage; None for the stages of the configuration.
        on_cpu: True for a run on a CPU.
        works: Known results of `profile_work`, to which this function adds the results that it
            computes.
        imbalances: For each MoE layer, the largest number of rows that the experts of an ep rank
            compute, divided by the mean over the ep ranks; None for uniform routing to experts.
        segments: The result of `segment_layers`, if it is known. `on_cpu`, `works` and `imbalances`
            then have no effect.
        traffic: Object that counts the collectives of gradients and parameters. Its configuration
            must be equal to `config` except in the section `[parallel]`. None to create the object.
        topology: The order of the hosts. None: consecutive hosts fill one group of nodes after the
            other, and the process groups of the first rank represent all process groups.

    Raises:
        ConfigError: train.seq_len is not set, the global batch is not a multiple of the tokens of
            a microbatch on all data ranks, or the run offloads states.
    """
    model, parallel, train = config.model, config.parallel, config.train
    _refuse_not_modelled(config)
    if not train.seq_len:
        raise ConfigError("train.seq_len = 0: set it, so that the time of a step can be planned")
    tokens, e = train.microbatch_size * train.seq_len, BYTES[train.dtype]
    microbatches = microbatches_of(config, mesh)
    stages = plan_stages(config, mesh.pp) if stages is None else stages
    if segments is None:
        segments = segment_layers(config, mesh, on_cpu, works, imbalances)
    layers = [[*_counted(segments, stage)] for stage in stages]
    layers[0] += segments[0]
    layers[-1] += segments[-1]
    pp, fullest = fullest_rank(config, mesh, stages)
    traffic = StateTraffic(config) if traffic is None else traffic
    sequence_shares = mesh.tp if parallel.sequence_parallel else 1
    return Step(
        stages=tuple(map(tuple, layers)),
        microbatches=microbatches,
        groups=groups_of(mesh, topology),
        dtype=train.dtype,
        schedule=parallel.schedule,
        virtual_stages=parallel.virtual_stages,
        transfer_bytes=e * tokens * model.hidden_size / sequence_shares,
        reductions=traffic.of_rank(config, mesh, stages, pp, microbatches),
        update=update_bytes(config, mesh, fullest, microbatches),
    )


@lru_cache(maxsize=1 << 6)
def groups_of(mesh: Mesh, topology: Topology | None = None) -> Groups:
    """Return a dict from the names of axes to process groups. If `topology` has the groups of the
    hosts, the result is that of `placed_groups`. Otherwise, the process groups of the first rank
    represent all process groups."""
    axes: tuple[Axes, ...] = ("pp",), ("tp",), ("ep",), ("dp",), ("dp", "ep")
    positions = None if topology is None else topology.positions()
    groups: dict[str, Sequence[tuple[int, ...]]]
    if topology is None or positions is None:
        groups = {" x ".join(names): (mesh.group_of(0, names),) for names in axes}
    else:
        groups = placed_groups(mesh, topology, positions, axes)
    return groups | {ENDS: tuple((ranks[0], ranks[-1]) for ranks in groups["pp"])}


Segments = Sequence[Sequence[Layers]]
"""Result of `segment_layers`."""


def segment_layers(
    config: Config,
    mesh: Mesh,
    on_cpu: bool = False,
    works: Works | None = None,
    imbalances: Mapping[int, float] | None = None,
) -> Segments:
    """Return the operations of the embedding, of each layer and of the head for one microbatch. The
    operations of a layer are those of the ep rank whose experts compute the most rows in this
    layer.

    Each element of the result is a sequence of `Layers`. With equal loads of the experts, the
    sequence has a single element. Otherwise, the sequence has an element for each of the two
    profiles between which `_unbalanced` interpolates. Equal layers share an object. In `mesh`, only
    the sizes of ep and tp have an effect. The arguments are those of `step_of`.
    """
    works, is_unbalanced = {} if works is None else works, mesh.ep > 1 and bool(imbalances)
    for concentrated in (False, True) if is_unbalanced else (False,):
        if concentrated not in works:
            from optimus.rank.profile import profile_work  # imports torch

            works[concentrated] = profile_work(config, mesh, on_cpu, concentrated)
    work = works[False]
    if imbalances and is_unbalanced:
        layers = _unbalanced(config, mesh, works, imbalances)
    else:
        of_block = {id(block): (_layers(block, 1.0),) for block in work.blocks}
        layers = [of_block[id(block)] for block in work.blocks]
    return [(_layers(work.embedding, 1.0),), *layers, (_layers(work.head, 1.0),)]


def _counted(segments: Segments, stage: range) -> Iterator[Layers]:
    """Yield the operations of each different layer of a stage. `Layers.number` is the number of
    equal layers."""
    of_stage = segments[1 + stage.start : 1 + stage.stop]
    numbers = Counter(map(id, of_stage))
    for layers in of_stage:
        if number := numbers.pop(id(layers), 0):
            yield from (each._replace(number=number * each.number) for each in layers)


def _unbalanced(
    config: Config, mesh: Mesh, works: Works, imbalances: Mapping[int, float]
) -> list[tuple[Layers, ...]]:
    """Return the operations of each layer on the ep rank whose experts compute the most rows in
    this layer.

    The time of a layer is interpolated between two profiles: in the first, all ep ranks have equal
    loads, and in the second, all tokens choose experts of the rank. With the dispatcher `alltoall`,
    the bytes of the collectives over ep are proportional to the number of tokens that the rank
    receives. The arguments are those of `step_of`.
    """
    model = config.model
    result = []
    for layer in range(model.num_layers):
        layers = []
        imbalance = imbalances.get(layer, 1.0)
        kind = model.experts_by_layer[layer], model.num_experts_per_tok, mesh.ep
        longer = arrivals(*kind, imbalance) / arrivals(*kind) if kind[0] else 1.0
        weight = (imbalance - 1) / (mesh.ep - 1)
        for concentrated, number in ((False, 1 - weight), (True, weight)):
            block, equal = works[concentrated].blocks[layer], works[False].blocks[layer]
            segment = SegmentWork(
                _with_exchanges(block.forward, equal.forward, longer),
                _with_exchanges(block.backward, equal.backward, longer),
                block.input_backward
                and _with_exchanges(block.input_backward, equal.input_backward or (), longer),
            )
            layers.append(_layers(segment, number))
        result.append(tuple(layers))
    return result


def _with_exchanges(
    operations: tuple[Operation, ...], balanced: tuple[Operation, ...], longer: float
) -> tuple[Operation, ...]:
    """Return the operations in `operations` that are not collectives, followed by the collectives
    in `balanced`. The bytes of each all_to_all over ep are multiplied by `longer`."""
    exchanges = (
        op._replace(num_bytes=op.num_bytes * longer)
        if (op.axis, op.name) == ("ep", "all_to_all")
        else op
        for op in balanced
        if isinstance(op, Exchange)
    )
    return (*(op for op in operations if not isinstance(op, Exchange)), *exchanges)


def _layers(work: SegmentWork, number: float) -> Layers:
    return Layers(work.forward, work.backward, number, work.input_backward)


def _first_layers(model: ModelConfig) -> dict[int, int]:
    """Return a dict from each number of experts that occurs in a layer to the index of the first
    layer with this number."""
    layers: dict[int, int] = {}
    for layer, experts in enumerate(model.experts_by_layer):
        layers.setdefault(experts, layer)
    return layers


def _kinds(model: ModelConfig, stage: range) -> Counter[int]:
    """Return a dict from each number of experts to the number of layers of a stage that have this
    number of experts."""
    experts_by_layer = model.experts_by_layer
    return Counter(experts_by_layer[layer] for layer in stage)


def microbatches_of(config: Config, mesh: Mesh) -> int:
    """Return the number of microbatches of a rank in a step. Raises ConfigError as `step_of`."""
    train, batch = config.train, config.train.global_batch_tokens
    together = train.microbatch_size * train.seq_len * mesh.num_data_ranks
    if batch % together:
        raise ConfigError(
            f"train.global_batch_tokens = {batch} must be a multiple of {together}, the tokens of "
            "a microbatch on all data ranks; change the batch, train.microbatch_size or the ranks"
        )
    return max(1, batch // together)


def stage_weights(
    config: Config, mesh: Mesh, stages: tuple[range, ...] | None = None
) -> list[Weights]:
    """Return, for each index along pp, the numbers of parameters of a single rank with this index.
    The arguments are those of `step_of`."""
    model = config.model
    stages = plan_stages(config, mesh.pp) if stages is None else stages
    parameters = {
        experts: _parameters(model, layer) for experts, layer in _first_layers(model).items()
    }
    weights = []
    for stage in stages:
        kinds = _kinds(model, stage).items()
        of_experts = sum(number * parameters[kind][0] for kind, number in kinds)
        others = sum(number * parameters[kind][1] for kind, number in kinds)
        weights.append(Weights(of_experts / mesh.ep / mesh.tp, others / mesh.tp))
    tables = [0] if model.tie_embeddings and mesh.pp == 1 else [0, -1]
    for number in tables:  # the first stage has the embedding, the last the head
        table = model.vocab_size * model.hidden_size / mesh.tp
        weights[number] = weights[number]._replace(others=weights[number].others + table)
    return [Weights(*map(sum, zip(*weights[r :: mesh.pp], strict=True))) for r in range(mesh.pp)]


def _parameters(model: ModelConfig, layer: int) -> tuple[int, int]:
    """Return the number of parameters of the experts of a layer, and the number of its other
    parameters."""
    hidden, experts = model.hidden_size, model.experts_by_layer[layer]
    heads = model.num_attention_heads + model.num_kv_heads
    feed_forward = 3 * hidden * model.layer(layer).intermediate_size
    others = 2 * hidden * heads * model.head_size + 2 * hidden
    if experts:
        return experts * feed_forward, others + hidden * experts
    return 0, others + feed_forward


def largest_segment(config: Config, mesh: Mesh, stages: tuple[range, ...], pp: int) -> float:
    """Return the size of the largest segment (layer, embedding or head) of the pipeline rank `pp`:
    the number of parameters of the segment that a single rank has."""
    model = config.model
    kinds = {kind for stage in stages[pp :: mesh.pp] for kind in _kinds(model, stage)}
    layers = (_parameters(model, layer) for e, layer in _first_layers(model).items() if e in kinds)
    sizes = [experts / mesh.ep + others for experts, others in layers]
    if pp in (0, mesh.pp - 1):
        sizes.append(model.vocab_size * model.hidden_size)
    return max(sizes) / mesh.tp


def fullest_rank(config: Config, mesh: Mesh, stages: tuple[range, ...]) -> tuple[int, Weights]:
    """Return the index of the pipeline rank with the most parameters, and the numbers of its
    parameters."""
    weights = stage_weights(config, mesh, stages)
    fullest = max(range(mesh.pp), key=lambda pp: sum(weights[pp]))
    return fullest, weights[fullest]


def updated_parameters(sharding: str, mesh: Mesh, weights: Weights) -> float:
    """Return the number of parameters whose states a rank updates, for `optim.sharding`."""
    if sharding == "none":
        return weights.experts + weights.others
    divided = mesh.dp * (mesh.ep if sharding == "epso" else 1)
    return weights.experts / mesh.dp + weights.others / divided


def update_bytes(config: Config, mesh: Mesh, weights: Weights, microbatches: int) -> UpdateBytes:
    """Return the bytes that an update transfers on a rank with the numbers of parameters
    `weights`."""
    optim, param_bytes = config.optim, BYTES[config.train.dtype]
    grad_bytes, reduced_bytes = BYTES[optim.grad_dtype], BYTES[optim.grad_reduce_dtype]
    updated, of_rank = updated_parameters(optim.sharding, mesh, weights), sum(weights)
    passes, new = _gradient_passes(config, mesh, microbatches, _reduces_each(config, mesh)), 0
    if _frees_gradients(config, mesh):
        # Gradients once for each reduction, and parameters once in a step
        reductions = microbatches if _reduces_each(config, mesh) else 1
        new = reductions * grad_bytes + (param_bytes if optim.resident == "cache" else 0)
    return UpdateBytes(
        updated * (_STATE_BYTES + param_bytes + reduced_bytes),
        updated * reduced_bytes,
        of_rank * grad_bytes * passes,
        float(of_rank * new),
    )


def _frees_gradients(config: Config, mesh: Mesh) -> bool:
    """Return True if a rank frees its gradients after each reduction, without offloading."""
    return config.optim.resident != "all" and mesh.num_data_ranks > 1


def _reduces_each(config: Config, mesh: Mesh) -> bool:
    """Return True if gradients are reduced in each microbatch, without offloading."""
    if config.offload.order == "layer":
        return config.train.deterministic and mesh.num_data_ranks > 1
    is_rounded = config.offload.rounds_gradients(config.train)
    return config.train.deterministic or config.optim.resident != "all" or is_rounded


def _gradient_passes(
    config: Config, mesh: Mesh, microbatches: int, reduces_each: bool, on_host: bool = False
) -> int:
    """Return the number of passes over the gradients in a step. Before each reduction, a pass
    checks the gradients. Other passes set gradients to zero. A single data rank adds up the
    gradients of all microbatches in the same buffers, so that it sets them to zero only once. This
    does not apply to gradients that are rounded, or whose states are `on_host`."""
    reductions = microbatches if reduces_each else 1
    is_rounded = config.offload.rounds_gradients(config.train)
    sums_elsewhere = on_host or is_rounded or mesh.num_data_ranks > 1
    return reductions + (reductions if sums_elsewhere else 1)


def offloaded_repeats(config: Config, mesh: Mesh, microbatches: int) -> tuple[float, float]:
    """Return the values of `on_device` and `on_host` for `UpdateBytes.share`. Gradients are reduced
    in each microbatch, unless all microbatches pass a layer before the next layer starts."""
    plain = _reduces_each(config, mesh)
    each = plain or config.offload.order != "layer"
    before = _gradient_passes(config, mesh, microbatches, plain)
    on_device = _gradient_passes(config, mesh, microbatches, each)
    on_host = _gradient_passes(config, mesh, microbatches, each, on_host=True)
    return on_device / before, on_host / before


def _refuse_not_modelled(config: Config) -> None:
    """Raise ConfigError if the run offloads model states."""
    offload = config.offload
    refuse_if(
        offload.mode != "off",
        f"offload.mode = {offload.mode!r}: the time of a step with offloading is not planned; set "
        'offload.mode = "off" to plan the time without offloading',
    )
