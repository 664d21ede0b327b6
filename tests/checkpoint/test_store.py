"""Tests of the choice of the checkpoint from which a run starts, of the removal of old checkpoints,
and of quarantine."""

from __future__ import annotations

import errno
import shutil
import subprocess

import pytest

from optimus.checkpoint import store
from optimus.checkpoint.index import ADAMW_STATES, INDEX, encode
from optimus.checkpoint.store import write_checkpoint
from optimus.errors import CheckpointError
from optimus.io import files
from optimus.io.workspace import find_workspaces
from tests.kit.faults.disk import immutable

NO_TENSORS = (2).to_bytes(8, "little") + b"{}"


def save(run_dir, step, kind="full", origin="none", interval=100, first_step=None):
    path = (store.full_path if kind == "full" else store.model_path)(run_dir, step)

    def write(directory):
        (directory / "data").write_text(f"{step}")
        (directory / "config.toml").write_text("")
        if kind == "full":
            (directory / INDEX).write_bytes(encode("g", step, ADAMW_STATES, [], {}))
        else:
            (directory / "model.safetensors").write_bytes(NO_TENSORS)

    facts = {
        "settings": {"checkpoint.interval": interval},
        "origin": origin,
        "first_step": first_step,
    }
    return write_checkpoint(path, write, kind=kind, step=step, tokens=step * 10, **facts)


def damage(manifest):
    (manifest.path / "data").write_text("x" * len(str(manifest.step)))


def move_elsewhere(manifest, folder):
    """Move a checkpoint to another directory, and put a link at its path."""
    folder.mkdir(exist_ok=True)
    shutil.move(manifest.path, folder)
    manifest.path.symlink_to(folder / manifest.path.name)


def start_of(run_dir, load):
    start = store.decide_start(run_dir, load)
    store.prepare_directory(run_dir, start, store.open_workspace(run_dir))
    return start


@pytest.fixture
def weights(tmp_path):
    """Return a directory that is recognised as a Hugging Face directory."""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("{}")
    return tmp_path / "hf"


def names(run_dir):
    """Return the sorted names in `checkpoints/`, without workspaces (folders in which a start of a
    run prepares files)."""
    directory = store.checkpoints_dir(run_dir)
    workspaces = find_workspaces(directory)
    return sorted(path.name for path in directory.iterdir() if path not in workspaces)


def test_a_temporary_read_error_does_not_skip_the_newest_checkpoint(tmp_path, capsys, monkeypatch):
    save(tmp_path, 5)
    newest, plain, failures = save(tmp_path, 10), files.xxh3_file, [errno.EIO]

    def read(path):
        if path.parent == newest.path and failures:
            raise OSError(failures.pop(), "Input/output error")
        return plain(path)

    monkeypatch.setattr(files, "xxh3_file", read)
    assert store.decide_start(tmp_path, "auto").step == 10
    assert "reading a checkpoint again after an error: " in capsys.readouterr().err
    failures += [errno.EIO] * 2
    assert store.decide_start(tmp_path, "auto").step == 5


def test_retention_keeps_two_full_checkpoints_and_the_newest_models(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step)
        save(tmp_path, step, "model")
    store.remove_old(tmp_path, store.open_workspace(tmp_path), keep_models=0)
    assert [n for n in names(tmp_path) if n.startswith("step")] == [
        "step-00000004",
        "step-00000005",
    ]
    assert len([n for n in names(tmp_path) if n.startswith("model")]) == 5
    store.remove_old(tmp_path, store.open_workspace(tmp_path), keep_models=1)
    assert [n for n in names(tmp_path) if n.startswith("model")] == ["model-00000005"]


def test_retention_keeps_models_of_multiples(tmp_path):
    for step in range(1, 9):
        save(tmp_path, step, "model")
        store.remove_old(tmp_path, store.open_workspace(tmp_path), keep_models=2, keep_every=3)
    assert names(tmp_path) == [f"model-0000000{step}" for step in (3, 6, 7, 8)]


