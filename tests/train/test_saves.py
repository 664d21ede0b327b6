"""Saves during training, saves that fail, and runs that end during a save."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from optimus.checkpoint import save as save_module
from optimus.checkpoint import store
from optimus.checkpoint.weights import ModelSaver
from optimus.distributed.collectives import ALONE
from optimus.distributed.world import start_world
from optimus.errors import OutcomeKind
from optimus.hf.weights import pieces
from optimus.launch.environment import read_launch_env
from optimus.train import save as save_steps
from optimus.train.loop import Run
from optimus.train.stop import StopRequest
from tests.kit.ranks.pool import RanksFailed
from tests.kit.runs.results import assert_same_run, metrics_of, read_whole
from tests.kit.runs.saves import SYNC_AND_ASYNC, delay_writes, full_states, steps_kept
from tests.kit.runs.tiny import small_batch_tree, tiny_tree
from tests.kit.runs.training import Ended, printed_by, run_with, train_on


def run_with_delayed_writes(tree: dict[str, Any], until: dict[int, int]) -> Ended:
    return run_with(tree, delay_writes(until))


@pytest.mark.parametrize(
    ("size", "variant"),
    [
        (1, {}),
        (2, {}),
        (2, {"train__dtype": "bf16", "optim__frozen": ["embed.weight"]}),
        (4, {"parallel__pp": 2, "checkpoint__scatter": "paper", "model__tie_embeddings": True}),
        (4, {"parallel__tp": 2, "parallel__ep": 2, "optim__sharding": "epso"}),
    ],
)
def test_async_saves_write_the_files_of_sync_saves(ranks, tiny_data, tmp_path, size, variant):
    """The asynchronous write of step 4 ends after later updates have changed the states. The
    written files must equal the files that synchronous saves write."""
    both = {"train__max_steps": 8, "checkpoint__interval": 4, "optim__sharding": "so"} | variant
    both |= {"checkpoint__model_interval": 4}
    train_on(ranks, size, small_batch_tree(tiny_data, tmp_path / "sync", **both))
    tree = small_batch_tree(tiny_data, tmp_path / "async", **both, checkpoint__async_save=True)
    ended = ranks(size, run_with_delayed_writes, tree, {4: 7}, start_world=False, timeout_s=120)
    assert [rank_end[:2] for rank_end in ended] == [(0, "")] * size
    assert_same_run(tmp_path / "sync", tmp_path / "async")
    assert full_states(tmp_path / "sync") == full_states(tmp_path / "async")
    for step in (4, 8):
        paths = [store.model_path(tmp_path / run, step) for run in ("sync", "async")]
        sync, written = ((path / "model.safetensors").read_bytes() for path in paths)
        assert sync == written == library_bytes(tmp_path / "sync", step)


def library_bytes(run_dir: Path, step: int) -> bytes:
    """Read the masters of the full checkpoint of step `step`, and convert them to bf16. Return the
    bytes of the file that the library safetensors writes for the converted tensors."""
    manifest, named = store.read_manifest(store.full_path(run_dir, step)), {}
    whole = {name: torch.empty(shape) for name, shape in manifest.index().shapes.items()}
    read_whole(manifest, whole)
    for name, tensor in whole.items():
        for hf_name, view in pieces(name, tensor.bfloat16()):
            named[hf_name] = view.contiguous()
    return safetensors.torch.save(named, {"format": "pt"})


@contextlib.contextmanager
def small_files() -> Iterator[None]:
    """Limit each file that this process writes to 20 kB."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def run_with_small_files(tree: dict[str, Any], victim: int, steps: Sequence[int]) -> Ended:
    """Train. On rank `victim`, writes of the full checkpoints of `steps` fail, because the files
    exceed a limit of 20 kB."""
    plain = save_module.write_shard

    def write(directory, identity, *rest):
        fails = identity.writer == victim and identity.step in steps
        with small_files() if fails else contextlib.nullcontext():
            return plain(directory, identity, *rest)

    save_module.write_shard = write
    return run_with(tree, lambda step: None)


