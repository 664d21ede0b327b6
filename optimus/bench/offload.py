"""Times of training steps with offloaded chunks on an emulated device, for `optimus bench offload`.

The model consists of segments, each with one chunk of parameters. A segment sleeps instead of
computing. Copies and updates have the rates of an emulated link. The result shows how well the
schedule overlaps computation, copies and updates, but not the speed of a device.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from optimus.chunks.engine import ChunkEngine
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.optimizer import AdamW
from optimus.chunks.residency import Pass, Residency, plan_residency, use_order
from optimus.chunks.segments import ModelSegment, register_module
from optimus.chunks.step_time import StepTime, StepWork, predict_step
from optimus.config import OptimConfig
from optimus.config.machine import Links
from optimus.errors import counted

_ELEMENTS = 1 << 14
"""Number of elements of a chunk. The number is small, so that real copies and updates take much
less time than emulated copies and updates."""
_PARAM_BYTES, _GRAD_BYTES = 2 * _ELEMENTS, 4 * _ELEMENTS
_STATE_BYTES = 12 * _ELEMENTS
_USED_SEGMENTS = 16
"""Number of segments of the model that `measure_uses` trains."""
_USED_ELEMENTS = 1 << 8
"""Number of elements of a chunk of the model that `measure_uses` trains. A copy of such a chunk
takes less than a microsecond."""
_USED_STEPS = 30
_WARMUP = 2
_INSTANT_S = 1e-9
_LR = 1e-3
BAR = 1.10
"""Upper limit of a training step's time, as a multiple of the predicted time."""
USE_BAR_S = 20e-6
"""Upper limit of the median processor time of a call of `ParamStore.use`, in seconds."""
HIDDEN = 0.90
"""Lower limit of `hidden` (see `bench_offload`), the share of the copies' time that computation
hides. The limit applies if computation takes longer than the copies."""


class Mix(NamedTuple):
    """Sizes and durations of the operations of a training step on the emulated device."""

    segments: int
    """Number of segments, each with one chunk."""
    slots: int
    """Size of the device's chunk cache, in chunks."""
    microbatches: int
    forward_s: float
    """Duration of a segment's forward in seconds. The backward takes twice as long."""
    upload_s: float
    """Duration of the copy of a chunk to the device, in seconds."""
    download_s: float
    """Duration of the copy of a chunk's gradients to the host, in seconds."""
    adam_s: float
    """Duration of the update of a chunk on the host, in seconds."""
    by_layer: bool = False
    """True if all microbatches run through a segment before the next segment begins. Each segment
    is then a pipeline stage."""
    early: bool = False
    """True to allow the update of each chunk before the norm of all gradients is known."""
    clips: bool = False
    """True if the gradient norm is clipped in each training step, so that early updates are
    discarded."""
    read_s: float = 0.0
    """Duration of reading a chunk's states from disk, in seconds; 0 if no states are on disk."""
    write_s: float = 0.0
    """Duration of writing a chunk's states to disk, in seconds."""

    @property
    def stages(self) -> list[int]:
        """The pipeline stage of each segment."""
        return [n if self.by_layer else 0 for n in range(self.segments)]

    @property
    def passes(self) -> list[Pass]:
        """The forward and backward passes of a training step."""
        if not self.by_layer:
            return [Pass(0, False), Pass(0, True)] * self.microbatches
        forward = [Pass(stage, False) for stage in self.stages for _ in range(self.microbatches)]
        return forward + [Pass(stage, True) for stage, _ in reversed(forward)]

    @property
    def work(self) -> StepWork:
        """The work of this training step, as input of `predict_step`."""
        n = self.segments
        needs = [frozenset({segment}) for segment in range(n)]
        return StepWork(
            plan_residency(use_order(self.passes, self.stages, needs, [True] * n), self.slots),
            needs,
            [self.forward_s] * n,
            [2 * self.forward_s] * n,
            [_PARAM_BYTES] * n,
            [_GRAD_BYTES] * n,
            [_ELEMENTS] * n,
            early=frozenset(range(n) if self.early and not self.read_s else ()),
            clips=self.clips,
            disk_bytes=[_STATE_BYTES] * n if self.read_s else (),
        )

    @property
    def links(self) -> Links:
        """The link rates that result in the durations of this mix."""
        return Links(
            to_device=_PARAM_BYTES / self.upload_s,
            to_host=_GRAD_BYTES / self.download_s,
            host_adam=_ELEMENTS / self.adam_s,
            disk_read=_STATE_BYTES / (self.read_s or _INSTANT_S),
            disk_write=_STATE_BYTES / (self.write_s or _INSTANT_S),
        )


