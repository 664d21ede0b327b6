"""Training run on one rank, from start-up to the last update. Read `Run.go` first."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from optimus import platform
from optimus.checkpoint.store import Start
from optimus.config import Config, TrainConfig
from optimus.data.loader import Loader
from optimus.data.tokenizer import TextTokenizer
from optimus.distributed.agreement import RunEnded
from optimus.distributed.collectives import broadcast_object
from optimus.distributed.groups import join_groups
from optimus.distributed.world import World, end_run, end_world, start_world
from optimus.errors import (
    ConfigError,
    NonFiniteError,
    OptimusError,
    OutcomeKind,
    Phase,
    Stopped,
    as_optimus_error,
    one_line,
)
from optimus.evaluate import held_out_loss, sample_text
from optimus.io.workspace import Workspace
from optimus.launch.environment import LaunchEnv
from optimus.model.flops import flops_per_token
from optimus.observe.events import (
    ActionTrace,
    EvalRecord,
    LossScaleFigures,
    MoeFigures,
    PipelineTimes,
    Recorders,
    StepComponents,
    StepRecord,
    Traffic,
    TrafficMeter,
)
from optimus.observe.health import TrainingHealth, measure_expert_load
from optimus.observe.log import indented
from optimus.observe.step_timer import StepTimer
from optimus.parallel.pipeline.plan import needs_ring
from optimus.peak import RunPeak
from optimus.planner.offload import autotune_placement
from optimus.planner.states import check_names, check_slots
from optimus.platform import dtype_of
from optimus.rank.model import RankModel, uncompiled
from optimus.rank.states import check_disk_memory, states_of_rank
from optimus.resilience.supervision.attempt import ProgressPage, read_attempt
from optimus.train.autotune import (
    KernelChoices,
    MeasuredChoices,
    autotune_dispatch,
    autotune_kernels,
    check_fp16,
    recompute_report,
)
from optimus.train.fit import FirstUpdates, check_on_first_rank
from optimus.train.load import load_start
from optimus.train.loss_scale import LossScale
from optimus.train.malloc_trim import MallocTrim
from optimus.train.resolve import (
    ResolvedStart,
    RunInputs,
    RunPlan,
    find_start,
    read_inputs,
)
from optimus.train.run_dir import RunDirectory
from optimus.train.save import Saves, check_saves
from optimus.train.startup import StartUp
from optimus.train.stop import StopRequest
from optimus.train.summary import print_end, print_start
from optimus.train.update import Updater, UpdateResult
from optimus_kernels import KernelError, fastest_library, library_of

logger = logging.getLogger(__name__)


def train(config: Config, launch: LaunchEnv, process: float | None = None) -> None:
    """Train on this rank until the run ends.

    Args:
        config: The run's configuration, the same on all ranks.
        launch: Rank and world size of this process.
        process: Value of `time.monotonic()` at the start of this process. The start-up is timed
            from this value, or from the call of `train` if `process` is None.

    Raises:
        RunEnded: The run cannot start, fails, or is stopped by a signal or the deadline. All ranks
            raise this error with the same exit status and message.
    """
    start_up = StartUp(process)
    inputs: RunInputs | None = None
    start = ResolvedStart(Start("none"), (), ())  # replaced by the first rank's start
    directory: RunDirectory | None = None
    failure: OptimusError | None = None
    try:
        platform.check_compile(config.train.compile)
        inputs = read_inputs(config, launch.world_size)
        if launch.is_first:
            inputs.data.check_shards()
            check_names(config.optim, config.model)
            check_slots(config, inputs.mesh)
            check_disk_memory(config, inputs.mesh)
            microbatches = inputs.batch.microbatches_per_rank
            check_on_first_rank(config, inputs.mesh, microbatches, launch)
            if config.train.sample_interval:  # fail before a GPU or the network is used
                data = inputs.data.held_out or inputs.data.training
                TextTokenizer(data.tokenizer_file)
            directory = RunDirectory(config.train.run_dir)
            start = find_start(config, inputs.batch, inputs.data.training)
            check_saves(config.model, config.checkpoint.model_interval, start.start)
    except Exception as error:
        _record_failure(error)
        failure = as_optimus_error(error)  # start_world passes it to all ranks
        if failure is None:
            raise
        if directory is not None:
            directory.close(others_have_ended=True)  # so that another run can use it
            directory = None
    world: World | None = None
    run: Run | None = None
    phase: Phase = "meeting"
    try:
        world = start_world(launch, config.parallel.timeout_s, config.train.device, failure)
        assert inputs is not None, "if read_inputs fails, start_world raises its error"
        plan = RunPlan(*inputs, *broadcast_object(start, world.everyone, ResolvedStart))
        path = directory.workspace.path if directory is not None else None
        workspace = Workspace(broadcast_object(path, world.everyone, Path))
        start_up.done("meeting")
        phase = "setup"
        run = _set_up(config, world, plan, workspace, directory, start_up)
        phase = "training"
        run.go()
    except RunEnded as error:
        _record_failure(error)
        raise
    except Exception as error:
        _record_failure(error)
        if isinstance(error, KernelError):  # a backend selected by name is not available
            error = ConfigError(str(error))
        agreement = world.agreement if world else None
        raise end_run(error, launch, agreement, phase, run.step if run else 0) from error
    finally:
        if run is None and directory is not None:
            try:
                directory.close(others_have_ended=True)
            except OSError as error:  # must not replace the error that ends the run
                logger.warning(
                    "cannot close the run directory %s: %s", config.train.run_dir, error.strerror
                )
    end_world()


def _record_failure(error: Exception) -> None:
    """In a supervised run, write the exit status for `error` to this rank's progress file, where
    the supervising agent reads it.

    Call this function before the ranks agree on the error that all ranks raise. Without
    supervision, the function does nothing.
    """
    attempt = read_attempt()
    if attempt is None:
        return
    failure = as_optimus_error(error)
    kind = failure.kind if failure is not None else OutcomeKind.FAILED
    if isinstance(error, RunEnded):  # this rank has no error, but another rank cannot start
        kind = OutcomeKind.LOST_PEER
    with contextlib.suppress(OSError):
        ProgressPage(attempt.progress).fail(kind.exit_status)


def _set_up(
    config: Config,
    world: World,
    plan: RunPlan,
    workspace: Workspace,
    directory: RunDirectory | None,
    start_up: StartUp,
) -> Run:
    """Set the number of threads, choose the kernels and log the plan of the run. Return a Run,
    whose constructor loads the model states."""
    ranks_per_node = world.launch.local_world_size
    fix_arithmetic(config.train, ranks_per_node)
    kernels = autotune_kernels(config, world, plan.start.full)
    start_up.done("autotune")
    if config.train.dtype == "fp16":
        check_fp16(config.model, world.device)
    if world.is_first:
        print_start(config, plan, ranks_per_node)
    return Run(config, world, plan, kernels, workspace, directory, start_up)


def fix_arithmetic(train: TrainConfig, local_world_size: int) -> int:
    """Set the number of torch threads of this process and return the number. With
    `train.deterministic`, also turn on torch's deterministic mode. Call this function before the
    first computation."""
    threads = platform.set_threads(train.threads, train.deterministic, local_world_size)
    if train.deterministic:
        # As use_deterministic_algorithms(True), but without importing the compiler (2 s).
        torch.set_deterministic_debug_mode("error")
        switches: Any = torch.utils.deterministic  # its type does not declare this property
        switches.fill_uninitialized_memory = False
    return threads


def _finite(value: float) -> float | None:
    """Return `value`, or None if `value` is NaN or infinite. In a skipped update, the losses and
    the gradient norm can have such values."""
    return value if math.isfinite(value) else None


class Run:
    """A training run on one rank: the model, its optimizer states, the data loader and the
    checkpoint saves. The first rank also has the run directory."""

    def __init__(
        self,
        config: Config,
        world: World,
        plan: RunPlan,
        kernels: KernelChoices,
        workspace: Workspace,
        directory: RunDirectory | None,
        start_up: StartUp | None = None,
    ) -> None:
        self.world, self.directory = world, directory
        self.last_step = config.train.stop_at_step or config.train.max_steps
        self.step = 0
        """Number of the current update; 0 before the first update."""
        attempt = read_attempt()
        self.progress = ProgressPage(attempt.progress if attempt is not None else None)
        self.recorder = Recorders(self.progress)  # sinks are added on the first rank
        self.meter, self.trace = TrafficMeter(), ActionTrace()
        if directory is not None:
            self.recorder.add(self.meter)
            if config.observe.tensorboard and plan.mesh.pp > 1:
                self.recorder.add(self.trace)
        self.timer = self._make_timer(config) if directory is not None else None
        self.groups = join_groups(plan.mesh, world, needs_ring(config, plan.mesh.pp), self.recorder)
        placed = self._placed(config, plan)
        microbatches = plan.batch.microbatches_per_rank
        self.first_updates = FirstUpdates(placed, plan.mesh, microbatches, world)
        self.rank_model = RankModel(placed, self.groups, plan.batch, world.device)
        self.model, layout = self.rank_model.model, self.rank_model.layout
        # A run that starts from weights alone also needs initial values, because the dispatchers
        # are timed before the weights are loaded. If the states were NaN, the router would send all
        # tokens to the same experts, and the measured times would not be those of a usual load of
        # the experts.
        self.states = self.rank_model.make_states(initial=plan.start.full is None)
        dispatch = autotune_dispatch(config, self.groups, self.model, self.states, plan.start.full)
        config = MeasuredChoices(kernels, dispatch.name).record_in(config)
        self.config = config
        scaling = LossScale(config.optim, config.train.dtype, plan.batch.num_microbatches)
        rank_states = states_of_rank(config.model, layout, self.groups, self.states)
        self.progress.enter("load", 0)
        plan = load_start(config, world, plan, layout, self.states, rank_states, scaling)
        self.progress.enter("start", 0)
        self.plan = plan
        sync_logs = directory.sync if directory is not None else lambda: None
        self.saves = Saves(
            config, world, plan, self.states, rank_states, scaling, workspace, sync_logs
        )
        recompute = recompute_report(config, self.groups, self.model)
        self.peak: RunPeak | None = None
        if directory is not None:
            notes = [str(dispatch)] if dispatch.reason else []
            self._start_recording(directory, [*notes, recompute] if recompute else notes)
        if config.train.compile:
            platform.use_private_compile_cache()
            self.model.compile_blocks()
        self.updater = Updater(
            config,
            self.groups,
            self.rank_model,
            self.states,
            plan.batch,
            world.device,
            scaling,
            workspace,
            frozenset(plan.skipped_steps),
            plan.data.training,
        )
        self.loader = Loader(
            plan.data.training,
            plan.batch.instances,
            config.train.microbatch_size,
            self.groups.data.rank,
            self.groups.data.size,
            config.data.document_mask,
        )
        self.malloc_trim = MallocTrim()
        self.health = TrainingHealth(config.model)
        self._start_up = start_up
        if start_up is not None:
            start_up.done("model and states")

    def _make_timer(self, config: Config) -> StepTimer | None:
        """Create the timer of `observe.step_components`, add it to the recorders of the run, and
        return it. Return None without this setting, or if the device has no timed events."""
        if not config.observe.step_components:
            return None
        try:
            timer = StepTimer(self.world.device)
        except RuntimeError as error:
            logger.warning("observe.step_components has no effect: %s", one_line(error))
            return None
        self.recorder.add(timer)
        return timer

    def _placed(self, config: Config, plan: RunPlan) -> Config:
        """Return `config` with the settings that place the states of this rank on device, host and
        disk."""
        return autotune_placement(
            config,
            self.groups,
            plan.batch.microbatches_per_rank,
            self.world.device,
            self.world.launch.local_world_size,
            logger.info if self.world.is_first else lambda line: None,
        )

    def go(self) -> None:
        """Train from the start step to the last step, or until a signal or a deadline stops the
        run. After each update, run the evaluations, samples and checkpoint saves that are due."""
        if self.directory is not None and self.plan.start.step >= self.last_step:
            logger.info(
                "nothing to do: the run is at step %d, and its last step is %d; raise train.%s to "
                "continue",
                self.plan.start.step,
                self.last_step,
                "stop_at_step" if self.last_step < self.config.train.max_steps else "max_steps",
            )
        attempt = read_attempt()
        job_end = attempt.job_end if attempt is not None else None
        began, is_complete = time.monotonic(), False
        try:
            self.saves.save_missing()
            stop_request = StopRequest(self.config.train.deadline_s, job_end)
            for step in range(self.plan.start.step + 1, self.last_step + 1):
                self.step = step
                self.progress.enter("update", step)
                seconds = self.update(step)
                self.first_updates.after_update(
                    step, step == self.last_step, seconds, self.directory
                )
                stopping = stop_request.agreed(self.world.everyone, self.world.device)
                if stopping is None:
                    self.progress.enter("evaluation", step)
                    self.evaluate(step)
                    self.sample(step)
                self.progress.enter("save", step)
                self.saves.after(step, last=step == self.last_step or stopping is not None)
                if stopping is not None:  # only after the save, since the run may be killed soon
                    self.evaluate(step)
                    self.sample(step)
                if stopping is not None and step < self.last_step:
                    self._print_end(step, began)
                    is_complete = True
                    where = "no checkpoint"
                    if self.saves.newest is not None:
                        where = f"checkpoint at {self.saves.newest}"
                    raise Stopped(
                        f"stopped after step {step} ({stopping}), {where}; run the "
                        "same command again to continue",
                    )
            self._print_end(max(self.plan.start.step, self.last_step), began)
            is_complete = True
        except NonFiniteError:  # raised on every rank, so all can finish their saves together
            self.saves.end()
            raise
        finally:
            self.first_updates.close()
            self.saves.give_up()
            self.loader.close()
            self.states.close()
            if self.directory is not None:
                # After an error, another rank may still be writing a file about a non-finite value.
                self.directory.close(others_have_ended=is_complete)

    def _print_end(self, step: int, began: float) -> None:
        if self.directory is None:
            return
        self.directory.end_progress()
        metrics, seconds = self.directory.metrics, time.monotonic() - began
        loss, evaluation = metrics.last_loss(), metrics.last_evaluation()
        figures = step, seconds, loss, evaluation
        train, newest = self.config.train, self.saves.newest
        print_end(train, self.config.model, self.plan, *figures, newest)

    def update(self, step: int) -> float:
        """Run the update number `step`, and return its duration in seconds, including the time to
        read the data. On the first rank, also record the metrics of the update."""
        self.meter.clear()
        self.trace.events.clear()
        start_ns = time.perf_counter_ns()
        if self.timer is not None:
            self.timer.start(start_ns)
        result = self.updater.run(step, self.loader.microbatches(step))
        platform.synchronize(self.world.device)
        self.malloc_trim.after_update()
        end_ns = time.perf_counter_ns()
        components = None if self.timer is None else self.timer.stop(end_ns)
        seconds = (end_ns - start_ns) / 1e9
        if self.directory is None:
            return seconds
        # Copied to the host once, for the metrics of the expert load and the warnings.
        result = replace(result, expert_rows=result.expert_rows.cpu())
        self._record(result, seconds, components)
        self.directory.check_newest()
        for notice in self.health.after_update(step, result.expert_rows, result.grad_norm):
            logger.log(notice.level, notice.text)
        if self._start_up is not None:
            self._start_up.done("first update")
            self.recorder.record(self._start_up.record())
            self._start_up = None
        return seconds

    def evaluate(self, step: int) -> None:
        """Compute and record the loss on the held-out data, if there is any, when `step` is the
        last step or a multiple of `train.eval_interval`. All ranks must call this method."""
        train, dataset = self.config.train, self.plan.data.held_out
        due = step == self.last_step or (train.eval_interval and step % train.eval_interval == 0)
        if dataset is None or not due:
            return
        with uncompiled(self.config.train.compile):
            held_out = held_out_loss(
                self.rank_model.cross_entropies,
                dataset,
                train.microbatch_size,
                self.groups.everyone,
                self.groups.data.rank,
                self.groups.data.size,
                train.eval_instances,
                self.config.data.document_mask,
            )
        self.recorder.record(EvalRecord(step, "held-out", held_out.loss, held_out.tokens))

    def sample(self, step: int) -> None:
        """Generate and log a sample of text if `step` is a multiple of `train.sample_interval`.

        The sample continues the first held-out instance. Without held-out data, it continues the
        first training instance. All ranks must call this method.
        """
        train, mesh = self.config.train, self.plan.mesh
        if not train.sample_interval or step % train.sample_interval:
            return
        with uncompiled(self.config.train.compile):
            text = sample_text(
                self.rank_model.logits_after,
                self.plan.data.held_out or self.plan.data.training,
                train.sample_tokens,
                self.world.device,
                seed=train.seed + step,
                stop_tokens=self.config.model.eos_token_ids,
                group=self.groups.everyone,
                source=mesh.rank_at(mesh.coordinate(0)._replace(pp=mesh.pp - 1)),
            )
        if self.directory is not None:
            logger.info("sample at step %d:\n%s", step, indented(text))

    def _record(
        self, result: UpdateResult, seconds: float, components: StepComponents | None
    ) -> None:
        """Pass the metrics of an update to all recorders, which write metrics.jsonl and other
        outputs. `seconds` is the duration of the update, and `components` divides this duration
        into components."""
        model = self.config.model
        moe = None
        if model.sparse_layers:
            load = measure_expert_load(result.step, result.expert_rows, model)
            moe = load.figures(_finite(result.aux_loss), _finite(result.z_loss))
            self.recorder.record(load)
        step = replace(self._step_record(result, seconds, moe), components=components)
        self.recorder.record(step)
        self.recorder.record(Traffic(result.step, self.meter.bytes_by_axes()))
        if self.trace.events:
            self.recorder.record(PipelineTimes(result.step, self.trace.seconds_by_kind()))

    def _step_record(
        self, result: UpdateResult, seconds: float, moe: MoeFigures | None
    ) -> StepRecord:
        batch = self.plan.batch
        flops_per_update = flops_per_token(self.config.model, batch.seq_len) * batch.tokens
        flops = flops_per_update / seconds / self.world.size
        assert self.peak is not None, "only the first rank records steps"
        loss_scaling = None
        if self.config.train.dtype == "fp16":
            loss_scaling = LossScaleFigures(result.loss_scale, result.skipped_steps)
        return StepRecord(
            step=result.step,
            loss=_finite(result.loss),
            grad_norm=_finite(result.grad_norm),
            lr=result.lr,
            tokens=self.plan.tokens_after(result.step),
            step_time_s=seconds,
            tokens_per_s=batch.tokens / seconds,
            tflops_per_device=flops / 1e12,
            mfu=self.peak.mfu(flops),
            mem_bytes=platform.peak_memory_bytes(self.world.device),
            moe=moe,
            loss_scaling=loss_scaling,
        )

    def _start_recording(self, directory: RunDirectory, notes: list[str]) -> None:
        """Open the files of the run directory, log `notes`, and determine the device's peak FLOP/s,
        from which MFU is computed."""
        for sink in directory.open(self.config, self.plan, self.last_step):
            self.recorder.add(sink)
        for note in notes:
            logger.info(note)
        like = torch.empty(0, dtype=dtype_of(self.config.train.dtype), device=self.world.device)
        with fastest_library(like):
            self.peak = RunPeak(
                directory.path,
                directory.workspace,
                self.plan.start.step > 0,
                like.device,
                like.dtype,
                library_of(like),
                logger.info,
            )
