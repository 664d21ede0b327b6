"""Summaries that a run logs at its start and at its end."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_prep.dataset import MAX_EPOCHS
from optimus.config import Config, MixSource, ModelConfig, TrainConfig
from optimus.data.dataset import InstanceSource, TokenDataset
from optimus.data.mixture import MixedDataset
from optimus.distributed.mesh import Mesh
from optimus.errors import OptimusError, counted, one_line, printable
from optimus.hf import config_to_hf
from optimus.model.flops import count_parameters
from optimus.observe.events import EvalRecord
from optimus.parallel.pipeline.plan import stages_per_rank
from optimus.resilience.supervision.attempt import SKIPPED_STEPS
from optimus.train.autotune import MeasuredChoices
from optimus.train.resolve import PartialPlan, RunPlan, flat_settings, network_warnings

logger = logging.getLogger(__name__)


def print_start(config: Config, plan: PartialPlan, ranks_per_node: int) -> None:
    """Log the plan of a run and warnings about this plan. Also log the start step and the
    checkpoint, the settings whose values differ from those in the checkpoint, and the updates that
    will be skipped."""
    _log("this run", plan_facts(config, plan))
    warnings = network_warnings(config.model, config.train, plan.mesh, ranks_per_node)
    repeats = _repeats(config.data.mix, config.train.max_steps, plan)
    for warning in (*warnings, *repeats):
        logger.warning(one_line(warning))
    start = plan.start
    if start.path is not None:
        logger.info("starting at step %d from %s", start.step, start.path)
    for change in plan.changes:
        logger.info("changed on resume: %s", one_line(change))
    if skipped := _skipped(plan):
        logger.info("updates that will be skipped: %s", skipped)


def format_resolved(config: Config, plan: RunPlan, choices: MeasuredChoices) -> str:
    """Return a text that describes the plan of a run and the values of the settings that are chosen
    by measurement, with one line per fact."""
    start = plan.start
    path = f" from {start.path}" if start.path is not None else ", from initial weights"
    facts = [*plan_facts(config, plan), ("start", f"step {start.step:,}{path}")]
    facts += [("changed", one_line(change)) for change in plan.changes]
    if skipped := _skipped(plan):
        facts.append(("skipped updates", skipped))
    for key, value in choices.as_settings().items():
        source = " (as in the checkpoint)" if key in choices.from_checkpoint else ""
        facts.append((key, value + source))
    return "\n".join(_aligned(facts))


def resolved_tree(config: Config, plan: RunPlan, choices: MeasuredChoices) -> dict[str, Any]:
    """Return a dict for JSON with the plan of a run, the values of the settings that are chosen by
    measurement, and all settings that checkpoints of the run will record."""
    batch, start, data = plan.batch, plan.start, plan.data
    counts = {"tokens": batch.tokens, "instances": batch.instances, "targets": batch.targets}
    return {
        "world": plan.mesh.world_size,
        "mesh": plan.mesh._asdict(),
        "batch": dataclasses.asdict(batch) | counts,
        "data": {
            "training": _source_tree(data.training),
            "held_out": _source_tree(data.held_out) if data.held_out is not None else None,
        },
        "start": {
            "step": start.step,
            "tokens": start.tokens,
            "path": str(start.path) if start.path is not None else None,
            "origin": start.origin,
        },
        "changes": list(plan.changes),
        "skipped_steps": list(plan.skipped_steps),
        "measured": choices.as_settings(),
        "from_checkpoint": list(choices.from_checkpoint),
        "settings": flat_settings(choices.record_in(config), batch, data.training),
    }


def _skipped(plan: PartialPlan) -> str:
    """Return a text with the numbers of the steps whose updates the run will skip; "" if there are
    no such steps."""
    steps = [step for step in plan.skipped_steps if step > plan.start.step]
    return f"{', '.join(map(str, steps))} ({SKIPPED_STEPS})" if steps else ""


def _source_tree(source: InstanceSource) -> dict[str, Any]:
    sources = source.sources if isinstance(source, MixedDataset) else [source]
    paths = [str(dataset.path) for dataset in sources if isinstance(dataset, TokenDataset)]
    return {
        "paths": paths,
        "seq_len": source.context,
        "vocab_size": source.vocab_size,
        "identity": source.identity,
    }


def print_end(
    train: TrainConfig,
    model: ModelConfig,
    plan: RunPlan,
    last_step: int,
    seconds: float,
    loss: float | None,
    evaluation: EvalRecord | None,
    checkpoint: Path | None,
) -> None:
    """Log the results of a run that ends at `last_step`, and commands that the user can run next.

    Args:
        train, model: Sections of the run's configuration.
        plan: The run's plan.
        last_step: The last completed step.
        seconds: Duration of the steps that this command ran.
        loss: The loss of the last step, in nats; None if unknown.
        evaluation: The last evaluation; None if there was none.
        checkpoint: The newest checkpoint; None if there is none.
    """
    title = "done"
    if last_step < train.max_steps:
        title = f"stopped at step {last_step:,} of {train.max_steps:,}"
        if last_step == train.stop_at_step:
            title += "; raise train.stop_at_step to continue"
    results = _results(plan, last_step, seconds, loss, evaluation, checkpoint)
    is_done = last_step >= train.max_steps and checkpoint is not None
    commands = _next_commands(train.run_dir, model, plan.data.held_out, is_done)
    names = itertools.chain(["next"], itertools.repeat(""))
    _log(title, [*results, *zip(names, commands, strict=False)])


def plan_facts(config: Config, plan: PartialPlan) -> Iterator[tuple[str, str]]:
    """Yield the lines that describe a run's plan in the log. Each line is a tuple (name, text). A
    line with the name "" continues the previous line."""
    model, train, batch, mesh = config.model, config.train, plan.batch, plan.mesh
    total, active = count_parameters(model)
    size = f"{counted(total, 'parameter')}, {active:,} active per token"
    shape = f"{counted(model.num_layers, 'layer')}, hidden size {model.hidden_size:,}"
    yield "model", f"{model.architecture}, {shape}: {size}; {train.dtype}"
    yield "layout", _layout(config, mesh)
    if plan.data is not None:
        yield from _data(config.data.mix, train.max_steps * batch.instances, plan.data.training)
        if (held_out := plan.data.held_out) is not None:
            interval = train.eval_interval
            often = f"every {counted(interval, 'step')} and " if interval else ""
            count = min(train.eval_instances or held_out.num_instances, held_out.num_instances)
            yield "held out", f"{counted(count, 'instance')}, {often}at the end{_where(held_out)}"
    microbatches = counted(batch.microbatches_per_rank, "microbatch", "microbatches")
    each = f"{microbatches} of {counted(batch.microbatch_size, 'instance')}"
    ranks = f" on each of {mesh.num_data_ranks} data ranks" if mesh.num_data_ranks > 1 else ""
    yield "batch", f"{batch.tokens:,} tokens per step: {each}{ranks}"
    last = train.stop_at_step or train.max_steps
    until = f" (train.max_steps = {train.max_steps:,})" if last < train.max_steps else ""
    if plan.start.step < last:
        steps, tokens = f"{plan.start.step + 1:,} to {last:,}", plan.tokens_after(last)
        yield "steps", f"{steps}{until}, {tokens:,} tokens in all"
    else:
        yield "steps", f"none left after step {plan.start.step:,}{until}"
    full = config.checkpoint.interval
    times = [f"every {counted(full, 'step')}"] if full else []
    times += ["at the end"] if config.checkpoint.at_end else []
    saves = f"full {' and '.join(times)}" if times else "no full checkpoint"
    if models := config.checkpoint.model_interval:
        saves += f", model-only every {counted(models, 'step')}"
    yield "checkpoints", saves
    yield "files", train.run_dir


def _layout(config: Config, mesh: Mesh) -> str:
    parallel, sharding = config.parallel, config.optim.sharding
    text = counted(mesh.world_size, "rank")
    sizes = [f"{axis} {size}" for axis, size in mesh._asdict().items() if size > 1]
    text += f" ({', '.join(sizes)})" if sizes else ""
    stages = mesh.pp * stages_per_rank(config, mesh.pp)
    if stages > 1:
        by_layer = config.offload.order == "layer"
        schedule = "gpipe" if by_layer else parallel.schedule
        text += f"; schedule {schedule}, {counted(stages, 'stage')}"
    if mesh.world_size > 1:
        text += f"; optim.sharding {sharding}"
    return text


def _data(
    mix: Sequence[MixSource], instances: int, training: InstanceSource
) -> Iterator[tuple[str, str]]:
    if len(mix) > 1:
        yield "data", f"a mix of {counted(len(mix), 'data set')}"
    for dataset, epochs in _epochs(mix, instances, training):
        size = f"{counted(dataset.num_instances, 'instance')} of {dataset.context:,} tokens"
        name = "" if len(mix) > 1 else "data"
        noun = "epoch" if _short(epochs) == "1" else "epochs"
        yield name, f"{size}, {_short(epochs)} {noun}{_where(dataset)}"


def _where(dataset: InstanceSource) -> str:
    """Return a text to append to a log line about a data set. The text is a colon and the path of
    the data set, or "" for a mixture."""
    return f": {dataset.path}" if isinstance(dataset, TokenDataset) else ""


def _epochs(
    mix: Sequence[MixSource], instances: int, training: InstanceSource
) -> Iterator[tuple[TokenDataset, float]]:
    """Yield (data set, epochs) for each data set of the training data. `epochs` is the number of
    times that a run with `instances` instances in total reads the data set."""
    if isinstance(training, TokenDataset):
        yield training, instances / training.num_instances
        return
    assert isinstance(training, MixedDataset)
    total = sum(float(source.weight) for source in mix)
    for source, dataset in zip(mix, training.sources, strict=True):
        yield dataset, instances * float(source.weight) / total / dataset.num_instances


def _repeats(mix: Sequence[MixSource], max_steps: int, plan: PartialPlan) -> Iterator[str]:
    """Yield the text of a warning for each data set that the run reads more than MAX_EPOCHS
    times."""
    if plan.data is None:
        return
    for dataset, epochs in _epochs(mix, max_steps * plan.batch.instances, plan.data.training):
        if epochs > MAX_EPOCHS:
            steps = max(1, int(max_steps * MAX_EPOCHS / epochs))
            yield (
                f"the run reads {dataset.path} {_short(epochs)} times, but more than about "
                f"{MAX_EPOCHS} epochs improve a model little; use more text, or set "
                f"train.max_steps={steps}"
            )


def _short(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:,.0f}"


def _results(
    plan: RunPlan,
    last_step: int,
    seconds: float,
    loss: float | None,
    evaluation: EvalRecord | None,
    checkpoint: Path | None,
) -> Iterator[tuple[str, str]]:
    first = plan.start.step + 1
    steps = f"{first:,} to {last_step:,} in {_duration(seconds)}" if first <= last_step else "none"
    yield "steps", f"{steps}; {plan.tokens_after(last_step):,} tokens in all"
    if loss is not None:
        yield "loss", f"{loss:.4f}"
    if evaluation is not None:
        yield "held-out loss", f"{evaluation.loss:.4f} at step {evaluation.step:,}"
    yield "checkpoint", "none" if checkpoint is None else str(checkpoint)


def _next_commands(
    run_dir: str, model: ModelConfig, held_out: InstanceSource | None, done: bool
) -> Iterator[str]:
    """Yield shell commands that use the results of a run. The user can run these commands next. If
    `done` is False, the run continues later or has no checkpoint. Then yield only `optimus report`.
    """
    run = shlex.quote(run_dir)
    yield f"optimus report {run}"
    if not done:
        return
    yield f'optimus generate {run} --prompt "Once upon a time"'
    if isinstance(held_out, TokenDataset):
        yield f"optimus eval {run} {shlex.quote(str(held_out.path))}"
    try:
        config_to_hf(model, "bfloat16")
    except OptimusError:  # transformers cannot represent the model
        return
    yield f"optimus convert to-hf {run} {shlex.quote(run_dir.rstrip('/') + '-hf')}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"


def _log(title: str, facts: Iterable[tuple[str, str]]) -> None:
    logger.info("\n".join([title, *_aligned(list(facts))]))


def _aligned(facts: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in facts)
    return [printable(f"  {name:<{width}}  {fact}") for name, fact in facts]
