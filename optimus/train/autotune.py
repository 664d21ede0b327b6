"""Choices that ranks measure at the start of a run: kernels, grouped GEMM and expert dispatch.

Reduction orders differ between backends and between the forms of the grouped GEMM: torch's op or a
loop over experts. Ranks with different choices would diverge without an error, so all ranks compare
their choices before the first step, and the run fails if the choices differ.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from optimus import platform
from optimus.checkpoint.manifest import Manifest
from optimus.chunks.engine import ChunkEngine
from optimus.config import Config, ModelConfig
from optimus.config.sections import ParallelConfig, TrainConfig
from optimus.distributed.collectives import all_gather_objects, broadcast_object
from optimus.distributed.groups import Groups
from optimus.distributed.world import World
from optimus.errors import ConfigError, counted, one_line
from optimus.model.moe import Experts
from optimus.model.transformer import Transformer
from optimus.parallel.dispatch_timing import time_dispatchers
from optimus.parallel.expert import dispatched_experts, use_dispatcher
from optimus.parallel.placement import share
from optimus.parallel.recompute import measure_recompute
from optimus.platform import dtype_of
from optimus_kernels import backend
from optimus_kernels.backend import Backend
from optimus_kernels.cache import KernelError
from optimus_kernels.grouped_mm import form as current_form
from optimus_kernels.grouped_mm import set_form

logger = logging.getLogger(__name__)

_FORM, _DISPATCH = "kernels.grouped_gemm", "parallel.ep_dispatch"
_TIMED_RUNS = 3
_MEASURED_TOKENS = 4096
"""Enough tokens to fill a device; more would only take longer."""
_AS_STORED = "as in the checkpoint"
MEASURED = "measured at start"
"""Value of a setting that ranks have yet to measure."""


class KernelChoices(NamedTuple):
    """Values of `[kernels]` that all ranks use; as configured if the model uses no kernels."""

    backend: str
    grouped_gemm: str


@dataclass(frozen=True)
class MeasuredChoices:
    """Values that all ranks use for the settings that `"auto"` leaves to the start of a run."""

    kernels: KernelChoices
    ep_dispatch: str
    from_checkpoint: tuple[str, ...] = ()
    """Settings that have the checkpoint's value: the run does not measure them again, unless its
    devices do not support that value."""

    def as_settings(self) -> dict[str, str]:
        """Return the choices as "section.key": value."""
        kernels = {f"kernels.{key}": value for key, value in self.kernels._asdict().items()}
        return kernels | {_DISPATCH: self.ep_dispatch}

    def record_in(self, config: Config) -> Config:
        """Return `config` with these choices: a run writes it to config.toml and checkpoints."""
        kernels = config.kernels.model_copy(update=self.kernels._asdict())
        parallel = config.parallel.model_copy(update={"ep_dispatch": self.ep_dispatch})
        return config.model_copy(update={"kernels": kernels, "parallel": parallel})


def choices_before_start(config: Config, checkpoint: Manifest | None) -> MeasuredChoices:
    """Return the choices that the configuration, the environment and the checkpoint determine,
    MEASURED for those that ranks make.

    Args:
        config: The run's configuration.
        checkpoint: The full checkpoint that the run resumes; None for another start.

    Raises:
        ConfigError: OPTIMUS_KERNELS has an unknown value.
    """
    train, parallel = config.train, config.parallel
    sparse = any(config.model.experts_by_layer)
    stored = checkpoint.settings if checkpoint is not None else {}
    from_checkpoint = []
    request = _request(config)
    if request.failure:
        raise ConfigError(request.failure)
    name = request.name
    if name == "auto":
        name = MEASURED if sparse else config.kernels.backend
    form: str = config.kernels.grouped_gemm
    if sparse:
        form = _form_before_start(config, stored)
        if form != _form_setting(config):
            from_checkpoint.append(_FORM)
        form = MEASURED if form == "auto" else form
    ep_dispatch: str = parallel.ep_dispatch
    if parallel.ep > 1 and ep_dispatch == "auto":
        recorded = _recorded_dispatch(parallel, train, stored)
        choice = choose_dispatch(train.device, train.deterministic, recorded)
        ep_dispatch = MEASURED if choice is None else choice.name
        if choice is not None and choice.reason == _AS_STORED:
            from_checkpoint.append(_DISPATCH)
    return MeasuredChoices(KernelChoices(name, form), ep_dispatch, tuple(from_checkpoint))


def autotune_kernels(config: Config, world: World, checkpoint: Manifest | None) -> KernelChoices:
    """Choose and install the kernel backend and the form of the grouped GEMM on all ranks.

    A collective of all ranks. Chooses nothing for a model without experts, unless a rank's
    configuration or environment names a backend. Logs the choices, and each choice that differs
    from the checkpoint's.

    Args:
        config: The run's configuration.
        world: All ranks.
        checkpoint: The full checkpoint that the run resumes; None for another start. If
            `kernels.grouped_gemm` is "auto", the run keeps the checkpoint's form, provided that
            the device supports it.

    Raises:
        ConfigError: A choice given by name is unavailable on some rank, or ranks differ. Raised on
            every rank.
    """
    sparse = any(config.model.experts_by_layer)
    request = _request(config)  # environments may differ
    requests = all_gather_objects(request, world.everyone, Answer)
    if problem := _failure(requests):
        raise ConfigError(problem)
    if not sparse and all(request.name == "auto" for request in requests):
        return KernelChoices(config.kernels.backend, config.kernels.grouped_gemm)
    stored = checkpoint.settings if checkpoint is not None else {}
    name = _agree_on_backend(world).name
    form = _agree_on_form(config, world, stored) if sparse else config.kernels.grouped_gemm
    choices = KernelChoices(name, form)
    logger.info("kernels: %s%s", name, f", grouped products: {form}" if sparse else "")
    for key, value in choices._asdict().items():
        before = stored.get(f"kernels.{key}", value)
        if checkpoint is not None and before != value:
            logger.info(
                "changed on resume: kernels.%s = %r (checkpoint of step %d: %r)",
                key,
                value,
                checkpoint.step,
                before,
            )
    return choices


def _agree_on_backend(world: World) -> Backend:
    """Install the same backend on all ranks. Up to MAX_BUILDING_WORLD ranks, the first rank of each
    machine compiles missing kernels, while the other ranks wait in a collective, for at most
    parallel.timeout_s."""
    kind, builds = world.device.type, world.launch.local_rank == 0
    chosen, answer = Backend("torch"), Answer()
    if builds:
        chosen, answer = _find(kind, world.size <= backend.MAX_BUILDING_WORLD)
    key = all_gather_objects(answer.key, world.everyone, str)[0]
    if not builds:
        chosen, answer = _find(kind, False, key)
    answers = all_gather_objects(answer, world.everyone, Answer)
    if problem := disagreement(answers):
        raise ConfigError(problem)
    if chosen.why_not:
        logger.info("plain torch on %s, since %s", kind, chosen.why_not)
    backend.use(kind, chosen)
    return chosen


class Answer(NamedTuple):
    """The backend that one rank has chosen."""

    name: str = ""
    key: str = ""
    why_not: str = ""
    """With "auto": the reason why the device's backend is not used."""
    failure: str = ""
    """The reason why a backend chosen by name is unavailable."""


