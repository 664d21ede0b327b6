"""Saves beside training, saves that fail, and runs that end while one is under way."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from optimus.checkpoint import manager
from optimus.checkpoint import save as save_module
from optimus.checkpoint.shards import HEADER_BYTES
from optimus.config import make_config
from optimus.dist.collectives import ALONE
from optimus.errors import LostPeerError, OptimusError
from optimus.launch_env import read_launch_env
from optimus.observe.metrics import JsonLines
from optimus.train import save as train_save
from optimus.train.loop import Run, train
from optimus.train.stop import StopRequest
from tests.helpers.rank_pool import RanksFailed
from tests.helpers.runs import assert_same_run, metrics_of, train_on
from tests.helpers.tiny import tiny_tree

BOTH = pytest.mark.parametrize("beside", [False, True], ids=["waiting", "beside"])
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
    plain, printed = Run.update, io.StringIO()

    def update(run: Run, step: int) -> None:
        before(step)
        plain(run, step)
        behind(run)

    Run.update = update
    status, message = 0, ""
    with contextlib.redirect_stderr(printed):
        try:
            train(make_config(tree), read_launch_env())
        except OptimusError as error:
            assert error.on_every_rank or isinstance(error, LostPeerError), error
            status, message = error.exit_code, str(error)
    return Ended(status, message, printed.getvalue().splitlines())


def warnings(ended: Ended) -> list[str]:
    return [line for line in ended.printed if "WARNING" in line]


def hold_writes(until: dict[int, int]) -> Hook:
    """Saves of step s begin to write no earlier than update until[s]; the hook that lets them."""
    gates = {step: threading.Event() for step in until}
    plain = save_module.write_shard

    def write_late(directory, identity, *rest):
        if identity.step in gates:
            assert gates[identity.step].wait(60)
        return plain(directory, identity, *rest)

    save_module.write_shard = write_late

    def before(step: int) -> None:
        for saved, gate in gates.items():
            if step == until[saved]:
                gate.set()

    return before


def run_with_held_writes(tree: dict[str, Any], until: dict[int, int]) -> Ended:
    return run_with(tree, hold_writes(until))


def slots(run_dir: Path) -> dict[str, bytes]:
    """The states in the run's full checkpoints, which are all valid and all there is."""
    content = {}
    for path in sorted((run_dir / "checkpoints").iterdir()):
        manager.read_manifest(path).verify()
        for file in sorted(path.glob("shard-*")):
            content[f"{path.name}/{file.name}"] = file.read_bytes()[HEADER_BYTES:]
    return content


def steps_kept(run_dir: Path) -> list[int]:
    return sorted({int(name[5:13]) for name in slots(run_dir)})


@pytest.mark.parametrize(
    ("size", "variant"),
    [
        (1, {}),
        (2, {}),
        (2, {"train__dtype": "bf16", "optim__frozen": ["embed.weight"]}),
        (4, {"parallel__pp": 2, "checkpoint__scatter": "paper", "model__tie_embeddings": True}),
    ],
)
def test_what_is_written_beside_training_is_what_a_wait_would_have_written(
    ranks, tiny_data, tmp_path, size, variant
):
    """The first save is written while further updates change the states; both slots are equal."""
    both = {"train__max_steps": 8, "checkpoint__interval": 4, "optim__sharding": "so"} | variant
    train_on(ranks, size, tiny_tree(tiny_data, tmp_path / "sync", **both))
    tree = tiny_tree(tiny_data, tmp_path / "async", **both, checkpoint__async_save=True)
    told = ranks(size, run_with_held_writes, tree, {4: 7}, start_world=False, timeout_s=120)
    assert [one[:2] for one in told] == [(0, "")] * size
    assert_same_run(tmp_path / "sync", tmp_path / "async")
    assert slots(tmp_path / "sync") == slots(tmp_path / "async")


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 20 kB."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def run_with_small_files(tree: dict[str, Any], victim: int, steps: Sequence[int]) -> Ended:
    """On rank `victim`, while a full checkpoint of one of `steps` is written."""
    plain = save_module.write_shard

    def write(directory, identity, *rest):
        is_one = identity.writer == victim and identity.step in steps
        with small_files() if is_one else contextlib.nullcontext():
            return plain(directory, identity, *rest)

    save_module.write_shard = write
    return run_with(tree, lambda step: None)


def run_with_small_models(tree: dict[str, Any], failing: int) -> Ended:
    """While the model with number `failing` is written."""
    plain, written = train_save.write_hf, []

    def write(*arguments):
        written.append(1)
        with small_files() if len(written) == failing else contextlib.nullcontext():
            return plain(*arguments)

    train_save.write_hf = write
    return run_with(tree, lambda step: None)


