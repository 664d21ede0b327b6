"""Runs with optimizer states on disk: checkpoints, resumption under other plans, and bad input."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from optimus.checkpoint import load as load_module
from optimus.checkpoint import slices as slices_module
from optimus.chunks import state_file
from optimus.chunks.disk import DiskTier
from optimus.cli import main as optimus
from optimus.config import dump_toml, make_config
from optimus.distributed.mesh import make_mesh
from optimus.errors import ConfigError
from optimus.planner.plan import format_plan, plan
from optimus.rank.states import plan_ranks
from tests.kit.faults.disk import small_disk
from tests.kit.runs.results import assert_same_run
from tests.kit.runs.saves import SYNC_AND_ASYNC, delay_writes, full_states
from tests.kit.runs.tiny import CONTEXT, tiny_tree
from tests.kit.runs.training import printed_by, run_and_catch, run_with, train_on

RUN = {
    "train__max_steps": 6,
    "train__global_batch_tokens": 2 * CONTEXT,
    "train__dtype": "bf16",
    "optim__chunk_length": 2000,
    "checkpoint__interval": 2,
    "checkpoint__model_interval": 2,
}


def on_disk(directory: Path, share: float = 0.6) -> dict[str, Any]:
    """Return settings of a run with states on the device, on the host and on disk. `share` is the
    share of the host's optimizer states that are on disk, in `directory`."""
    directory.mkdir(exist_ok=True)
    return {
        "offload__mode": "manual",
        "offload__host_share": 0.8,
        "offload__disk_share": share,
        "offload__disk": str(directory),
    }


def run_in_small_batches(tree: dict[str, Any]) -> tuple[int, str]:
    """Train. Saves and loads copy at most 608 elements at a time. Return (exit status, error
    message), as `run_and_catch` does."""
    largest: list[int] = []
    read = DiskTier.read

    def read_and_note(tier: DiskTier, flat: Any) -> Any:
        largest.append(len(flat) if tier.has(flat) else 0)
        return read(tier, flat)

    with (
        mock.patch.object(slices_module, "BATCH_ELEMENTS", 608),
        mock.patch.object(load_module, "HOST_BYTES", 4096),
        mock.patch.object(DiskTier, "read", read_and_note),
    ):
        result = run_and_catch(tree)
    assert largest
    return result


@pytest.mark.parametrize(("size", "async_save"), [(1, False), (2, True)])
def test_runs_resume_with_and_without_states_on_disk(ranks, tiny_data, tmp_path, size, async_save):
    """A run with states on disk resumes without states on disk, and then resumes with states on
    disk again. Metrics, states and checkpoints equal those of a run with all states on the device.
    After each run, no file with states remains."""
    single, many, disk = tmp_path / "single", tmp_path / "many", tmp_path / "disk"
    run = RUN | {"checkpoint__async_save": async_save, "optim__sharding": "so"}
    train_on(ranks, size, tiny_tree(tiny_data, single, **run))
    settings: list[dict[str, Any]] = [on_disk(disk), {}, on_disk(disk, 1.0)]
    for stop, placement in zip((2, 4, 6), settings, strict=True):
        tree = tiny_tree(tiny_data, many, **run, **placement, train__stop_at_step=stop)
        function = run_in_small_batches if placement else run_and_catch
        ended = ranks(size, function, tree, start_world=False, timeout_s=120)
        assert ended == [(0, "")] * size
        assert not list(disk.iterdir())
    assert_same_run(single, many)


def run_with_late_writes(tree: dict[str, Any]) -> Any:
    """Train. The checkpoint of step 2 is written after update 3."""
    return run_with(tree, delay_writes({2: 4}))


def test_asynchronous_saves_have_the_states_of_their_step(ranks, tiny_data, tmp_path):
    run = RUN | {"train__max_steps": 4, "checkpoint__async_save": True}
    for name, placement in (("device", {}), ("disk", on_disk(tmp_path / "states"))):
        tree = tiny_tree(tiny_data, tmp_path / name, **run, **placement)
        (ended,) = ranks(1, run_with_late_writes, tree, start_world=False)
        assert ended.status == 0
    states, expected = (full_states(tmp_path / name) for name in ("disk", "device"))
    assert len(states) == 2 and states == expected
    model = "checkpoints/model-00000002/model.safetensors"
    ours, theirs = ((tmp_path / name / model).read_bytes() for name in ("disk", "device"))
    assert ours == theirs


