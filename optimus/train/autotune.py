"""Start-up steps of a run that need the device: the check of fp16 operations, and the choices of
kernel backend, grouped GEMM and expert dispatcher.

The grouped GEMM has two implementations, called forms: "torch" is torch's grouped GEMM, and "loop"
is a loop over the experts. Two backends or forms can add numbers in different orders, so that the
last bits of their results differ. A run therefore fails at its start if its ranks select different
backends or forms.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from optimus import platform
from optimus.checkpoint.format import Manifest
from optimus.chunks.engine import ChunkEngine
from optimus.config import Config, ModelConfig, ParallelConfig, TrainConfig
from optimus.distributed.collectives import all_gather_objects, broadcast_object
from optimus.distributed.groups import Groups
from optimus.distributed.world import World
from optimus.errors import ConfigError, counted, one_line
from optimus.model.init import initialise_
from optimus.model.moe import Experts
from optimus.model.transformer import Transformer
from optimus.parallel.dispatch_timing import time_dispatchers
from optimus.parallel.expert import dispatched_experts, use_dispatcher
from optimus.parallel.placement import share
from optimus.parallel.recompute import measure_recompute
from optimus.platform import dtype_of
from optimus_kernels import KernelError, backend, set_form
from optimus_kernels import form as current_form

logger = logging.getLogger(__name__)

_FORM, _DISPATCH = "kernels.grouped_gemm", "parallel.ep_dispatch"
_TIMED_RUNS = 3
_MEASURED_TOKENS = 4096
"""Maximum number of tokens with which `measure_grouped_gemm` times the grouped GEMM."""
_AS_STORED = "as in the checkpoint"
MEASURED = "measured at start"
"""Placeholder for the value of a setting that the ranks choose by a measurement when the run
starts."""


class KernelChoices(NamedTuple):
    """The values of the settings `kernels.backend` and `kernels.grouped_gemm` that a run uses. All
    ranks have the same values. If the model has no experts, a value can still be "auto"."""

    backend: str
    grouped_gemm: str


@dataclass(frozen=True)
class MeasuredChoices:
    """The values of `kernels.backend`, `kernels.grouped_gemm` and `parallel.ep_dispatch` with which
    a run replaces "auto" in the configuration when it starts."""

    kernels: KernelChoices
    ep_dispatch: str
    from_checkpoint: tuple[str, ...] = ()
    """Names of the settings, such as "kernels.grouped_gemm", whose values are taken from the
    checkpoint."""

    def as_settings(self) -> dict[str, str]:
        """Return a dict from the names of the settings, such as "kernels.backend", to the chosen
        values."""
        kernels = {f"kernels.{key}": value for key, value in self.kernels._asdict().items()}
        return kernels | {_DISPATCH: self.ep_dispatch}

    def record_in(self, config: Config) -> Config:
        """Return a copy of `config` with the chosen values, to write to config.toml and to
        checkpoints."""
        kernels = config.kernels.model_copy(update=self.kernels._asdict())
        parallel = config.parallel.model_copy(update={"ep_dispatch": self.ep_dispatch})
        return config.model_copy(update={"kernels": kernels, "parallel": parallel})


def choices_before_start(config: Config, checkpoint: Manifest | None) -> MeasuredChoices:
    """Return the kernel and dispatcher choices of a run without a measurement.

    A setting whose value must be chosen by a measurement gets the value MEASURED.

    Args:
        config: The run's configuration.
        checkpoint: The full checkpoint from which the run resumes, or None.

    Raises:
        ConfigError: The environment variable OPTIMUS_KERNELS has an unknown value.
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
    """Choose the kernel backend and the implementation of the grouped GEMM, and activate them.

    All ranks must call this function. Every rank makes the same choices. If the model has no
    experts and no rank selects a backend by name, return the configured values and activate nothing
    on the device. If the run offloads and the device is an accelerator, the kernels of the host's
    CPU are always activated.

    Args:
        config: The run's configuration.
        world: All ranks.
        checkpoint: The full checkpoint from which the run resumes, or None. For
            `kernels.grouped_gemm` = "auto", the run uses the value in this checkpoint if the device
            supports it.

    Raises:
        ConfigError: A backend or implementation that is selected by name is unavailable on some
            rank, or the choices of ranks differ. Raised on every rank.
    """
    sparse = any(config.model.experts_by_layer)
    request = _request(config)  # the environments of ranks may differ
    requests = all_gather_objects(request, world.everyone, Answer)
    if problem := _failure(requests):
        raise ConfigError(problem)
    if config.offload.mode != "off" and world.device.type != "cpu":
        _agree_on_backend(world, "cpu")  # the host's CPU updates chunks
    if not sparse and all(request.name == "auto" for request in requests):
        return KernelChoices(config.kernels.backend, config.kernels.grouped_gemm)
    stored = checkpoint.settings if checkpoint is not None else {}
    name = _agree_on_backend(world, world.device.type).name
    form = _agree_on_form(config, world, stored) if sparse else config.kernels.grouped_gemm
    choices = KernelChoices(name, form)
    logger.info("kernels: %s%s", name, f", grouped GEMM: {form}" if sparse else "")
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


