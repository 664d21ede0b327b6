"""Training on the rank pool: whole runs, and single updates without a run around them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from optimus.chunks.engine import ChunkEngine
from optimus.config import Config, make_config
from optimus.data.batch import BatchPlan, plan_batch
from optimus.data.loader import Microbatch
from optimus.distributed.agreement import RunEnded
from optimus.distributed.groups import Groups, join_groups
from optimus.distributed.mesh import make_mesh
from optimus.distributed.world import World, start_world
from optimus.errors import OutcomeKind
from optimus.launch.environment import read_launch_env
from optimus.observe.events import NO_RECORDER, Recorder
from optimus.rank.model import RankModel
from optimus.train.autotune import KernelChoices
from optimus.train.loop import Run, train
from optimus.train.resolve import resolve
from optimus.train.run_dir import RunDirectory
from optimus.train.update import Updater
from tests.kit.runs.tiny import CONTEXT, VOCAB


def run_tree(tree: dict) -> None:
    train(make_config(tree), read_launch_env())


def run_and_catch(tree: dict) -> tuple[int, str]:
    """A run's exit status and what it raised."""
    try:
        run_tree(tree)
    except RunEnded as ended:
        assert ended.is_shared or read_launch_env().world_size == 1
        return ended.exit_code, str(ended)
    return 0, ""


def told_by(tree: dict) -> str:
    """What a run says on standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as told:
        run_tree(tree)
    return told.getvalue()


def train_on(ranks, size: int, tree: dict) -> None:
    ranks(size, run_tree, tree, start_world=False, timeout_s=120)


Hook = Callable[[int], None]


class Ended(NamedTuple):
    """How this rank's run ended: exit status and message, and what it printed."""

    status: int
    message: str
    printed: list[str]


def run_with(
    tree: dict[str, Any], before: Hook, behind: Callable[[Run], None] = lambda run: None
) -> Ended:
    """A whole run of this rank, with hooks around its updates; all ranks end on the same word."""
    plain, printed, launch = Run.update, io.StringIO(), read_launch_env()

    def update(run: Run, step: int) -> None:
        before(step)
        plain(run, step)
        behind(run)

    Run.update = update
    status, message = 0, ""
    with contextlib.redirect_stderr(printed):
        try:
            train(make_config(tree), launch)
        except RunEnded as ended:
            is_alone = launch.world_size == 1
            assert is_alone or ended.is_shared or ended.kind is OutcomeKind.LOST_PEER, ended
            status, message = ended.exit_code, str(ended)
    return Ended(status, message, printed.getvalue().splitlines())


def warnings(ended: Ended) -> list[str]:
    return [line for line in ended.printed if "warning:" in line]


def make_run(tree: dict) -> Run:
    """This rank's run, to be changed before it goes."""
    config, launch = make_config(tree), read_launch_env()
    plan = resolve(config, launch.world_size)
    directory = RunDirectory(config.train.run_dir) if launch.is_first else None
    world = start_world(launch, config.parallel.timeout_s, "cpu")
    kernels = KernelChoices(config.kernels.backend, config.kernels.grouped_gemm)
    return Run(config, world, plan, kernels, directory)


def numbered(number: int, length: int = CONTEXT) -> Microbatch:
    """One instance of tokens made from their number."""
    generator = torch.Generator().manual_seed(number)
    return Microbatch(torch.randint(0, VOCAB, (1, length), generator=generator))


def own_batch(
    groups: Groups, count: int = 8, first: int = 0, length: int = CONTEXT
) -> list[Microbatch]:
    """This data rank's microbatches of a global batch of `count`, numbered from `first` on."""
    numbers = range(groups.data.rank, count, groups.data.size)
    return [numbered(first + number, length) for number in numbers]


class MadeShard(NamedTuple):
    config: Config
    world: World
    groups: Groups
    plan: BatchPlan
    shard: RankModel


class Made(NamedTuple):
    config: Config
    world: World
    groups: Groups
    plan: BatchPlan
    shard: RankModel
    states: ChunkEngine
    updater: Updater


def make_shard(
    tree: dict[str, Any], world: World | None = None, recorder: Recorder = NO_RECORDER
) -> MadeShard:
    """On a rank of the pool, started without a world if none is given. `recorder` receives
    collectives and pipeline actions."""
    torch.set_num_threads(1)
    config = make_config(tree)
    world, parallel = world or start_world(device="cpu"), config.parallel
    mesh = make_mesh(parallel, world.size)
    groups = join_groups(mesh, world, parallel.virtual_stages, recorder)
    plan = plan_batch(config.train, mesh.num_data_ranks)
    shard = RankModel(config, groups, plan, world.device)
    return MadeShard(config, world, groups, plan, shard)


def make_updater(
    tree: dict[str, Any],
    world: World | None = None,
    poison: bool = False,
    recorder: Recorder = NO_RECORDER,
) -> Made:
    """The same with what updates it; `poison` as in `RankModel.make_states`."""
    made = make_shard(tree, world, recorder)
    states = made.shard.make_states(poison=poison)
    updater = Updater(made.config, made.groups, made.shard, states, made.plan, made.world.device)
    return Made(*made, states, updater)