def draw_mixes(count: int, seed: int, on_disk: bool = False) -> list[Mix]:
    """Return `count` random mixes. With `on_disk`, all optimizer states are on disk. Without
    `on_disk`, the computation of about 60 % of the mixes takes longer than the copies and updates
    together."""
    chance, disk = random.Random(seed), random.Random(seed)
    mixes = []
    for _ in range(count):
        segments = chance.randint(4, 10)
        forward_s = chance.uniform(0.004, 0.012)
        upload_s, download_s, adam_s = (
            forward_s * 2 ** chance.uniform(-2.5, 1.5) for _ in range(3)
        )
        slots, microbatches = chance.randint(2, segments), chance.choice((1, 1, 2))
        by_layer = microbatches > 1 and chance.random() < 0.5
        work = Mix(segments, slots, microbatches, forward_s, upload_s, download_s, adam_s, by_layer)
        if on_disk:
            read_s, write_s = (forward_s * 2 ** disk.uniform(-2.5, 1.5) for _ in range(2))
            work = work._replace(read_s=read_s, write_s=write_s)
        mixes.append(work)
    return mixes


class _Sleep(torch.autograd.Function):
    """Identity that takes a fixed time in forward and twice this time in backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class _Segment(nn.Module):
    """Segment of the model that multiplies its input by a weight, and sleeps."""

    def __init__(self, seconds: float, elements: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(elements, dtype=torch.bfloat16))
        self.seconds = seconds

    def forward(self, values: Tensor) -> Tensor:
        return _Sleep.apply(values * self.weight, self.seconds)


def format_offload(result: dict[str, Any]) -> str:
    """Return the result of `bench_offload` as text, with one line per figure."""
    lines = [counted(len(result["mixes"]), "random mix", "random mixes")]
    for key, text in (
        ("of_prediction", "step time / predicted time"),
        ("of_shortest", "step time / shortest possible time"),
    ):
        figure = result[key]
        lines.append(
            f"{text}: median {figure['median']:.3f}, largest {figure['max']:.3f} "
            f"(bar {figure['bar']:.2f})"
        )
    of_limit = result["of_limit"]["median"]
    lines.append(f"step time / time of the busiest resource: median {of_limit:.3f}")
    for key, text in (("early", "never"), ("clipped", "always")):
        of_late = result[key]["of_late"]
        of_prediction = result[key]["of_prediction"]
        lines.append(
            f"early updates, norm {text} clipped: step time / step time without early updates: "
            f"median {of_late['median']:.3f}, {of_late['min']:.3f} to {of_late['max']:.3f}; "
            f"step time / predicted time: largest {of_prediction['max']:.3f} "
            f"(bar {of_prediction['bar']:.2f})"
        )
    hidden = result["hidden"]
    if hidden["count"]:
        mixes = counted(hidden["count"], "mix", "mixes")
        lines.append(
            f"copies hidden where computation takes longer ({mixes}): "
            f"median {hidden['median']:.1%}, least {hidden['min']:.1%} (bar {hidden['bar']:.0%})"
        )
    use, in_threads = result["use_s"], result["use_in_threads_s"]
    lines.append(
        f"processor time of a use of a segment: median {1e6 * use['median']:.1f} us (bar "
        f"{1e6 * use['bar']:.0f} us), with copies in threads {1e6 * in_threads['median']:.1f} us"
    )
    return "\n".join(lines)


def run_mix(mix: Mix, steps: int, disk: str = "") -> tuple[list[float], StepTime]:
    """Train with the sizes and durations of a mix, and predict the time of a training step.

    Args:
        mix: The mix.
        steps: Number of timed steps.
        disk: Directory for the file of the states, if the mix has states on disk.

    Returns:
        (seconds of each timed training step, predicted times of a training step).
    """
    assert disk or not mix.read_s, "states on disk need a directory"
    model, engine = _make_engine(mix, mix.links, _ELEMENTS, disk)
    segments = [
        ModelSegment(str(n), stage, (f"{n}.weight",), partial(register_module, model[n]))
        for n, stage in enumerate(mix.stages)
    ]
    engine.attach(segments, mix.passes, reduces_each=not mix.by_layer)
    engine.add_spare(math.inf if mix.early else 0)
    times = []
    for step in range(steps + _WARMUP):
        start = time.perf_counter()
        _run_step(mix, model, engine)
        if step >= _WARMUP:
            times.append(time.perf_counter() - start)
    engine.wait()
    engine.close()
    predicted = predict_step(mix.work, mix.links)
    planned = predicted.to_device * mix.links.to_device + predicted.to_host * mix.links.to_host
    copied = engine.memory.num_copied / (steps + _WARMUP)
    assert abs(copied - planned) < 0.5, f"a step copied {copied} bytes, not {planned}"
    return times, predicted


def _make_engine(
    mix: Mix, links: Links | None, elements: int, disk: str = ""
) -> tuple[nn.Sequential, ChunkEngine]:
    """Return the model of a mix, with a chunk of `elements` elements for each segment, and the
    engine of this model. `links` are the rates at which threads of the engine copy and update
    chunks. If `links` is None, the calling thread makes the copies, without a limit of the rate."""
    model = nn.Sequential(*(_Segment(mix.forward_s, elements) for _ in range(mix.segments)))
    return model, ChunkEngine(
        dict(model.named_parameters()),
        lambda name: ParamProcessGroups(stage=mix.stages[int(name.partition(".")[0])]),
        AdamW(OptimConfig()),
        dtype=torch.bfloat16,
        chunk_length=elements,
        deterministic=True,
        residency=Residency(
            divides_gradients=True,
            host_share=1.0,
            disk_share=1.0 if mix.read_s else 0.0,
            disk=disk,
            slots=mix.slots,
            links=links,
        ),
    )


def _run_step(mix: Mix, model: nn.Sequential, engine: ChunkEngine) -> None:
    """Run a training step of a mix."""
    values = torch.ones_like(next(model.parameters()), requires_grad=True)
    engine.start_step((_LR, 1.0))
    if mix.by_layer:
        _run_by_layer(model, engine, [values] * mix.microbatches)
    else:
        for _ in range(mix.microbatches):
            model(values).sum().backward()
            engine.gradients.reduce(0)
    engine.gradients.finish()
    engine.grad_norm()
    engine.update(_LR, 0.5 if mix.clips else 1.0)


def measure_uses(steps: int, in_threads: bool) -> list[float]:
    """Train a model whose segments do not sleep, and measure the time of `ParamStore.use`, which
    is called before each forward and backward of a segment.

    Args:
        steps: Number of measured steps.
        in_threads: True: threads make the copies, as for an accelerator. The rates of the copies
            are so high that they add no delay. False: the calling thread makes the copies, which
            are small.

    Returns:
        The processor time of each call of `ParamStore.use`, in seconds: the time in which the
        calling thread frees chunks, starts copies in the order of the plan, and waits for copies.
        The time in which the thread sleeps is not counted.
    """
    instant = _INSTANT_S, _INSTANT_S, _INSTANT_S
    mix = Mix(_USED_SEGMENTS, _USED_SEGMENTS // 4, 1, 0.0, *instant)
    model, engine = _make_engine(mix, mix.links if in_threads else None, _USED_ELEMENTS)
    times = []

    def use(segment: int, backward: bool) -> None:
        if backward:
            engine.gradients.before_segment_backward(segment)
        start = time.thread_time()
        engine.params.use(segment, backward)
        times.append(time.thread_time() - start)

    def register(segment: int, *hooks: Any) -> None:
        register_module(model[segment], partial(use, segment, False), partial(use, segment, True))

    segments = [
        ModelSegment(str(n), 0, (f"{n}.weight",), partial(register, n))
        for n in range(_USED_SEGMENTS)
    ]
    engine.attach(segments, mix.passes)
    for _ in range(steps + _WARMUP):
        _run_step(mix, model, engine)
        assert not engine.params.num_unplanned, "a use is not in the plan"
    engine.wait()
    engine.close()
    return times[-steps * 2 * _USED_SEGMENTS :]


def _run_by_layer(model: nn.Sequential, engine: ChunkEngine, inputs: list[Tensor]) -> None:
    """Run forward and backward of all microbatches. All microbatches run through a segment before
    the next segment begins."""
    runs: list[list[tuple[Tensor, Tensor]]] = []
    for segment in model:
        inputs = [values.detach().requires_grad_() for values in inputs]
        outputs = [segment(values) for values in inputs]
        runs.append(list(zip(inputs, outputs, strict=True)))
        inputs = outputs
    grads = [torch.ones_like(values) for values in inputs]
    for stage in reversed(range(len(runs))):
        for (_, output), grad in zip(runs[stage], grads, strict=True):
            output.backward(grad)
        engine.gradients.reduce(stage)
        grads = [values.grad for values, _ in runs[stage] if values.grad is not None]


def bench_offload(count: int, steps: int, seed: int, disk: str = "") -> dict[str, Any]:
    """Train with `count` random mixes, and compare the times of training steps with the
    predictions. If `disk` is a directory, all states are on an emulated disk, in a file in this
    directory.

    Returns:
        A dict for JSON. `mixes` has an entry for each mix, with the fields of the mix and these
        values:

        - `step_s`: median time of a step.
        - `of_prediction`: `step_s` as a multiple of the predicted time.
        - `of_limit`: `step_s` as a multiple of the time of the busiest resource.
        - `of_shortest`: `step_s` as a multiple of `StepTime.shortest`.
        - `hidden`: share of the copies' time that computation hides. The value exists only if
          computation takes longer than the copies. It is computed from the time of a measured step
          with instantaneous copies. Copies that no schedule can hide, such as the first copy of a
          step, are not counted.
        - `early`, `clipped`: dicts for the same mix with early updates of all chunks without states
          on disk. The norm is never clipped for `early`, and always clipped for `clipped`. Each
          dict has `step_s`, `of_prediction` and `of_late`. `of_late` is the `step_s` of the dict as
          a multiple of the `step_s` without early updates.

        `use_s` and `use_in_threads_s` have statistics of the processor times of `measure_uses`.
    """
    entries = []
    for mix in draw_mixes(count, seed, bool(disk)):
        times, predicted = run_mix(mix, steps, disk)
        median = statistics.median(times)
        entry = {
            **mix._asdict(),
            "step_s": median,
            "predicted_s": predicted.step,
            "limit_s": predicted.limit,
            "of_prediction": median / predicted.step,
            "of_limit": median / predicted.limit,
            "of_shortest": median / predicted.shortest,
        }
        copies = predicted.to_device + predicted.to_host
        if predicted.compute > copies:
            instant = mix._replace(upload_s=_INSTANT_S, download_s=_INSTANT_S)
            instant_times, ideal = run_mix(instant, steps, disk)
            fill = predicted.shortest - ideal.shortest  # no schedule hides the first copy
            if copies > fill:
                visible = median - statistics.median(instant_times) - fill
                entry["hidden"] = 1 - visible / (copies - fill)
        for key, clips in (("early", False), ("clipped", True)):
            entry[key] = _run_early(mix._replace(early=True, clips=clips), steps, disk, median)
        entries.append(entry)
    hidden = [entry["hidden"] for entry in entries if "hidden" in entry]
    early = {
        key: {
            "of_late": _spread([entry[key]["of_late"] for entry in entries]),
            "of_prediction": _spread([entry[key]["of_prediction"] for entry in entries], BAR),
        }
        for key in ("early", "clipped")
    }
    return {
        "mixes": entries,
        "of_prediction": _spread([entry["of_prediction"] for entry in entries], BAR),
        "of_limit": _spread([entry["of_limit"] for entry in entries]),
        "of_shortest": _spread([entry["of_shortest"] for entry in entries], BAR),
        "hidden": {
            "count": len(hidden),
            "median": statistics.median(hidden) if hidden else None,
            "min": min(hidden) if hidden else None,
            "bar": HIDDEN,
        },
        **early,
        "use_s": _spread(measure_uses(_USED_STEPS, in_threads=False), USE_BAR_S),
        "use_in_threads_s": _spread(measure_uses(_USED_STEPS, in_threads=True)),
    }


def _run_early(mix: Mix, steps: int, disk: str, late_s: float) -> dict[str, float]:
    """Return the figures of a mix with early updates. Without early updates, a training step takes
    `late_s` seconds."""
    times, predicted = run_mix(mix, steps, disk)
    median = statistics.median(times)
    of = {"of_prediction": median / predicted.step, "of_late": median / late_s}
    return {"step_s": median, "predicted_s": predicted.step, **of}


def _spread(values: list[float], bar: float | None = None) -> dict[str, float]:
    spread = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return spread if bar is None else {**spread, "bar": bar}