def _agree_on_backend(world: World, kind: str) -> backend.Backend:
    """Activate the same kernel backend for the device type `kind` on all ranks and return it.
    Raises ConfigError if a rank cannot use any backend or if the backends of two ranks differ."""
    builds = world.launch.local_rank == 0
    # A setting such as `cuda` is for the accelerator. The host then uses the kernels of its CPU.
    is_host = kind != world.device.type
    name = "auto" if is_host and backend.chosen()[0] != "torch" else ""
    chosen, answer = backend.Backend("torch"), Answer()
    # The first rank of each machine may compile missing kernels; the others wait in the collective.
    if builds:
        chosen, answer = _find(kind, world.size <= backend.MAX_BUILDING_WORLD, name=name)
    key = all_gather_objects(answer.key, world.everyone, str)[0]
    if not builds:
        chosen, answer = _find(kind, False, key, name)
    answers = all_gather_objects(answer, world.everyone, Answer)
    if problem := disagreement(answers):
        raise ConfigError(problem)
    if chosen.why_not:
        logger.info("using plain torch on %s, since %s", kind, chosen.why_not)
    backend.use(kind, chosen)
    return chosen


class Answer(NamedTuple):
    """Message of one rank to all ranks: the kernel backend that the rank requests or has chosen, or
    an error message."""

    name: str = ""
    """Name of the backend."""
    key: str = ""
    """Key that identifies the compiled library of the backend; "" for plain torch."""
    why_not: str = ""
    """Reason why "auto" has selected plain torch instead of the compiled kernels of this rank's
    device, or ""."""
    failure: str = ""
    """Error message if the backend that the rank requests is unknown or unavailable, else ""."""


def _request(config: Config) -> Answer:
    """Return an Answer with the name of the backend that this rank requests, which may be "auto".
    If the requested backend is unknown, the Answer contains only an error message."""
    try:  # the environment variable OPTIMUS_KERNELS has priority over the configuration
        backend.choose(config.kernels.backend)
        return Answer(backend.chosen()[0])
    except KernelError as error:
        return Answer(failure=str(error))


def _find(
    kind: str, may_build: bool, key: str = "", name: str = ""
) -> tuple[backend.Backend, Answer]:
    try:
        chosen = backend.find(kind, may_build, key, name)
    except KernelError as error:
        return backend.Backend("torch"), Answer(failure=str(error))
    return chosen, Answer(chosen.name, chosen.key, chosen.why_not)


def disagreement(answers: Sequence[Answer]) -> str:
    """Check that all ranks use the same kernel backend. Return a description of the first problem,
    or "" if there is none."""
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
        f"ranks differ in their kernels: {', '.join(choices)}{reason}; set OPTIMUS_KERNELS_CACHE "
        "on all machines to one directory that `optimus kernels build` has filled, or set "
        "kernels.backend=torch"
    )


def _failure(answers: Sequence[Answer]) -> str:
    """Return an error message with the ranks whose answer is an error, and with the first of these
    errors. Return "" if no answer is an error."""
    failed = [rank for rank, answer in enumerate(answers) if answer.failure]
    where = f"{_rank_ranges(failed)}: " if failed and len(answers) > 1 else ""
    return where + answers[failed[0]].failure if failed else ""