@BOTH
@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_that_fails_on_one_rank_is_told_and_the_run_goes_on(
    ranks, tiny_data, tmp_path, victim, beside
):
    settings = {"train__max_steps": 12, "checkpoint__interval": 4, "optim__sharding": "so"}
    train_on(ranks, 2, tiny_tree(tiny_data, tmp_path / "unbroken", **settings))
    tree = tiny_tree(tiny_data, tmp_path / "run", **settings, checkpoint__async_save=beside)
    ended = ranks(2, run_with_small_files, tree, victim, [8], start_world=False)
    assert [one[:2] for one in ended] == [(0, "")] * 2
    assert warnings(ended[0]) == [
        f"optimus: WARNING: step 8 is not saved: step-00000008/shard-0000{victim}.bin not written: "
        "File too large; the newest checkpoint is step-00000004; the run goes on (failure 1 of 3 "
        "in a row)"
    ]
    assert not warnings(ended[1])
    assert steps_kept(tmp_path / "run") == [4, 12]
    assert_same_run(tmp_path / "unbroken", tmp_path / "run")


@BOTH
def test_too_many_failures_in_a_row_end_the_run(ranks, tiny_data, tmp_path, beside):
    settings = {"checkpoint__interval": 3, "checkpoint__max_failures": 2, "optim__sharding": "so"}
    tree = tiny_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=beside)
    ended = ranks(2, run_with_small_files, tree, 1, range(4, 99), start_world=False)
    assert ended[0][:2] == ended[1][:2] and ended[0].status == 1
    assert "step 9 is not saved" in ended[0].message and "max_failures = 2" in ended[0].message
    assert "the newest checkpoint is step-00000003" in ended[0].message
    assert len(warnings(ended[0])) == 1
    assert steps_kept(tmp_path) == [3]
    assert len(metrics_of(tmp_path)) in ((10, 11, 12) if beside else (9,))


@BOTH
def test_a_last_checkpoint_that_fails_ends_the_run_in_error(ranks, tiny_data, tmp_path, beside):
    settings = {"train__max_steps": 6, "checkpoint__interval": 3, "checkpoint__max_failures": 0}
    tree = tiny_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=beside)
    ended = ranks(2, run_with_small_files, tree, 1, [6], start_world=False)
    assert ended[0][:2] == ended[1][:2] and ended[0].status == 1
    assert "the newest checkpoint is step-00000003; mend it" in ended[0].message
    assert steps_kept(tmp_path) == [3]


@BOTH
def test_a_model_that_the_first_rank_cannot_write_fails_on_all_alike(
    ranks, tiny_data, tmp_path, beside
):
    settings = {"train__max_steps": 9, "checkpoint__model_interval": 3, "checkpoint__interval": 0}
    tree = tiny_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=beside)
    ended = ranks(2, run_with_small_models, tree, 2, start_world=False)
    assert [one[:2] for one in ended] == [(0, "")] * 2
    (told,) = warnings(ended[0])
    assert "step 6 is not saved: model" in told and "File too large" in told
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["model-00000003", "model-00000009", "step-00000009"]
    for name in names:
        manager.read_manifest(tmp_path / "checkpoints" / name).verify()


def run_with_a_bad_moment(tree: dict[str, Any]) -> Ended:
    """On the second rank, behind update 4; it is mended before update 5, which it would spoil."""
    mend = []

    def poke(run: Run) -> None:
        if run.world.rank == 1 and run.states.num_updates == 4:
            moments = run.states.chunks[0].exp_avg
            mend.append(partial(moments.copy_, moments.clone()))
            moments[3] = torch.nan

    def before(step: int) -> None:
        if step == 5 and mend:
            mend[0]()

    return run_with(tree, before, poke)


@BOTH
def test_what_is_not_finite_is_never_sealed(ranks, tiny_data, tmp_path, beside):
    settings = {"checkpoint__interval": 2, "optim__sharding": "so"}
    tree = tiny_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=beside)
    ended = ranks(2, run_with_a_bad_moment, tree, start_world=False)
    assert ended[0][:2] == ended[1][:2] and ended[0].status == 4
    assert "step 4: the update made first moment of " in ended[0].message
    assert steps_kept(tmp_path) == [2]


def lose_the_second_rank(tree: dict[str, Any]) -> Ended:
    """Before update 6, while step 4 is being written on both."""
    hold_writes({4: 1000})

    def before(step: int) -> None:
        if step == 6 and read_launch_env().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return run_with(tree, before)