def test_remove_old_tries_all_checkpoints_and_returns_those_that_stay(tmp_path):
    """At first, a checkpoint and a file of another checkpoint cannot be removed."""
    for step in range(1, 7):
        save(tmp_path, step)
        save(tmp_path, step, "model")
    slot, model = store.full_path(tmp_path, 2), store.model_path(tmp_path, 3)
    for number in range(20):  # so that a listing has files after `data`
        (model / f"more-{number}").touch()
    with immutable(slot, model / "data"):
        workspace = store.open_workspace(tmp_path)
        left = store.remove_old(tmp_path, workspace, keep_models=2)
        (renamed,) = (path for path in left if path != slot)
        try:
            reasons = {slot: "Operation not permitted", renamed: "data: Operation not permitted"}
            assert left == reasons and files.is_temporary(renamed)
            kept = ["model-00000005", "model-00000006"]
            kept += ["step-00000002", "step-00000005", "step-00000006"]
            assert names(tmp_path) == kept and renamed.parent == workspace.path
            assert [path.name for path in renamed.iterdir()] == ["data"]
            assert store.remove_old(tmp_path, workspace, keep_models=2) == left
            workspace = store.open_workspace(tmp_path)
            assert not renamed.exists()
            renamed = workspace.path / renamed.name
            assert renamed in store.remove_old(tmp_path, workspace, keep_models=2)
        finally:
            subprocess.run(["chattr", "-i", str(renamed / "data")])
    assert store.remove_old(tmp_path, store.open_workspace(tmp_path), keep_models=2) == {}
    assert names(tmp_path) == [name for name in kept if name != "step-00000002"]


@pytest.mark.parametrize("kind", ["step", "model"])
def test_remove_old_counts_readable_checkpoints_only(tmp_path, kind):
    """A directory with a newer name and no manifest is not counted."""
    for step in (1, 2, 3):
        save(tmp_path, step, "full" if kind == "step" else kind)
    (store.checkpoints_dir(tmp_path) / f"{kind}-00000099").mkdir()
    assert store.remove_old(tmp_path, store.open_workspace(tmp_path), keep_models=2) == {}
    assert names(tmp_path) == [f"{kind}-{step:08d}" for step in (2, 3, 99)]


def test_an_unfinished_save_that_cannot_be_removed_is_named_and_the_run_starts(tmp_path, capsys):
    save(tmp_path, 5)
    unfinished = [files.temporary_name(store.full_path(tmp_path, step)) for step in (6, 7)]
    for path in unfinished:
        path.mkdir()
        (path / "shard-00000.bin").write_bytes(b"x")
    with immutable(unfinished[0]):
        assert start_of(tmp_path, "auto").step == 5
        assert names(tmp_path) == [unfinished[0].name, "step-00000005"]
    message = capsys.readouterr().err.splitlines()
    assert f"cannot remove {unfinished[0]}: shard-00000.bin: Operation not permitted" in message[0]
    assert "GB free; remove the directories above by hand" in message[1] and len(message) == 2


def test_a_checkpoint_that_cannot_be_moved_to_quarantine_ends_the_start(tmp_path):
    """With `checkpoint.load=none`, a start moves old checkpoints to quarantine (set-aside/). If a
    checkpoint cannot be moved, the start must fail. Otherwise the next start would load this
    checkpoint, because it has the highest step."""
    later = save(tmp_path, 8).path
    words = f"{later}: cannot be moved to set-aside/: Operation not permitted"
    with immutable(later), pytest.raises(CheckpointError, match=words):
        start_of(tmp_path, "none")
    assert "step-00000008" in names(tmp_path)


def test_auto_resumes_from_the_newest_checkpoint_or_starts_fresh(tmp_path):
    assert store.decide_start(tmp_path, "auto").step == 0
    for step in (6, 7, 5):
        save(tmp_path, step)
    start = store.decide_start(tmp_path, "auto")
    assert (start.step, start.tokens, start.full.step) == (7, 70, 7)


def test_none_starts_fresh_and_moves_old_checkpoints_to_quarantine(tmp_path):
    save(tmp_path, 7)
    start = store.decide_start(tmp_path, "none")
    assert start.step == 0 and start.full is None
    store.prepare_directory(tmp_path, start, store.open_workspace(tmp_path))
    assert store.newest_valid(tmp_path) is None
    assert [p.name.split(".")[0] for p in (tmp_path / "checkpoints" / "set-aside").iterdir()] == [
        "step-00000007"
    ]


def test_going_back_to_a_model_moves_later_checkpoints_to_quarantine_once(tmp_path):
    for step in (10, 20):
        save(tmp_path, step, "model")
    save(tmp_path, 25)
    start = store.decide_start(tmp_path, "model@10")
    assert (start.step, start.full, start.path.name) == (10, None, "model-00000010")
    store.prepare_directory(tmp_path, start, store.open_workspace(tmp_path))
    assert names(tmp_path) == ["model-00000010", "set-aside"]
    # If the run fails, the same command continues from the newest checkpoint of the run.
    save(tmp_path, 15, origin="model@10")
    again = store.decide_start(tmp_path, "model@10")
    assert again.step == 15 and again.full is not None