def run_with_broken_writes(tree: dict[str, Any]) -> Any:
    """Train. From update 5 on, all writes of states to disk fail, because the disk is full."""
    plain = os.pwritev

    def write(fd: int, buffers: Any, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def before(step: int) -> None:
        if step == 5:
            os.pwritev = write

    try:
        return run_with(tree, before)
    finally:
        os.pwritev = plain


@SYNC_AND_ASYNC
def test_a_run_ends_without_a_checkpoint_of_partly_updated_states(
    ranks, tiny_data, tmp_path, async_save
):
    """The disk fails in the update of step 5, after which a checkpoint is due. The run ends with
    status 1 and without this checkpoint. It resumes from step 3 or 4, with the bits of an unbroken
    run."""
    run = RUN | {"checkpoint__interval": 1, "checkpoint__async_save": async_save}
    train_on(ranks, 1, tiny_tree(tiny_data, tmp_path / "unbroken", **run))
    disk = tmp_path / "disk"
    tree = tiny_tree(tiny_data, tmp_path / "run", **run, **on_disk(disk))
    (ended,) = ranks(1, run_with_broken_writes, tree, start_world=False)
    assert ended.status == 1
    assert "offload.disk: cannot write" in ended.message and "No space left" in ended.message
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")]
    assert max(saved) in ("step-00000003", "step-00000004") and not list(disk.iterdir())
    train_on(ranks, 1, tree)
    assert_same_run(tmp_path / "unbroken", tmp_path / "run")


def test_states_of_a_model_checkpoint_start_a_run_on_disk(ranks, tiny_data, tmp_path):
    """A run with states on disk starts from the weights of a model-only checkpoint, with moments of
    zero. Its results equal those of a run with states on the device."""
    source = tmp_path / "source"
    train_on(ranks, 1, tiny_tree(tiny_data, source, **RUN))
    load = {"checkpoint__load": str(source / "checkpoints" / "model-00000004")}
    for name, placement in (("device", {}), ("disk", on_disk(tmp_path / "states"))):
        run = RUN | load | {"train__max_steps": 4}
        tree = tiny_tree(tiny_data, tmp_path / name, **run, **placement)
        (log,) = ranks(1, printed_by, tree, start_world=False)
    logged = "offload.mode = 'manual': 80.0% of the chunks on the host and the optimizer states of "
    assert logged + "60.0% of these on disk, all chunks in the cache" in log
    assert "GB of device memory without activations, " in log
    assert_same_run(tmp_path / "device", tmp_path / "disk")


def refused(ranks: Any, tree: dict[str, Any], size: int = 1) -> str:
    """Assert that a run is refused with status 2 and the same message on all ranks, and that no run
    directory remains. Return the message."""
    ended = ranks(size, run_and_catch, tree, start_world=False)
    assert not Path(tree["train"]["run_dir"]).exists()
    assert [status for status, _ in ended] == [2] * size, ended
    assert len({message for _, message in ended}) == 1
    assert "\n" not in ended[0][1]
    return ended[0][1]


def test_a_directory_that_cannot_be_used_is_refused(ranks, tiny_data, tmp_path):
    """A run is refused if its directory `offload.disk` does not exist, is a file, or has too little
    free space."""
    settings = RUN | on_disk(tmp_path / "states")
    run, missing, file = tmp_path / "run", tmp_path / "missing", tmp_path / "file"
    file.touch()
    for path, reason in ((missing, "No such file or directory"), (file, "Not a directory")):
        tree = tiny_tree(tiny_data, run, **(settings | {"offload__disk": str(path)}))
        message = refused(ranks, tree)
        assert message.startswith(f"offload.disk = '{path}': {reason}; use a directory on a local")
        assert not missing.exists()
    with small_disk(tmp_path / "small", "64k"):
        tree = tiny_tree(tiny_data, run, **(settings | {"offload__disk": str(tmp_path / "small")}))
        message = refused(ranks, tree, 2)
        assert "more than are free; use a directory with more space" in message
        assert not list((tmp_path / "small").iterdir())


def test_a_read_only_directory_is_refused(ranks, tiny_data, tmp_path):
    with small_disk(tmp_path / "disk", "4m") as remount:
        remount("ro")
        tree = tiny_tree(tiny_data, tmp_path / "run", **RUN, **on_disk(tmp_path / "disk"))
        message = refused(ranks, tree)
        assert "Read-only file system" in message or "Permission denied" in message


def run_in_use(tree: dict[str, Any]) -> tuple[int, str]:
    """Train while another run uses the directory `offload.disk`. Return (exit status, error
    message)."""
    state_file._LOCK_S = 0.1
    path = Path(tree["offload"]["disk"]) / "optimus-states-rank00000"
    fd = state_file.open_locked(path)
    try:
        return run_and_catch(tree)
    finally:
        os.close(fd)


def test_a_directory_of_another_run_is_refused(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path / "run", **RUN, **on_disk(tmp_path / "disk"))
    ((status, message),) = ranks(1, run_in_use, tree, start_world=False)
    assert status == 2 and "another run uses optimus-states-rank00000; wait for its end" in message
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"offload__disk": ""},
            "offload.disk_share = 0.6 needs offload.disk; set it to a directory on a local disk",
        ),
        (
            {"offload__disk_share": 0.0},
            "offload.disk = '/d' has no effect with offload.disk_share = 0",
        ),
        (
            {"offload__mode": "off", "offload__host_share": 0.0},
            "offload.disk_share = 0.6 has no meaning with offload.mode = 'off'",
        ),
        (
            {"offload__disk_memory": "much"},
            'offload.disk_memory = \'much\': must be a size such as "500GB" or "1.5TiB"',
        ),
    ],
)
def test_settings_without_effect_are_refused(changes, words):
    settings = {
        "offload__mode": "manual",
        "offload__host_share": 1.0,
        "offload__disk_share": 0.6,
        "offload__disk": "/d",
    }
    with pytest.raises(ConfigError) as error:
        make_config(tiny_tree("d", "r", **(settings | changes)))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("async_save", [False, True])