def _request(config: Config) -> Answer:
    """Return the backend that this rank's environment or configuration names, or "auto"; from now
    on ops use it."""
    try:
        backend.choose(config.kernels.backend)
        return Answer(backend.chosen()[0])
    except KernelError as error:
        return Answer(failure=str(error))


def _find(kind: str, may_build: bool, key: str = "") -> tuple[Backend, Answer]:
    try:
        chosen = backend.find(kind, may_build, key)
    except KernelError as error:
        return Backend("torch"), Answer(failure=str(error))
    return chosen, Answer(chosen.name, chosen.key, chosen.why_not)


def disagreement(answers: Sequence[Answer]) -> str:
    """Return one line that names the ranks whose backend is unavailable or differs from the other
    ranks'; "" if all ranks have the same backend."""
    if failure := _failure(answers):
        return failure
    by_choice = defaultdict(list)
    for rank, answer in enumerate(answers):
        by_choice[(answer.name, answer.key)].append(rank)
    if len(by_choice) == 1:
        return ""
    choices = [
        f"{key or name} on {_rank_ranges(ranks)}" for (name, key), ranks in by_choice.items()
    ]
    reason = next((f" ({answer.why_not})" for answer in answers if answer.why_not), "")
    return (
        f"ranks differ in their kernels: {', '.join(choices)}{reason}; give all machines one "
        "OPTIMUS_KERNELS_CACHE with what `optimus kernels build` made, or set kernels.backend=torch"
    )


def _failure(answers: Sequence[Answer]) -> str:
    """Return the numbers of all ranks that failed and the first one's failure; "" if none did."""
    failed = [rank for rank, answer in enumerate(answers) if answer.failure]
    where = f"{_rank_ranges(failed)}: " if failed and len(answers) > 1 else ""
    return where + answers[failed[0]].failure if failed else ""