def _rank_ranges(ranks: Sequence[int]) -> str:
    """Return rank numbers as text, such as `rank 3` or `ranks 0-7, 9`. `ranks` must be in ascending
    order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"


def _form_setting(config: Config) -> str:
    """Return the implementation of the grouped GEMM that the configuration selects: "torch", "loop"
    or "auto"."""
    sparse = any(config.model.experts_by_layer)
    return "loop" if sparse and config.train.deterministic else config.kernels.grouped_gemm


def _form_before_start(config: Config, stored: Mapping[str, Any]) -> str:
    """Return the implementation of the grouped GEMM that the configuration selects. For "auto",
    return the implementation in `stored`, the settings of the checkpoint. Return "auto" if `stored`
    contains no implementation."""
    form = _form_setting(config)
    return stored.get(_FORM, "auto") if form == "auto" else form


def _agree_on_form(config: Config, world: World, stored: Mapping[str, Any]) -> str:
    """Activate the same implementation of the grouped GEMM on all ranks and return its name,
    "torch" or "loop". `stored` has the settings of the checkpoint from which the run resumes.
    Raises ConfigError if the values of `kernels.grouped_gemm` differ between ranks, or if the
    device does not support the implementation."""
    requested = all_gather_objects(config.kernels.grouped_gemm, world.everyone, str)
    others = [rank for rank, form in enumerate(requested) if form != requested[0]]
    if others:
        raise ConfigError(
            f"kernels.grouped_gemm = {requested[0]!r} on rank 0 and {requested[others[0]]!r} on "
            f"{_rank_ranges(others)}; give all ranks the same configuration",
        )
    model, dtype, tp = config.model, dtype_of(config.train.dtype), config.parallel.tp
    like = torch.empty(0, dtype=dtype, device=world.device)
    form = _form_before_start(config, stored)
    # A checkpoint that was written on another machine may record a form that this device does not
    # support.
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
    """Return "" if the implementation `form` of the grouped GEMM supports `model` with the dtype
    and device of `like`; otherwise return the reason why `form` is not supported."""
    try:
        set_form(form)
        current_form(like, model.hidden_size, *_inner_sizes(model, tp))
    except ValueError as error:
        return str(error)
    finally:
        set_form("auto")
    return ""


def _inner_sizes(model: ModelConfig, tp: int) -> list[int]:
    """Return the intermediate sizes of an expert's tensor-parallel slices, in ascending order and
    without duplicates."""
    ranges = (share(model.intermediate_size, index, tp) for index in range(tp))
    return sorted({stop - start for start, stop in ranges})


def measure_grouped_gemm(model: ModelConfig, tp: int, tokens: int, like: torch.Tensor) -> str:
    """Return the faster implementation of the grouped GEMM, "torch" or "loop", and log the times.

    The timing covers forward and backward of one layer's experts. An implementation that does not
    support the model or the device is not timed. The caller must first set the number of threads.

    Args:
        model: The model's configuration.
        tp: Number of tensor-parallel ranks.
        tokens: Number of tokens of a microbatch. The timing uses at most 4096 tokens.
        like: A tensor with the dtype and device of the run.
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
        "grouped GEMM, forward and backward of %s, %s: %s",
        counted(layer.experts, "expert"),
        counted(tokens, "token"),
        times,
    )
    return min(seconds, key=seconds.__getitem__)


def _make_experts_pass(layer: ModelConfig, tokens: int, like: torch.Tensor) -> Callable[[], None]:
    """Create the experts of one MoE layer and random inputs. Return a function that runs a forward
    and a backward pass of these experts."""
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
        # Sum the output to a scalar: for an output with more elements, autograd imports sympy
        # (0.3 s) to compare its shape with the shape of the gradient.
        torch.autograd.grad(out.square().sum(), leaves)

    return run


class DispatchChoice(NamedTuple):
    """The value of `parallel.ep_dispatch` that a run uses, and the reason for this value. The value
    names the dispatcher, which exchanges tokens between the ranks of expert parallelism."""

    name: str
    reason: str
    """Reason for the choice; "" if `parallel.ep` is 1 or the configuration names the dispatcher."""

    def __str__(self) -> str:
        return f"{_DISPATCH}: {self.name} ({self.reason})"


def autotune_dispatch(
    config: Config,
    groups: Groups,
    model: Transformer,
    states: ChunkEngine,
    checkpoint: Manifest | None,
) -> DispatchChoice:
    """Choose the dispatcher of expert parallelism if `parallel.ep_dispatch` is "auto", and make
    `model` use this dispatcher.

    All ranks must call this function. Every rank makes the same choice. The dispatchers are timed
    only if `choose_dispatch` returns None.

    Args:
        config: The run's configuration.
        groups: This rank's groups.
        model: This rank's local model, on its device.
        states: The parameters and optimizer states of `model`. For the timing, the parameters of
            one layer's experts are gathered.
        checkpoint: The full checkpoint from which the run resumes, or None.
    """
    train, ep_dispatch = config.train, config.parallel.ep_dispatch
    if groups.mesh.ep == 1:
        return DispatchChoice(ep_dispatch, "")
    device_type = next(model.parameters()).device.type
    if ep_dispatch != "auto":
        if groups.everyone.rank == 0:
            warn_of_alltoall(config.parallel, device_type)
        return DispatchChoice(ep_dispatch, "")
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