def run_with_small_models(tree: dict[str, Any], victim: int, failing: int) -> Ended:
    """Train. On rank `victim`, the write of the model-only checkpoint of step `failing` fails,
    because the file exceeds a limit of 20 kB."""
    plain = ModelSaver._write

    def write(saver, states, generation, step, stop):
        fails = states.groups.everyone.rank == victim and step == failing
        with small_files() if fails else contextlib.nullcontext():
            return plain(saver, states, generation, step, stop)

    ModelSaver._write = write
    return run_with(tree, lambda step: None)


@SYNC_AND_ASYNC
@pytest.mark.parametrize("victim", [0, 1])
def test_save_that_fails_on_a_rank_is_reported_and_the_run_continues(
    ranks, tiny_data, tmp_path, victim, async_save
):
    settings = {"train__max_steps": 12, "checkpoint__interval": 4, "optim__sharding": "so"}
    train_on(ranks, 2, small_batch_tree(tiny_data, tmp_path / "unbroken", **settings))
    tree = small_batch_tree(
        tiny_data, tmp_path / "run", **settings, checkpoint__async_save=async_save
    )
    ended = ranks(2, run_with_small_files, tree, victim, [8], start_world=False)
    assert [rank_end[:2] for rank_end in ended] == [(0, "")] * 2
    assert ended[0].warnings() == [
        f"optimus: warning: step 8 is not saved: step-00000008/shard-0000{victim}.bin not written: "
        "File too large; the newest checkpoint is step-00000004; the run continues (failure 1 of 3 "
        "in a row)"
    ]
    assert not ended[1].warnings()
    assert steps_kept(tmp_path / "run") == [4, 12]
    assert_same_run(tmp_path / "unbroken", tmp_path / "run")


@SYNC_AND_ASYNC
def test_too_many_failures_in_a_row_end_the_run(ranks, tiny_data, tmp_path, async_save):
    settings = {"checkpoint__interval": 3, "checkpoint__max_failures": 2, "optim__sharding": "so"}
    tree = small_batch_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=async_save)
    ended = ranks(2, run_with_small_files, tree, 1, range(4, 99), start_world=False)
    assert ended[0][:2] == ended[1][:2] and ended[0].status == 1
    assert "step 9 is not saved" in ended[0].message
    assert "2 saves in a row have failed, the limit of checkpoint.max_failures" in ended[0].message
    assert "the newest checkpoint is step-00000003" in ended[0].message
    assert len(ended[0].warnings()) == 1
    assert steps_kept(tmp_path) == [3]
    assert len(metrics_of(tmp_path)) in ((10, 11, 12) if async_save else (9,))


@SYNC_AND_ASYNC
def test_failure_of_the_last_checkpoint_ends_the_run_in_error(
    ranks, tiny_data, tmp_path, async_save
):
    settings = {"train__max_steps": 6, "checkpoint__interval": 3, "checkpoint__max_failures": 0}
    tree = small_batch_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=async_save)
    ended = ranks(2, run_with_small_files, tree, 1, [6], start_world=False)
    assert ended[0][:2] == ended[1][:2] and ended[0].status == 1
    assert "the newest checkpoint is step-00000003; fix the problem" in ended[0].message
    assert steps_kept(tmp_path) == [3]


def run_and_record_starts(tree: dict[str, Any]) -> list[str]:
    plain, started = store.create, []

    def begin(path: Path, *free_bytes: int) -> Path:
        started.append(path.name)
        return plain(path, *free_bytes)

    store.create = begin
    assert run_with(tree, lambda step: None).status == 0
    return started


@SYNC_AND_ASYNC
def test_full_checkpoint_starts_before_the_model_of_its_step(
    ranks, tiny_data, tmp_path, async_save
):
    """In a step with both saves, the save of the full checkpoint must start first, because a run
    can be killed between the saves. A missing model-only checkpoint can be written from a full
    checkpoint, but not the reverse."""
    settings = {"train__max_steps": 6, "checkpoint__interval": 4, "checkpoint__model_interval": 2}
    tree = small_batch_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=async_save)
    (started,) = ranks(1, run_and_record_starts, tree, start_world=False)
    steps = ("model", 2), ("step", 4), ("model", 4), ("step", 6), ("model", 6)
    assert started == [f"{kind}-{step:08}" for kind, step in steps]