def test_a_rank_lost_while_a_save_is_under_way_leaves_the_slot_before(ranks, tiny_data, tmp_path):
    settings = {"train__max_steps": 8, "checkpoint__interval": 2, "checkpoint__async_save": True}
    train_on(ranks, 2, tiny_tree(tiny_data, tmp_path / "unbroken", **settings))
    tree = tiny_tree(tiny_data, tmp_path / "run", **settings)
    with pytest.raises(RanksFailed) as failed:
        ranks(2, lose_the_second_rank, tree, start_world=False)
    assert failed.value.outcomes[0].value().status == 5
    assert manager.newest_valid(tmp_path / "run").step == 2
    train_on(ranks, 2, tree)
    assert steps_kept(tmp_path / "run") == [6, 8]
    assert_same_run(tmp_path / "unbroken", tmp_path / "run")


def lose_the_first_rank_as_a_save_begins(tree: dict[str, Any]) -> Ended:
    plain = save_module.FullSaver.begin

    def begin(*arguments: Any, **facts: Any) -> Any:
        if read_launch_env().rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **facts)

    save_module.FullSaver.begin = begin
    return run_with(tree, lambda step: None)


@BOTH
def test_a_rank_lost_as_a_save_begins_is_no_failed_save(ranks, tiny_data, tmp_path, beside):
    settings = {"train__max_steps": 3, "checkpoint__interval": 0, "checkpoint__async_save": beside}
    with pytest.raises(RanksFailed) as failed:
        tree = tiny_tree(tiny_data, tmp_path, **settings)
        ranks(2, lose_the_first_rank_as_a_save_begins, tree, start_world=False)
    assert failed.value.outcomes[1].value().status == LostPeerError.exit_code


def stop_the_second_rank(tree: dict[str, Any], how: str) -> Ended:
    """Before update 6, while step 4 is being written on both."""
    let = hold_writes({4: 6})

    def before(step: int) -> None:
        let(step)
        if step == 6 and read_launch_env().rank == 1 and how != "nan":
            os.kill(os.getpid(), getattr(signal, how))

    def behind(run: Run) -> None:
        if how == "nan" and run.world.rank == 1 and run.states.num_updates == 5:
            next(run.model.parameters()).data.view(-1)[0] = torch.nan

    return run_with(tree, before, behind)


@pytest.mark.parametrize(
    ("how", "status", "kept"), [("SIGTERM", 3, [4, 6]), ("SIGUSR1", 3, [4, 6]), ("nan", 4, [4])]
)
def test_a_save_under_way_is_sealed_when_all_ranks_end(
    ranks, tiny_data, tmp_path, how, status, kept
):
    tree = tiny_tree(tiny_data, tmp_path, checkpoint__interval=4, checkpoint__async_save=True)
    ended = ranks(2, stop_the_second_rank, tree, how, start_world=False)
    assert ended[0][:2] == ended[1][:2] and ended[0].status == status, ended
    assert steps_kept(tmp_path) == kept


def test_the_deadline_stops_a_run_behind_a_checkpoint(ranks, tiny_data, tmp_path):
    settings = {"train__deadline_s": 0.01, "checkpoint__interval": 1}
    tree = tiny_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=True)
    ended = ranks(2, run_with_held_writes, tree, {}, start_world=False)
    assert ended[0][:2] == ended[1][:2] and ended[0].status == 3
    assert "the deadline has passed" in ended[0].message
    assert len(metrics_of(tmp_path)) == 1 and steps_kept(tmp_path) == [1]


def a_deadline_that_has_passed() -> str | None:
    time.sleep(0.2)  # as long imports, checks and a meeting
    return StopRequest(0.2).agreed(ALONE, torch.device("cpu"))


def test_the_deadline_counts_from_the_start_of_the_process(ranks):
    assert ranks(1, a_deadline_that_has_passed) == ["the deadline has passed"]


def run_with_a_hanging_disk(tree: dict[str, Any]) -> Ended:
    """The second rank's write of step 4 hangs until update 10."""
    return run_with(tree, hold_writes({4: 10} if read_launch_env().rank == 1 else {}))


@BOTH
def test_a_disk_that_hangs_holds_nobody_up_for_longer_than_the_limit(
    ranks, tiny_data, tmp_path, beside
):
    settings = {"checkpoint__interval": 4, "train__max_steps": 12, "checkpoint__timeout_s": 3.0}
    tree = tiny_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=beside)
    ended = ranks(2, run_with_a_hanging_disk, tree, start_world=False)
    assert [one[:2] for one in ended] == [(0, "")] * 2
    first, second = warnings(ended[0])
    assert "step-00000004 not written within checkpoint.timeout_s = 3: the disk of rank 1" in first
    assert "step 8 is not saved: the disk has not taken what step 4 gave it" in second
    assert steps_kept(tmp_path) == [12]
    assert len(metrics_of(tmp_path)) == 12