def test_plan_counts_the_bytes_on_disk_and_refuses_a_byte_too_few(tmp_path, async_save):
    """A plan prints the bytes that a rank needs on disk, and refuses a limit that is one byte
    smaller. With checkpoint.async_save, these bytes include copies of the states for
    checkpoints."""
    run = RUN | on_disk(tmp_path / "states", 1.0) | {"checkpoint__async_save": async_save}
    tree = tiny_tree("d", "r", **run)
    config = make_config(tree)
    mesh = make_mesh(config.parallel, 1)
    ((_, sizes),) = plan_ranks(config, mesh)
    lines = format_plan(plan(config)).splitlines()
    (line,) = (line for line in lines if "on disk" in line)
    assert line.split("  ")[0] == "on disk in addition" and f" {sizes['disk']:,} bytes" in line
    totals = {tier: sum(of_tier.values()) for tier, of_tier in sizes["tiers"].items()}
    host = sizes["host"] + sizes["staging"]
    assert totals == {"device": sizes["total"], "host": host, "disk": sizes["disk"]}
    table = [line.split() for line in lines[lines.index(line) :] if line.count("  ") > 9]
    assert table[0] == ["bytes", "by", "tier", "device", "host", "disk"]
    assert ["total", *(f"{size:,}" for size in totals.values())] in table
    masters = [sizes["tiers"][tier]["masters"] for tier in totals]
    assert ["masters", *(f"{size:,}" for size in masters)] in table and masters[2] > 0
    for memory, is_enough in ((sizes["disk"], True), (sizes["disk"] - 1, False)):
        tree["offload"]["disk_memory"] = str(memory)
        config = make_config(tree)
        if is_enough:
            assert len(list(plan_ranks(config, mesh))) == 1
            continue
        with pytest.raises(ConfigError) as error:
            list(plan_ranks(config, mesh))
        assert str(error.value) == (
            f"offload.disk_memory = '{memory}': the states of a rank need {sizes['disk']:,} bytes "
            "on disk, 1 more; use a larger offload.disk_memory, or a smaller offload.disk_share"
        )


def file_size(tree: dict[str, Any]) -> int:
    """Train. Assert that the file with the states has the same size before each update. Return this
    size in bytes."""
    sizes: list[int] = []
    (directory,) = [Path(tree["offload"]["disk"])]

    def before(step: int) -> None:
        sizes.extend(path.stat().st_size for path in directory.iterdir())

    assert run_with(tree, before).status == 0
    assert len(set(sizes)) == 1  # the file has its full size before the first update
    return sizes[0]


@SYNC_AND_ASYNC
def test_file_has_the_planned_size(ranks, tiny_data, tmp_path, async_save):
    run = RUN | on_disk(tmp_path / "disk") | {"checkpoint__async_save": async_save}
    tree = tiny_tree(tiny_data, tmp_path / "run", **run)
    config = make_config(tree)
    ((_, sizes),) = plan_ranks(config, make_mesh(config.parallel, 1))
    assert ranks(1, file_size, tree, start_world=False) == [sizes["disk"]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.rmdir(), "No such file or directory"),
        (lambda path: (path.rmdir(), path.write_text("")), "Not a directory"),
        (lambda path: os.mkfifo(path / "optimus-states-rank00001"), "not a regular file"),
        (lambda path: None, ""),
    ],
)
def test_dry_run_checks_the_disk_as_a_run_does(tiny_data, tmp_path, capfd, make, message):
    tree = tiny_tree(tiny_data, tmp_path / "run", **on_disk(tmp_path / "disk"))
    (tmp_path / "c.toml").write_text(dump_toml(make_config(tree)))
    make(tmp_path / "disk")
    dry = ["train", str(tmp_path / "c.toml"), "--dry-run", "--nproc", "2"]
    assert optimus(dry) == (2 if message else 0)
    assert message in capfd.readouterr().err
    assert optimus([*dry, "--nodes", "1"]) == 0  # the disk is on another machine
    if not message:
        assert not list((tmp_path / "disk").iterdir())


def test_dry_run_finds_a_disk_that_another_run_uses(tmp_path):
    path = tmp_path / "optimus-states-rank00001"
    with open(path, "wb") as file:
        state_file.check_directory(str(tmp_path), range(2))  # the file of a process that ended
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another run uses optimus-states-rank00001"):
            state_file.check_directory(str(tmp_path), range(2))
        state_file.check_directory(str(tmp_path), range(1))
    assert path.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_dry_run_refuses_a_disk_that_is_not_writable(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="Permission denied"):
        state_file.check_directory(str(tmp_path), range(1))