@SYNC_AND_ASYNC
@pytest.mark.parametrize("victim", [0, 1])
def test_model_that_a_rank_cannot_write_fails_on_all_ranks(
    ranks, tiny_data, tmp_path, victim, async_save
):
    settings = {"train__max_steps": 9, "checkpoint__model_interval": 3, "checkpoint__interval": 0}
    tree = small_batch_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=async_save)
    ended = ranks(2, run_with_small_models, tree, victim, 6, start_world=False)
    assert [rank_end[:2] for rank_end in ended] == [(0, "")] * 2
    (warning,) = ended[0].warnings()
    words = f"step 6 is not saved: model-00000006/weights of rank {victim} not written: File too"
    assert words in warning
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["model-00000003", "model-00000009", "step-00000009"]
    for name in names:
        store.read_manifest(tmp_path / "checkpoints" / name).verify()


def run_with_a_bad_moment(tree: dict[str, Any]) -> Ended:
    """Train. A moment of rank 1 is NaN while step 4 is saved, and is restored before update 5."""
    restores = []

    def poke(run: Run) -> None:
        if run.world.rank == 1 and run.states.optimizer.num_updates == 4:
            moments = run.states.chunks[0].moments["exp_avg"]
            restores.append(partial(moments.copy_, moments.clone()))
            moments[3] = torch.nan

    def before(step: int) -> None:
        if step == 5 and restores:
            restores[0]()

    return run_with(tree, before, poke)


@SYNC_AND_ASYNC
def test_nonfinite_state_is_never_committed(ranks, tiny_data, tmp_path, async_save):
    settings = {"checkpoint__interval": 2, "optim__sharding": "so"}
    tree = small_batch_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=async_save)
    ended = ranks(2, run_with_a_bad_moment, tree, start_world=False)
    assert ended[0][:2] == ended[1][:2] and ended[0].status == 4
    message, marker = ended[0].message, tmp_path / "log" / "nonfinite-rank1.json"
    assert "non-finite values on rank 1 (" in message and " step 4" in message
    assert "exp_avg" in message and "learning rate" not in message
    report = json.loads(marker.read_text())
    assert (report["rank"], report["step"]) == (1, 4) and report["what"] in message
    assert steps_kept(tmp_path) == [2]


def lose_the_second_rank(tree: dict[str, Any]) -> Ended:
    """Train, and kill rank 1 before update 6, while both ranks write the checkpoint of step 4."""
    delay_writes({4: 1000})

    def before(step: int) -> None:
        if step == 6 and read_launch_env().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    return run_with(tree, before)


def test_rank_lost_during_a_save_keeps_the_previous_checkpoint(ranks, tiny_data, tmp_path):
    settings = {"train__max_steps": 8, "checkpoint__interval": 2, "checkpoint__async_save": True}
    train_on(ranks, 2, small_batch_tree(tiny_data, tmp_path / "unbroken", **settings))
    tree = small_batch_tree(tiny_data, tmp_path / "run", **settings)
    with pytest.raises(RanksFailed) as failed:
        ranks(2, lose_the_second_rank, tree, start_world=False)
    assert failed.value.outcomes[0].value().status == 5
    assert store.newest_valid(tmp_path / "run").step == 2
    train_on(ranks, 2, tree)
    assert steps_kept(tmp_path / "run") == [6, 8]
    assert_same_run(tmp_path / "unbroken", tmp_path / "run")


def lose_the_first_rank_as_a_save_begins(tree: dict[str, Any]) -> Ended:
    plain = save_module.FullSaver.begin

    def begin(*arguments: Any, **keywords: Any) -> Any:
        if read_launch_env().rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **keywords)

    save_module.FullSaver.begin = begin
    return run_with(tree, lambda step: None)


@SYNC_AND_ASYNC
def test_rank_lost_as_a_save_begins_is_not_a_failed_save(ranks, tiny_data, tmp_path, async_save):
    settings = {
        "train__max_steps": 3,
        "checkpoint__interval": 0,
        "checkpoint__async_save": async_save,
    }
    with pytest.raises(RanksFailed) as failed:
        tree = small_batch_tree(tiny_data, tmp_path, **settings)
        ranks(2, lose_the_first_rank_as_a_save_begins, tree, start_world=False)
    assert failed.value.outcomes[1].value().status == OutcomeKind.LOST_PEER.exit_status