def run_on_a_full_disk(tree: dict[str, Any], folder: str) -> Ended:
    """No byte is free from update 8 to before update 18."""
    filler = Path(folder) / "filler"

    def before(step: int) -> None:
        if read_launch_env().rank == 0 and step == 8:
            with pytest.raises(OSError, match="No space"), open(filler, "wb", 0) as file:
                while file.write(bytes(1 << 16)):
                    pass
        if read_launch_env().rank == 0 and step == 18:
            filler.unlink()

    return run_with(tree, before)


def run_on_a_read_only_disk(tree: dict[str, Any], folder: str) -> Ended:
    """What is mounted there takes nothing from update 12 to before update 21."""

    def before(step: int) -> None:
        if read_launch_env().rank == 0 and step in (12, 21):
            how = "ro" if step == 12 else "rw"
            subprocess.run(["mount", "-o", f"remount,{how}", folder], check=True)

    return run_with(tree, before)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 3 MB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "optimus-test", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@BOTH
def test_a_full_disk_harms_nothing_and_is_used_again(
    ranks, tiny_data, tmp_path, small_disk, beside
):
    """Not even metrics find room; they are written later."""
    settings = {"checkpoint__interval": 5, "checkpoint__model_interval": 5}
    settings |= {"checkpoint__keep_models": 1, "observe__tensorboard": True}
    train_on(ranks, 2, tiny_tree(tiny_data, tmp_path / "unbroken", **settings))
    run = small_disk / "run"
    tree = tiny_tree(tiny_data, run, **settings, checkpoint__async_save=beside)
    ended = ranks(2, run_on_a_full_disk, tree, str(small_disk), start_world=False)
    assert [one[:2] for one in ended] == [(0, "")] * 2, ended
    told = warnings(ended[0])
    for step in (10, 15):
        for kind in ("step", "model"):
            words = f"WARNING: step {step} is not saved: {kind}-000000{step} not written: "
            assert any(words in line and "make room" in line for line in told), told
    assert any("metrics.jsonl: No space left on device; its lines wait" in line for line in told)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["model-00000020", "step-00000005", "step-00000020"]
    for name in names:
        manager.read_manifest(run / "checkpoints" / name).verify()
    assert_same_run(tmp_path / "unbroken", run)


@BOTH
def test_a_directory_that_takes_nothing_harms_nothing(
    ranks, tiny_data, tmp_path, small_disk, beside
):
    settings = {"train__max_steps": 24, "checkpoint__interval": 6, "checkpoint__async_save": beside}
    run = tmp_path / "run"
    run.mkdir()
    (run / "checkpoints").symlink_to(small_disk)
    tree = tiny_tree(tiny_data, run, **settings)
    ended = ranks(2, run_on_a_read_only_disk, tree, str(small_disk), start_world=False)
    assert [one[:2] for one in ended] == [(0, "")] * 2, ended
    told = warnings(ended[0])
    assert len(told) == 2 and all("Read-only file system" in line for line in told), told
    assert steps_kept(run) == [6, 24]


def run_with_waiting_lines(tree: dict[str, Any], steps: Sequence[int]) -> Ended:
    """The disk of metrics.jsonl takes nothing in these steps; that of checkpoints does."""
    plain = JsonLines._write

    def before(step: int) -> None:
        def write(lines: JsonLines) -> None:
            if step in steps:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            plain(lines)

        JsonLines._write = write

    return run_with(tree, before)


@BOTH
def test_no_checkpoint_is_sealed_that_the_curve_does_not_reach(ranks, tiny_data, tmp_path, beside):
    settings = {"train__max_steps": 12, "checkpoint__interval": 4, "checkpoint__async_save": beside}
    tree = tiny_tree(tiny_data, tmp_path, **settings)
    ended = ranks(2, run_with_waiting_lines, tree, (7, 8, 9, 10, 11), start_world=False)
    assert [one[:2] for one in ended] == [(0, "")] * 2, ended
    words = "step 8 is not saved: step-00000008 not written: "
    (told,) = (line for line in warnings(ended[0]) if words in line)
    assert "metrics.jsonl: No space left on device" in told
    assert steps_kept(tmp_path) == [4, 12]
    assert [line["step"] for line in metrics_of(tmp_path)] == list(range(1, 13))


