"""Training on ranks of the pool: whole runs, and single updates of a model without a run."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from optimus.chunks.engine import ChunkEngine
from optimus.config import Config, make_config
from optimus.data.batch import BatchPlan, plan_batch
from optimus.data.loader import Microbatch
from optimus.distributed.agreement import RunEnded
from optimus.distributed.collectives import broadcast_object
from optimus.distributed.groups import Groups, join_groups
from optimus.distributed.mesh import make_mesh
from optimus.distributed.world import World, start_world
from optimus.errors import OutcomeKind
from optimus.io.workspace import Workspace
from optimus.launch.environment import read_launch_env
from optimus.observe.events import NO_RECORDER, Recorder
from optimus.parallel.pipeline.plan import needs_ring
from optimus.rank.model import RankModel
from optimus.train.autotune import KernelChoices
from optimus.train.loop import Run, train
from optimus.train.resolve import RunPlan, resolve
from optimus.train.run_dir import RunDirectory
from optimus.train.update import Updater
from tests.kit.runs.tiny import CONTEXT, VOCAB

Hook = Callable[[int], None]
"""Function that is called with the number of an update."""


def run_tree(tree: dict[str, Any]) -> None:
    """Run the training of a configuration on this rank."""
    train(make_config(tree), read_launch_env())


def train_on(ranks: Callable[..., list[Any]], size: int, tree: dict[str, Any]) -> None:
    """Run the training of a configuration on `size` ranks of the fixture `ranks`."""
    ranks(size, run_tree, tree, start_world=False, timeout_s=120)


def run_and_catch(tree: dict[str, Any]) -> tuple[int, str]:
    """Run the training of a configuration on this rank. Return the exit status and the error
    message; 0 and "" if there is no error."""
    try:
        run_tree(tree)
    except RunEnded as ended:
        assert ended.is_shared or read_launch_env().world_size == 1
        return ended.exit_code, str(ended)
    return 0, ""


def printed_by(tree: dict[str, Any]) -> str:
    """Run the training of a configuration on this rank. Return the text that this rank wrote to
    standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        run_tree(tree)
    return printed.getvalue()


class Ended(NamedTuple):
    """End of a run on this rank: exit status, error message, and lines on standard error."""

    status: int
    message: str
    printed: list[str]

    def warnings(self) -> list[str]:
        return [line for line in self.printed if "warning:" in line]


def run_with(
    tree: dict[str, Any], before: Hook, after: Callable[[Run], None] = lambda run: None
) -> Ended:
    """Run the training of a configuration on this rank, with hooks before and after each update.

    All ranks must end with the same error, except ranks that end because they lost a peer.
    """
    plain_update, printed, launch = Run.update, io.StringIO(), read_launch_env()

    def update(run: Run, step: int) -> float:
        before(step)
        seconds = plain_update(run, step)
        after(run)
        return seconds

    with mock.patch.object(Run, "update", update), contextlib.redirect_stderr(printed):
        status, message = 0, ""
        try:
            train(make_config(tree), launch)
        except RunEnded as ended:
            is_alone = launch.world_size == 1
            assert is_alone or ended.is_shared or ended.kind is OutcomeKind.LOST_PEER, ended
            status, message = ended.exit_code, str(ended)
    return Ended(status, message, printed.getvalue().splitlines())


def make_run(tree: dict[str, Any]) -> Run:
    """Return a run of this rank that has not started. A test can change the run before the test
    calls `go`."""
    config, launch = make_config(tree), read_launch_env()
    plan = resolve(config, launch.world_size)
    assert isinstance(plan, RunPlan)
    directory = RunDirectory(config.train.run_dir) if launch.is_first else None
    world = start_world(launch, config.parallel.timeout_s, "cpu")
    kernels = KernelChoices(config.kernels.backend, config.kernels.grouped_gemm)
    path = directory.workspace.path if directory is not None else None
    workspace = Workspace(broadcast_object(path, world.everyone, Path))
    return Run(config, world, plan, kernels, workspace, directory)


def make_microbatch(number: int, length: int = CONTEXT) -> Microbatch:
    """Return a microbatch with one instance of random tokens, [1, length]. `number` is the seed."""
    generator = torch.Generator().manual_seed(number)
    return Microbatch(torch.randint(0, VOCAB, (1, length), generator=generator))


def local_batch(
    groups: Groups, count: int = 8, first: int = 0, length: int = CONTEXT
) -> list[Microbatch]:
    """Return the microbatches of this data rank. The global batch consists of the microbatches with
    the numbers `first` to `first + count - 1`."""
    numbers = range(groups.data.rank, count, groups.data.size)
    return [make_microbatch(first + number, length) for number in numbers]


class RankModelSetup(NamedTuple):
    """The model of a rank, with the values from which it was made."""

    config: Config
    world: World
    groups: Groups
    plan: BatchPlan
    model: RankModel


class UpdateSetup(NamedTuple):
    """The model of a rank with its states and the updater."""

    config: Config
    world: World
    groups: Groups
    plan: BatchPlan
    model: RankModel
    states: ChunkEngine
    updater: Updater


def make_rank_model(
    tree: dict[str, Any], world: World | None = None, recorder: Recorder = NO_RECORDER
) -> RankModelSetup:
    """Make the model of this rank.

    Args:
        tree: The configuration.
        world: The world of the ranks; None: start it.
        recorder: Receives the collectives and the pipeline actions of the rank.
    """
    torch.set_num_threads(1)
    config = make_config(tree)
    world = world or start_world(device="cpu")
    mesh = make_mesh(config.parallel, world.size)
    groups = join_groups(mesh, world, needs_ring(config, mesh.pp), recorder)
    plan = plan_batch(config.train, mesh.num_data_ranks)
    model = RankModel(config, groups, plan, world.device)
    return RankModelSetup(config, world, groups, plan, model)


def make_updater(
    tree: dict[str, Any],
    world: World | None = None,
    poison: bool = False,
    recorder: Recorder = NO_RECORDER,
) -> UpdateSetup:
    """Make the model of this rank with its states and the updater.

    Args:
        tree, world, recorder: As for `make_rank_model`.
        poison: As for `RankModel.make_states`.
    """
    setup = make_rank_model(tree, world, recorder)
    config, world, groups, plan, model = setup
    states = model.make_states(poison=poison)
    updater = Updater(config, groups, model, states, plan, world.device)
    return UpdateSetup(*setup, states, updater)