def _rank_ranges(ranks: Sequence[int]) -> str:
    """Return `rank 3` or `ranks 0-7, 9`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _form_setting(config: Config) -> str:
    """Return the form of the grouped GEMM that the configuration determines, or "auto"."""
    sparse = any(config.model.experts_by_layer)
    return "loop" if sparse and config.train.deterministic else config.kernels.grouped_gemm


def _form_before_start(config: Config, stored: Mapping[str, Any]) -> str:
    """Return the form of the grouped GEMM that the configuration, else the checkpoint's settings
    `stored` determine, or "auto"."""
    form = _form_setting(config)
    return stored.get(_FORM, "auto") if form == "auto" else form


def _agree_on_form(config: Config, world: World, stored: Mapping[str, Any]) -> str:
    """Install one form of the grouped GEMM on all ranks: the configured form, else the checkpoint's
    form, else the form that is faster in a measurement on the first rank."""
    requested = all_gather_objects(config.kernels.grouped_gemm, world.everyone, str)
    others = [rank for rank, form in enumerate(requested) if form != requested[0]]
    if others:
        raise ConfigError(
            f"kernels.grouped_gemm = {requested[0]!r} on rank 0 and {requested[others[0]]!r} on "
            f"{_rank_ranges(others)}; give all ranks one configuration",
        )
    model, dtype, tp = config.model, dtype_of(config.train.dtype), config.parallel.tp
    like = torch.empty(0, dtype=dtype, device=world.device)
    form = _form_before_start(config, stored)
    # A checkpoint written on another machine may record a form that this device lacks.
    if _form_setting(config) == "auto" and _unavailable(form, model, tp, like):
        form = "auto"
    if form == "auto":
        tokens = config.train.microbatch_size * config.train.seq_len
        fastest = measure_grouped_gemm(model, tp, tokens, like) if world.is_first else ""
        form = broadcast_object(fastest, world.everyone, str)
    if problem := _unavailable(form, model, tp, like):
        raise ConfigError(f"kernels.{problem}")
    set_form(form)
    return form


def _unavailable(form: str, model: ModelConfig, tp: int, like: torch.Tensor) -> str:
    """Return the reason why a form does not support the model's sizes with the dtype and device of
    `like`; "" if it does."""
    try:
        set_form(form)
        current_form(like, model.hidden_size, *_inner_sizes(model, tp))
    except ValueError as error:
        return str(error)
    finally:
        set_form("auto")
    return ""


def _inner_sizes(model: ModelConfig, tp: int) -> list[int]:
    """Return the distinct sizes of the slices into which tensor parallelism divides an expert's
    intermediate dim."""
    ranges = (share(model.intermediate_size, index, tp) for index in range(tp))
    return sorted({stop - start for start, stop in ranges})


def measure_grouped_gemm(model: ModelConfig, tp: int, tokens: int, like: torch.Tensor) -> str:
    """Return the faster form of the grouped GEMM, "torch" or "loop", and log the times.

    Measures forward and backward of the layer with the most experts, with the largest slice that a
    tensor-parallel rank has of each expert. Routes give every expert the same number of tokens. The
    caller has set the number of threads. A form that does not support the device, dtype or sizes is
    left out.

    Args:
        model: The model's sizes.
        tp: Size of tensor parallelism.
        tokens: Tokens of a microbatch; at most 4096 are measured.
        like: A tensor with dtype and device of the run.
    """
    layer = model.layer(model.experts_by_layer.index(max(model.experts_by_layer)))
    layer = layer.model_copy(update={"intermediate_size": _inner_sizes(model, tp)[-1]})
    tokens = min(tokens, _MEASURED_TOKENS)
    run = _make_experts_pass(layer, tokens, like)
    seconds = {}
    try:
        for form in ("torch", "loop"):
            set_form(form)
            try:
                run()  # the first run may compile or tune a kernel
                seconds[form] = platform.best_of(_TIMED_RUNS, run, like.device)
            except ValueError as error:
                logger.info(one_line(error))
    finally:
        set_form("auto")
    times = ", ".join(f"{form} {1e3 * value:.2f} ms" for form, value in seconds.items())
    logger.info(
        "grouped products of %s, %s: %s",
        counted(layer.experts, "expert"),
        counted(tokens, "token"),
        times,
    )
    return min(seconds, key=seconds.__getitem__)


def _make_experts_pass(layer: ModelConfig, tokens: int, like: torch.Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward of one layer's experts, where each expert
    has the same number of rows."""
    with like.device:
        experts = Experts(layer).to(like.dtype)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        x = torch.randn(tokens, layer.hidden_size).to(like.dtype).requires_grad_()
        top_k = layer.num_experts_per_tok
        weights = torch.full((tokens, top_k), 1 / top_k).to(like.dtype).requires_grad_()
        slots = torch.arange(tokens * top_k).view(tokens, top_k)
    leaves = [x, weights, *experts.parameters()]

    def run() -> None:
        out = experts(x, weights, slots % layer.experts)
        # The output is summed because autograd, given the gradient of a larger output, imports
        # sympy (0.3 s) to compare two shapes.
        torch.autograd.grad(out.square().sum(), leaves)

    return run


