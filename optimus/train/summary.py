"""What a run prints at its start and at its end, on its first rank."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from optimus.checkpoint.manager import full_path
from optimus.config import Config
from optimus.data.dataset import InstanceSource, TokenDataset
from optimus.data.mixture import MixedDataset
from optimus.errors import OptimusError, counted, one_line, printable
from optimus.hf import config_to_hf
from optimus.model.flops import count_parameters
from optimus.train.preflight import Preflight

logger = logging.getLogger(__name__)

MOST_EPOCHS = 4
"""Repeating text up to about four times is nearly as good as new text (arXiv 2305.16264)."""


def print_start(config: Config, flight: Preflight, warnings: Sequence[str]) -> None:
    """Print what the run will do, where it starts, and what about it is doubtful."""
    _log("this run", _plan(config, flight))
    for warning in (*warnings, *_repeats(config, flight)):
        logger.warning(one_line(warning))
    start = flight.start
    if start.path is not None:
        logger.info("starting at step %d from %s", start.step, start.path)
    for difference in flight.differences:
        logger.info("changed on resume: %s", one_line(difference))


def print_end(
    config: Config,
    flight: Preflight,
    last_step: int,
    seconds: float,
    record: Mapping[str, Any],
    evaluation: Mapping[str, Any],
) -> None:
    """Print what the run has done once it is at `last_step`, and what can be done with it.

    `record` and `evaluation` are the last lines of metrics.jsonl and eval.jsonl, or empty;
    `seconds` is how long the steps of this start took.
    """
    train, title = config.train, "done"
    if last_step < train.max_steps:
        title = f"stopped at step {last_step:,} of {train.max_steps:,}"
        if last_step == train.stop_at_step:
            title += "; raise train.stop_at_step to continue"
    _log(title, _results(config, flight, last_step, seconds, record, evaluation))


def _plan(config: Config, flight: Preflight) -> Iterator[tuple[str, str]]:
    model, train, plan, mesh = config.model, config.train, flight.plan, flight.mesh
    total, active = count_parameters(model)
    size = f"{counted(total, 'parameter')}, {active:,} active per token"
    shape = f"{counted(model.num_layers, 'layer')}, hidden size {model.hidden_size:,}"
    yield "model", f"{model.architecture}, {shape}: {size}; {train.dtype}"
    yield "layout", _layout(config, flight)
    yield from _data(config, flight)
    held_out = flight.eval_dataset
    if held_out is not None:
        every = f"every {counted(train.eval_interval, 'step')} and " if train.eval_interval else ""
        count = min(train.eval_instances or held_out.num_instances, held_out.num_instances)
        yield "held out", f"{counted(count, 'instance')}, {every}at the end{_where(held_out)}"
    microbatches = counted(plan.microbatches_per_rank, "microbatch", "microbatches")
    each = f"{microbatches} of {counted(plan.microbatch_size, 'instance')}"
    ranks = f" on each of {mesh.num_data_ranks} data ranks" if mesh.num_data_ranks > 1 else ""
    yield "batch", f"{plan.tokens:,} tokens per step: {each}{ranks}"
    last = train.stop_at_step or train.max_steps
    until = f" (train.max_steps = {train.max_steps:,})" if last < train.max_steps else ""
    if flight.start.step < last:
        steps, tokens = f"{flight.start.step + 1:,} to {last:,}", flight.tokens_after(last)
        yield "steps", f"{steps}{until}, {tokens:,} tokens in all"
    else:
        yield "steps", f"none left after step {flight.start.step:,}{until}"
    yield "checkpoints", _checkpoints(config)
    yield "files", train.run_dir


def _layout(config: Config, flight: Preflight) -> str:
    parallel, mesh = config.parallel, flight.mesh
    text = counted(mesh.world_size, "rank")
    sizes = [f"{axis} {size}" for axis, size in mesh._asdict().items() if size > 1]
    text += f" ({', '.join(sizes)})" if sizes else ""
    if mesh.pp * parallel.virtual_stages > 1:
        text += f"; schedule {parallel.schedule}, {mesh.pp * parallel.virtual_stages} stages"
    if mesh.world_size > 1:
        text += f"; optim.sharding {config.optim.sharding}"
    return text


def _data(config: Config, flight: Preflight) -> Iterator[tuple[str, str]]:
    mix = len(config.data.mix) > 1
    if mix:
        yield "data", f"a mix of {counted(len(config.data.mix), 'data set')}"
    for dataset, epochs in _epochs(config, flight):
        size = f"{counted(dataset.num_instances, 'instance')} of {dataset.context:,} tokens"
        name = "" if mix else "data"
        noun = "epoch" if _short(epochs) == "1" else "epochs"
        yield name, f"{size}, {_short(epochs)} {noun}{_where(dataset)}"


def _where(dataset: InstanceSource) -> str:
    """The path, last in its line because it may be long; nothing for a mix, which has several."""
    return f": {dataset.path}" if isinstance(dataset, TokenDataset) else ""


def _epochs(config: Config, flight: Preflight) -> Iterator[tuple[TokenDataset, float]]:
    """Each data set and how many times the run has read it after `train.max_steps`."""
    instances = config.train.max_steps * flight.plan.instances
    if flight.dataset is None:
        return
    if isinstance(flight.dataset, TokenDataset):
        yield flight.dataset, instances / flight.dataset.num_instances
        return
    assert isinstance(flight.dataset, MixedDataset)
    total = sum(float(source.weight) for source in config.data.mix)
    for source, dataset in zip(config.data.mix, flight.dataset.sources, strict=True):
        yield dataset, instances * float(source.weight) / total / dataset.num_instances


def _repeats(config: Config, flight: Preflight) -> Iterator[str]:
    for dataset, epochs in _epochs(config, flight):
        if epochs > MOST_EPOCHS:
            steps = max(1, int(config.train.max_steps * MOST_EPOCHS / epochs))
            yield (
                f"the run reads {dataset.path} {_short(epochs)} times, and more than about "
                f"{MOST_EPOCHS} add little; use more text, or set train.max_steps={steps}"
            )


def _short(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:,.0f}"


def _checkpoints(config: Config) -> str:
    settings = config.checkpoint
    full = f"every {counted(settings.interval, 'step')} and " if settings.interval else ""
    text = f"full {full}at the end"
    if settings.model_interval:
        text += f", model only every {counted(settings.model_interval, 'step')}"
    return text


def _results(
    config: Config,
    flight: Preflight,
    last_step: int,
    seconds: float,
    record: Mapping[str, Any],
    evaluation: Mapping[str, Any],
) -> Iterator[tuple[str, str]]:
    run_dir, first = config.train.run_dir, flight.start.step + 1
    steps = f"{first:,} to {last_step:,} in {_duration(seconds)}" if first <= last_step else "none"
    yield "steps", f"{steps}; {flight.tokens_after(last_step):,} tokens in all"
    if record.get("loss") is not None:
        yield "loss", f"{record['loss']:.4f}"
    if evaluation:
        yield "held-out loss", f"{evaluation['loss']:.4f} at step {evaluation['step']:,}"
    made = first <= last_step or flight.start.path is None
    yield "checkpoint", str(full_path(run_dir, last_step) if made else flight.start.path)
    name = "next"
    for command in _next_commands(config, flight, last_step):
        yield name, command
        name = ""


def _next_commands(config: Config, flight: Preflight, last_step: int) -> Iterator[str]:
    run = shlex.quote(config.train.run_dir)
    yield f"optimus report {run}"
    if last_step < config.train.max_steps:
        return
    yield f'optimus generate {run} --prompt "Once upon a time"'
    if isinstance(flight.eval_dataset, TokenDataset):
        yield f"optimus eval {run} {shlex.quote(str(flight.eval_dataset.path))}"
    try:
        config_to_hf(config.model, "bfloat16")
    except OptimusError:  # it has no form in transformers
        return
    yield f"optimus convert to-hf {run} {shlex.quote(config.train.run_dir.rstrip('/') + '-hf')}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _log(title: str, facts: Iterable[tuple[str, str]]) -> None:
    facts = list(facts)
    width = max(len(name) for name, _ in facts)
    lines = [printable(f"  {name:<{width}}  {fact}") for name, fact in facts]
    logger.info("\n".join([title, *lines]))