def stop_the_second_rank(tree: dict[str, Any], reason: str) -> Ended:
    """Train, and end the run while both ranks write the checkpoint of step 4. If `reason` is the
    name of a signal, rank 1 receives the signal. If `reason` is "nan", a weight of rank 1 becomes
    NaN after update 5."""
    release_writes = delay_writes({4: 6})

    def before(step: int) -> None:
        release_writes(step)
        if step == 6 and read_launch_env().rank == 1 and reason != "nan":
            os.kill(os.getpid(), getattr(signal, reason))

    def after(run: Run) -> None:
        if reason == "nan" and run.world.rank == 1 and run.states.optimizer.num_updates == 5:
            next(run.model.parameters()).data.view(-1)[0] = torch.nan

    return run_with(tree, before, after)


@pytest.mark.parametrize(
    ("reason", "status", "kept"), [("SIGTERM", 3, [4, 6]), ("SIGUSR1", 3, [4, 6]), ("nan", 4, [4])]
)
def test_save_in_progress_is_committed_when_all_ranks_end(
    ranks, tiny_data, tmp_path, reason, status, kept
):
    tree = tiny_tree(tiny_data, tmp_path, checkpoint__interval=4, checkpoint__async_save=True)
    ended = ranks(2, stop_the_second_rank, tree, reason, start_world=False)
    assert ended[0][:2] == ended[1][:2] and ended[0].status == status, ended
    stopped = (
        f"stopped after step 6 ({reason}), checkpoint at {tmp_path}/checkpoints/step-00000006;"
    )
    assert reason == "nan" or ended[0].message.startswith(stopped)
    assert steps_kept(tmp_path) == kept


def test_deadline_stops_a_run_after_a_checkpoint(ranks, tiny_data, tmp_path):
    settings = {"train__deadline_s": 0.01, "checkpoint__interval": 1}
    tree = small_batch_tree(tiny_data, tmp_path, **settings, checkpoint__async_save=True)
    ended = ranks(2, run_with_delayed_writes, tree, {}, start_world=False)
    assert ended[0][:2] == ended[1][:2] and ended[0].status == 3
    assert "the deadline has passed" in ended[0].message
    assert len(metrics_of(tmp_path)) == 1 and steps_kept(tmp_path) == [1]


def reason_after_a_deadline() -> str | None:
    time.sleep(0.2)  # simulates imports, checks and the rendezvous
    return StopRequest(0.2).agreed(ALONE, torch.device("cpu"))


def test_deadline_counts_from_the_start_of_the_process(ranks):
    assert ranks(1, reason_after_a_deadline) == ["the deadline has passed"]


def run_on_full_disk(tree: dict[str, Any]) -> str:
    """Train on a disk without space for the tokenizer files of transformers. Return the standard
    error."""

    def complete_hf(*_: object) -> list[str]:
        raise OSError(errno.ENOSPC, "No space left on device", "tokenizer_config.json")

    save_steps.complete_hf = complete_hf
    return printed_by(tree)


def test_model_whose_tokenizer_does_not_fit_is_not_committed(ranks, tiny_data, tmp_path):
    tree = small_batch_tree(tiny_data, tmp_path, train__max_steps=3, checkpoint__model_interval=2)
    (output,) = ranks(1, run_on_full_disk, tree, start_world=False)
    assert "warning: step 2 is not saved" in output and "No space left on device" in output
    assert not store.model_path(tmp_path, 2).exists()


def stop_by_two_signals() -> str | None:
    """Send signals to two ranks. Return the reason of the stop on which the ranks agree.

    Rank 0 receives SIGINT and, while the handler of SIGINT runs, SIGTERM. Rank 1 receives only
    SIGTERM.
    """
    world = start_world()
    request, plain = StopRequest(0), signal.signal

    def interrupted(number: int, handler: Any) -> Any:
        before = plain(number, handler)
        signal.raise_signal(signal.SIGTERM)
        return before

    if world.is_first:
        signal.signal = interrupted
        signal.raise_signal(signal.SIGINT)
        signal.signal = plain
    else:
        signal.raise_signal(signal.SIGTERM)
    return request.agreed(world.everyone, torch.device("cpu"))