class DispatchChoice(NamedTuple):
    """The dispatcher of expert parallelism, and the reason for its choice."""

    name: str
    reason: str
    """Empty if there was no choice: the setting names the dispatcher, or ep is 1."""

    def __str__(self) -> str:
        return f"{_DISPATCH}: {self.name} ({self.reason})"


def autotune_dispatch(
    config: Config,
    groups: Groups,
    model: Transformer,
    states: ChunkEngine,
    checkpoint: Manifest | None,
) -> DispatchChoice:
    """Choose the dispatcher if `parallel.ep_dispatch` is "auto", and install it in the model.

    Times the dispatchers only if `choose_dispatch` returns None. A collective of all ranks, which
    all return the same choice.

    Args:
        config: The run's configuration.
        groups: This rank's groups.
        model: This rank's local model, on its device.
        states: The states of `model`; before a measurement they fill the experts' parameters.
        checkpoint: The full checkpoint that the run resumes; None for another start.
    """
    train, ep_dispatch = config.train, config.parallel.ep_dispatch
    if groups.mesh.ep == 1 or ep_dispatch != "auto":
        return DispatchChoice(ep_dispatch, "")
    device_type = next(model.parameters()).device.type
    stored = checkpoint.settings if checkpoint is not None else {}
    recorded = _recorded_dispatch(config.parallel, train, stored)
    choice = choose_dispatch(device_type, train.deterministic, recorded)
    if choice is None:
        experts = {id(p) for layer in dispatched_experts(model)[:1] for p in layer.parameters()}
        states.gather([name for name, p in model.named_parameters() if id(p) in experts])
        seconds = time_dispatchers(
            model,
            (train.microbatch_size * train.seq_len, config.model.hidden_size),
            config.model.num_experts_per_tok,
            dtype_of(train.dtype),
            groups.everyone,
            seed=groups.data.rank,
        )
        times = ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in seconds.items())
        choice = DispatchChoice(
            min(seconds, key=lambda name: seconds[name]),
            f"{times} for a layer, forward and backward, on the slowest rank",
        )
    use_dispatcher(model, choice.name)
    return choice


def _recorded_dispatch(
    parallel: ParallelConfig, train: TrainConfig, stored: Mapping[str, Any]
) -> str:
    """Return the dispatcher that a checkpoint's settings record; "auto" if they record none, or
    recorded it for another layout."""
    layout = {
        "parallel.ep": parallel.ep,
        "parallel.tp": parallel.tp,
        "train.microbatch_size": train.microbatch_size,
        "train.deterministic": train.deterministic,
    }
    same = all(stored.get(key) == value for key, value in layout.items())
    return stored.get(_DISPATCH, "auto") if same else "auto"


def choose_dispatch(device_type: str, deterministic: bool, recorded: str) -> DispatchChoice | None:
    """Return the dispatcher that "auto" selects without a measurement; None if one is necessary.

    Args:
        device_type: As in `torch.device.type`.
        deterministic: `train.deterministic`.
        recorded: The dispatcher that the checkpoint recorded for the same layout; "auto" if none.
    """
    if deterministic:
        return DispatchChoice("allgather", "train.deterministic takes it")
    if device_type == "xpu":
        # With xccl on 2 nodes, all_to_all_single under expert parallelism ended the process (in
        # ur_die) without a Python exception. A measurement would therefore end the run at its
        # start, and again each time that it is resumed.
        also = ", though the checkpoint has alltoall" if recorded == "alltoall" else ""
        return DispatchChoice(
            "allgather",
            f"not measured on Intel GPUs{also}: all-to-all is known to kill the process there; "
            f"set {_DISPATCH} = 'alltoall' to use it all the same",
        )
    return None if recorded == "auto" else DispatchChoice(recorded, _AS_STORED)


def recompute_report(config: Config, groups: Groups, model: Transformer) -> str:
    """Return a log line with the memory that recomputation saves and the time that it costs on this
    rank; "" if `recompute.modules` is empty. A collective of the ranks that share layers."""
    modules, train = config.recompute.modules, config.train
    if not modules:
        return ""
    shares = groups.mesh.tp if config.parallel.sequence_parallel else 1
    shape = (train.microbatch_size, train.seq_len // shares, config.model.hidden_size)
    cost = measure_recompute(model, shape, dtype_of(train.dtype), seed=groups.data.rank)
    layers = counted(len(model.blocks), "layer")
    return f"recompute of {', '.join(modules)}: {cost}; a microbatch in {layers} of rank 0"