def run_with_room_for_one(tree: dict[str, Any]) -> Ended:
    """There is room for a full checkpoint and for a model, but a byte too little for both."""
    plain = shutil.disk_usage

    def behind(run: Run) -> None:
        free = run.saves._saver.bytes + run.saves._model_bytes - 1
        shutil.disk_usage = lambda path: plain(path)._replace(free=free)

    return run_with(tree, lambda step: None, behind)


@BOTH
def test_where_there_is_no_room_for_both_the_full_one_is_saved(ranks, tiny_data, tmp_path, beside):
    settings = {"checkpoint__interval": 10, "checkpoint__model_interval": 5}
    tree = tiny_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=beside)
    ended = ranks(2, run_with_room_for_one, tree, start_world=False)
    told = warnings(ended[0])
    assert "step 10 is not saved: model-00000010 not written: " in told[0], ended
    assert ended[0].status == 1 and "step 20 is not saved: model-00000020" in ended[0].message
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["model-00000005", "model-00000015", "step-00000010", "step-00000020"]


@BOTH
def test_a_model_that_a_kill_left_unmade_is_made_as_the_run_goes_on(
    ranks, tiny_data, tmp_path, beside
):
    """The full one of its step had been sealed; both stages have a part of it."""
    settings = {"checkpoint__model_interval": 5, "parallel__pp": 2}
    settings |= {"checkpoint__async_save": beside}
    tree = tiny_tree(tiny_data, tmp_path, **settings, train__stop_at_step=10)
    train_on(ranks, 2, tree)
    model = manager.model_path(tmp_path, 10)
    made = {path.name: path.read_bytes() for path in model.glob("*.safetensors")}
    shutil.rmtree(model)
    train_on(ranks, 2, tiny_tree(tiny_data, tmp_path, **settings, train__stop_at_step=11))
    manager.read_manifest(model).verify()
    assert made == {path.name: path.read_bytes() for path in model.glob("*.safetensors")} != {}
    assert (
        manager.read_manifest(model).tokens
        == manager.read_manifest(manager.full_path(tmp_path, 10)).tokens
    )


def run_and_note_order(tree: dict[str, Any]) -> list[str]:
    """What was made durable and renamed, in order, by the name of the file."""
    order, plain_fsync, plain_rename = [], os.fsync, os.rename

    def fsync(fd: int) -> None:
        plain_fsync(fd)
        order.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")

    def rename(old: Any, new: Any) -> None:
        plain_rename(old, new)
        order.append(f"rename {Path(new).name}")

    os.fsync, os.rename = fsync, rename
    assert run_with(tree, lambda step: None)[:2] == (0, "")
    return order


@BOTH
def test_the_curve_is_durable_before_the_checkpoint_that_goes_on_from_it(
    ranks, tiny_data, tmp_path, beside
):
    """And the oldest slot leaves its name only behind the seal of the newest."""
    settings = {"train__max_steps": 3, "checkpoint__interval": 1, "checkpoint__async_save": beside}
    tree = tiny_tree(tiny_data, tmp_path, **settings)
    (order,) = ranks(1, run_and_note_order, tree, start_world=False)
    for step in (1, 2, 3):
        sealed = order.index(f"rename step-{step:08d}")
        manifest = max(n for n in range(sealed) if order[n] == "rename manifest.json")
        begun = order.index(f"rename step-{step - 1:08d}") if step > 1 else 0
        for needed in ("fsync metrics.jsonl", "fsync shard-00000.bin", "fsync index.jsonl"):
            assert needed in order[begun:manifest], (step, needed)
        assert order[sealed + 1] == "fsync checkpoints"
    removed = next(n for n, what in enumerate(order) if what.startswith("rename .step-00000001."))
    assert removed > order.index("rename step-00000003") + 1


def stop_and_look(tree: dict[str, Any]) -> bool:
    """Whether the checkpoint of the last step stands when it is evaluated."""
    plain, found = Run.evaluate, []

    def evaluate(run: Run, step: int) -> None:
        plain(run, step)
        found.append(manager.full_path(tree["train"]["run_dir"], step).is_dir())

    def before(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    Run.evaluate = evaluate
    assert run_with(tree, before).status == 3
    assert found[:-1] == [False] * 3
    return found[-1]


def test_who_is_asked_to_stop_saves_before_anything_else(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path, train__eval_interval=1)
    tree["data"]["eval_path"] = str(tiny_data / "eval")
    assert ranks(2, stop_and_look, tree, start_world=False) == [True, True]
    assert len((tmp_path / "eval.jsonl").read_text().splitlines()) == 4