def test_an_unknown_model_step_is_refused_with_the_known_steps(tmp_path):
    save(tmp_path, 10, "model")
    with pytest.raises(CheckpointError, match=r"'model@11'.*model-only checkpoint: 10"):
        store.decide_start(tmp_path, "model@11")
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        store.decide_start(tmp_path, str(tmp_path / "absent"))


@pytest.mark.parametrize("kind", ["directory", "link"])
def test_directories_of_a_killed_save_or_removal_are_removed(tmp_path, kind):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save(run, 3)
    elsewhere.mkdir()
    unfinished = store.checkpoints_dir(run) / ".step-00000006.host.123.abcd.tmp"
    unfinished.mkdir() if kind == "directory" else unfinished.symlink_to(elsewhere)
    assert start_of(run, "auto").step == 3
    assert names(run) == ["step-00000003"] and elsewhere.is_dir()


def test_copies_by_users_are_ignored(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    directory = store.checkpoints_dir(tmp_path)
    for name in ("step-00000009-mine", "step-00000009.bak", "model-x"):
        (directory / name).mkdir()
    store.remove_old(tmp_path, store.open_workspace(tmp_path), keep_models=1)
    start = store.decide_start(tmp_path, "auto")
    store.prepare_directory(tmp_path, start, store.open_workspace(tmp_path))
    assert start.step == 3
    assert {"step-00000009-mine", "step-00000009.bak", "model-x"} <= set(names(tmp_path))


@pytest.mark.parametrize("spelling", ["relative", "absolute", "run"])
def test_a_run_may_start_from_the_path_of_its_checkpoint(tmp_path, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)
    for step in (6, 8):
        save("run", step)
    paths = {"relative": "run/checkpoints/step-00000006", "run": str(tmp_path / "run")}
    load = paths.get(spelling, str(tmp_path / "run/checkpoints/step-00000006"))
    start = store.decide_start(tmp_path / "run", load)
    store.prepare_directory(tmp_path / "run", start, store.open_workspace(tmp_path / "run"))
    assert start.path.is_dir()
    kept = {"step-00000006"} | ({"step-00000008"} if spelling == "run" else set())
    assert set(names("run")) - {"set-aside"} == kept


def test_a_run_goes_back_to_its_model_by_step_not_by_path(tmp_path):
    model = save(tmp_path, 4, "model")
    with pytest.raises(CheckpointError, match=r"checkpoint.load=model@4"):
        store.decide_start(tmp_path, str(model.path))
    assert store.decide_start(tmp_path / "another", str(model.path)).path == model.path


def test_a_stray_file_with_a_temporary_name_blocks_nothing(tmp_path):
    save(tmp_path, 3)
    (store.checkpoints_dir(tmp_path) / ".step-9.1.ab.tmp").touch()
    store.prepare_directory(
        tmp_path, store.decide_start(tmp_path, "auto"), store.open_workspace(tmp_path)
    )
    assert "step-00000003" in names(tmp_path)


def test_a_run_with_damaged_checkpoints_only_does_not_start_again(tmp_path):
    damage(save(tmp_path, 5))
    with pytest.raises(CheckpointError, match=r"none of 1 full .* checkpoint.load=none"):
        store.decide_start(tmp_path, "auto")


def test_resolve_detects_damage_of_a_named_checkpoint(tmp_path):
    manifest = save(tmp_path, 5)
    damage(manifest)
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        store.resolve(manifest.path)


@pytest.mark.parametrize("load", ["auto", "run", "link", "target"])
def test_a_checkpoint_that_is_a_link_belongs_to_the_run(tmp_path, load):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    save(run, 1)
    newest = save(run, 2)
    move_elsewhere(newest, elsewhere)
    by_path = {"run": run, "link": newest.path, "target": elsewhere / newest.path.name}
    assert start_of(run, str(by_path.get(load, load))).step == 2
    assert names(run) == ["step-00000001", "step-00000002"]


def test_removal_of_a_link_keeps_its_target(tmp_path):
    run = tmp_path / "run"
    move_elsewhere(save(run, 1), tmp_path / "elsewhere")
    for step in (2, 3):
        save(run, step)
    store.remove_old(run, store.open_workspace(run), keep_models=0)
    assert names(run) == ["step-00000002", "step-00000003"]
    assert (tmp_path / "elsewhere" / "step-00000001" / "data").is_file()


@pytest.mark.parametrize("readable", [True, False], ids=["states", "manifest"])
def test_damage_does_not_restart_a_run_from_its_origin(tmp_path, weights, readable):
    run, load = tmp_path / "run", str(weights)
    for step in (5, 6):
        manifest = save(run, step, origin=load)
        damage(manifest)
        if not readable:
            (manifest.path / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="none of 2 full .* another train.run_dir"):
        store.decide_start(run, load)
    assert names(run) == ["step-00000005", "step-00000006"]


def test_a_damaged_run_may_start_from_another_runs_checkpoint(tmp_path, weights):
    run, other = tmp_path / "run", tmp_path / "other"
    damage(save(run, 5, origin=str(weights)))
    assert store.decide_start(run, str(save(other, 4).path)).step == 4


@pytest.mark.parametrize("then", ["auto", "the first command"])
def test_a_run_that_went_back_to_a_model_does_not_start_again_unasked(tmp_path, weights, then):
    """With checkpoint.load = "model@10", the run started from the model-only checkpoint of step 10.
    The run was killed before its next save. A start with another checkpoint.load is refused."""
    run, load = tmp_path / "run", str(weights)
    save(run, 10, "model", origin=load)
    save(run, 20, origin=load)
    start_of(run, "model@10")
    assert start_of(run, "model@10").step == 10
    message = r"none of 0 full .* as set-aside/step-00000020.* checkpoint.load=model@10,"
    with pytest.raises(CheckpointError, match=message):
        store.decide_start(run, "auto" if then == "auto" else load)
    assert start_of(run, "none").step == 0


def test_a_run_without_its_full_checkpoints_does_not_start_again_unasked(tmp_path):
    save(tmp_path, 200, "model")
    assert store.decide_start(tmp_path, "auto").step == 0  # killed before its first full save
    save(tmp_path, 201, "model")
    with pytest.raises(CheckpointError, match=r"none of 0 full .* as model-00000201"):
        store.decide_start(tmp_path, "auto")
    (tmp_path / "checkpoints" / "model-00000201" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of 0 full .* as model-00000201"):
        store.decide_start(tmp_path, "auto")


def test_steps_of_models_count_from_the_start_of_their_run(tmp_path):
    """A run started from step 10,000 of another run and has no full checkpoint. If a model-only
    checkpoint is more than two intervals of full checkpoints (200 steps) after step 10,000, full
    checkpoints must have been lost, and a start is refused."""
    run, other = tmp_path / "run", tmp_path / "other"
    origin = str(save(other, 10_000).path)
    save(run, 10_200, "model", origin=origin)
    assert store.decide_start(run, origin).step == 10_000  # killed before its first full save
    save(run, 10_201, "model", origin=origin)
    with pytest.raises(CheckpointError, match=r"none of 0 full .* as model-00010201"):
        store.decide_start(run, origin)


def test_a_model_has_the_first_step_of_its_run(tmp_path):
    """A run started from step 10,000 of another run. Then the other run saves step 10,150. The
    checkpoints of the first run still record 10,000 as their `first_step`."""
    run, other = tmp_path / "run", tmp_path / "other"
    save(other, 10_000)
    assert store.decide_start(run, str(other)).first_step == 10_000
    save(run, 10_201, "model", origin=str(other), first_step=10_000)
    save(other, 10_150)
    with pytest.raises(CheckpointError, match=r"none of 0 full .* as model-00010201"):
        store.decide_start(run, str(other))
    save(run, 10_300, origin=str(other), first_step=10_000)
    assert store.decide_start(run, str(other)).first_step == 10_000
    assert store.decide_start(run, "model@10201").first_step == 10_201


def test_a_run_without_an_interval_starts_again_before_its_only_full_checkpoint(tmp_path):
    save(tmp_path, 500, "model", interval=0)
    assert store.decide_start(tmp_path, "auto").step == 0


@pytest.mark.parametrize("spelling", ["hf", "hf/", "./hf", "run/../hf", "absolute"])
def test_the_path_of_an_origin_may_have_another_spelling(tmp_path, weights, monkeypatch, spelling):
    monkeypatch.chdir(tmp_path)
    save("run", 5, origin="hf")
    load = str(weights) if spelling == "absolute" else spelling
    assert store.decide_start("run", load).step == 5
    (tmp_path / "other").mkdir()
    assert store.decide_start("run", "other").step == 0


@pytest.mark.parametrize("kind", ["full", "model", "hf"])
def test_checkpoints_before_a_start_from_another_run_go_to_quarantine(tmp_path, weights, kind):
    run, other = tmp_path / "run", tmp_path / "other"
    save(run, 3, "model")
    save(run, 4)
    load = weights if kind == "hf" else save(other, 5, kind).path
    assert start_of(run, str(load)).path == load
    assert names(run) == ["set-aside"]