def warn_of_alltoall(parallel: ParallelConfig, device_type: str) -> None:
    """Log a warning if `parallel.ep_dispatch` = "alltoall" is set for Intel GPUs, because
    all-to-all operations can kill a process on these GPUs."""
    # The setting may come from the config.toml of a run on another device.
    if parallel.ep > 1 and device_type == "xpu" and parallel.ep_dispatch == "alltoall":
        logger.warning(
            "%s = 'alltoall': all-to-all is known to kill the process on Intel GPUs; set 'auto' or "
            "'allgather' if ranks end without an error",
            _DISPATCH,
        )


def _recorded_dispatch(
    parallel: ParallelConfig, train: TrainConfig, stored: Mapping[str, Any]
) -> str:
    """Return the dispatcher in `stored`, the settings of a checkpoint. Return "auto" if `stored`
    has no dispatcher, or if this run has another value of ep, tp, the microbatch size or
    `train.deterministic` than the checkpoint."""
    layout = {
        "parallel.ep": parallel.ep,
        "parallel.tp": parallel.tp,
        "train.microbatch_size": train.microbatch_size,
        "train.deterministic": train.deterministic,
    }
    same = all(stored.get(key) == value for key, value in layout.items())
    return stored.get(_DISPATCH, "auto") if same else "auto"


def choose_dispatch(device_type: str, deterministic: bool, recorded: str) -> DispatchChoice | None:
    """Return the dispatcher that a run uses for `parallel.ep_dispatch` = "auto". Return None if the
    dispatchers must be timed to choose one.

    Args:
        device_type: Type of the device, as in `torch.device.type`.
        deterministic: `train.deterministic`.
        recorded: The dispatcher that the checkpoint records; "auto" if the checkpoint records no
            dispatcher that this run can use again.
    """
    # Measurements in two runs can select different dispatchers, and two dispatchers can add results
    # in different orders. Deterministic mode therefore fixes the choice, as for the grouped GEMM.
    if deterministic:
        return DispatchChoice("allgather", "selected by train.deterministic")
    if device_type == "xpu":
        # With xccl on 2 nodes, all_to_all_single under expert parallelism ended the process (in
        # ur_die) without a Python exception. A measurement would therefore end the run at its
        # start, and also at each resume.
        also = ", though the checkpoint has alltoall" if recorded == "alltoall" else ""
        return DispatchChoice(
            "allgather",
            f"not measured on Intel GPUs{also}: all-to-all is known to kill the process there; "
            f"set {_DISPATCH} = 'alltoall' to use all-to-all anyway",
        )
    return None if recorded == "auto" else DispatchChoice(recorded, _AS_STORED)


def check_fp16(model: ModelConfig, device: torch.device) -> None:
    """Check that the device can compute in fp16. Older versions of torch lack some fp16 operations
    on CPUs.

    Runs a forward and a backward pass of a small model that has the same kinds of layers as
    `model`: dense, MoE or both.

    Raises:
        ConfigError: torch lacks an fp16 operation on this device. The message contains torch's
            error.
    """
    sparse = tuple(dict.fromkeys(map(bool, model.experts_by_layer)))
    experts = 4 * max(1, model.num_experts_per_tok)
    small = model.model_copy(
        update={
            "num_layers": len(sparse),
            "num_experts": tuple(experts * is_sparse for is_sparse in sparse),
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 0,
            "head_dim": 0,
            "intermediate_size": 32,
            "dense_intermediate_size": 0,
            "vocab_size": 32,
            "pad_token_id": -1,
        }
    )
    layers = Transformer(small).to(device, torch.float16)
    initialise_(layers, 0)
    tokens = torch.arange(8, device=device).unsqueeze(0)
    try:
        terms = layers.losses(tokens)
        (terms.ce_sum + terms.aux + terms.z).backward()
    except (RuntimeError, TypeError) as error:  # a missing op: NotImplementedError, a RuntimeError
        raise ConfigError(
            f"train.dtype = 'fp16': torch {torch.__version__} cannot compute in fp16 on "
            f"{device.type} ({one_line(error)[:200]}); use 'bf16'",
        ) from None


def recompute_report(config: Config, groups: Groups, model: Transformer) -> str:
    """Measure the memory that recomputation saves and the time that it adds. Return a log line with
    the results.

    All ranks of this rank's ep and tp groups must call this function. Returns "" if
    `recompute.modules` is empty.
    """
    modules, train = config.recompute.modules, config.train
    if not modules:
        return ""
    shares = groups.mesh.tp if config.parallel.sequence_parallel else 1
    shape = (train.microbatch_size, train.seq_len // shares, config.model.hidden_size)
    cost = measure_recompute(model, shape, dtype_of(train.dtype), seed=groups.data.rank)
    layers = counted(len(model.blocks), "layer")
    return f"recompute of {', '.join(modules)}: {cost}; for one microbatch in {layers} of rank 0"