def test_ctrl_c_is_the_reason_where_sigterm_follows_it(ranks):
    assert ranks(2, stop_by_two_signals, start_world=False) == ["Ctrl-C", "Ctrl-C"]


@SYNC_AND_ASYNC
def test_model_missing_after_a_kill_is_written_on_resume(ranks, tiny_data, tmp_path, async_save):
    """A run was killed before it wrote the model-only checkpoint of step 10. The resumed run must
    write this checkpoint from the full checkpoint of step 10."""
    settings = {"checkpoint__model_interval": 5, "parallel__pp": 2}
    settings |= {"checkpoint__async_save": async_save}
    tree = small_batch_tree(tiny_data, tmp_path, **settings, train__stop_at_step=10)
    train_on(ranks, 2, tree)
    model = store.model_path(tmp_path, 10)
    written = {path.name: path.read_bytes() for path in model.glob("*.safetensors")}
    shutil.rmtree(model)
    train_on(ranks, 2, small_batch_tree(tiny_data, tmp_path, **settings, train__stop_at_step=11))
    store.read_manifest(model).verify()
    assert written == {path.name: path.read_bytes() for path in model.glob("*.safetensors")} != {}
    assert (
        store.read_manifest(model).tokens
        == store.read_manifest(store.full_path(tmp_path, 10)).tokens
    )


def run_and_record_order(tree: dict[str, Any]) -> list[str]:
    """Train. Return the calls of os.fsync and os.rename in order, as texts. Each text contains the
    name of the function and the name of the file. For os.rename, this is the file's new name."""
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


@SYNC_AND_ASYNC
def test_metrics_are_durable_before_the_checkpoint_of_their_step(
    ranks, tiny_data, tmp_path, async_save
):
    """metrics.jsonl, and the files of a checkpoint, must be fsynced before the checkpoint is
    committed (renamed). An old checkpoint must be removed only after the commit of the new
    checkpoint."""
    settings = {
        "train__max_steps": 3,
        "checkpoint__interval": 1,
        "checkpoint__async_save": async_save,
    }
    tree = small_batch_tree(tiny_data, tmp_path, **settings)
    (order,) = ranks(1, run_and_record_order, tree, start_world=False)
    for step in (1, 2, 3):
        committed = order.index(f"rename step-{step:08d}")
        manifest = max(n for n in range(committed) if order[n] == "rename manifest.json")
        start = order.index(f"rename step-{step - 1:08d}") if step > 1 else 0
        for needed in ("fsync metrics.jsonl", "fsync shard-00000.bin", "fsync index.jsonl"):
            assert needed in order[start:manifest], (step, needed)
        assert order[committed + 1] == "fsync checkpoints"
    removed = next(
        n for n, call in enumerate(order) if call.startswith("rename .removed-step-00000001.")
    )
    assert removed > order.index("rename step-00000003") + 1


def stop_and_check_order(tree: dict[str, Any]) -> bool:
    """Stop a run by a signal in step 4. Return True if the checkpoint of step 4 exists when the
    evaluation of step 4 ends."""
    plain, exists = Run.evaluate, []

    def evaluate(run: Run, step: int) -> None:
        plain(run, step)
        exists.append(store.full_path(tree["train"]["run_dir"], step).is_dir())

    def before(step: int) -> None:
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    Run.evaluate = evaluate
    assert run_with(tree, before).status == 3
    assert exists[:-1] == [False] * 3
    return exists[-1]


def test_stopped_run_saves_before_it_evaluates(ranks, tiny_data, tmp_path):
    tree = small_batch_tree(tiny_data, tmp_path, train__eval_interval=1)
    tree["data"]["eval_path"] = str(tiny_data / "eval")
    assert ranks(2, stop_and_check_order, tree, start_world=False) == [True, True]
    assert len((tmp_path / "eval.jsonl").read_text().splitlines()) == 4
