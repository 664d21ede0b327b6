"""`optimus.offload` with states on disk and with early updates: equal bits, files, and refused
arguments."""

from __future__ import annotations

import copy
import errno
import math
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import optimus
from optimus.chunks.buffers import ChunkState
from optimus.chunks.memory import Tier
from optimus.config.machine import Links
from optimus.errors import ConfigError, NonFiniteError, OptimusError
from optimus.offloading import OffloadOptimizer
from optimus.offloading import optimizer as optimizer_module
from optimus.offloading.placement import OffloadLimits, OffloadPlacement, _with_disk
from tests.kit.faults.disk import small_disk
from tests.offloading import models
from tests.offloading.models import assert_equal, weights

RATE = 2e7
LINKS = Links(to_device=RATE, to_host=RATE, host_adam=RATE, disk_read=RATE, disk_write=RATE)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model of twelve chunks. The states of twelve chunks are larger than the four buffers
    through which states on disk are read and written."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(nn.Linear(64, 64, bias=n % 2 == 0) for n in range(11)))
    return nn.Sequential(nn.Embedding(models.VOCAB, 64), blocks).to(dtype)


def patch(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    """Fill freed memory with NaN. `options` are further fields of `Residency`, such as `copies`,
    the times at which copies are done."""
    models.set_residency(monkeypatch, poison=True, **options)


def bytes_of(model: nn.Module, disk: str = "") -> int:
    """Return the bytes of host memory that the model needs if all states are on the host. With
    `disk`, return the bytes that it needs if all masters and moments are on disk."""
    with pytest.raises(ConfigError) as refused:
        optimus.offload(model, host_share=1.0, host_memory=1, disk=disk)
    assert "\n" not in str(refused.value)
    size = re.search("need ([0-9,]+) bytes of host memory", str(refused.value))
    assert size is not None
    return int(size[1].replace(",", ""))


def step(model: nn.Module, optimizer: OffloadOptimizer, number: int, count: int, kind: str) -> None:
    """Train step `number` with `count` microbatches. If `kind` is "write", user code changes a
    gradient of the step. If `kind` is "inf", the gradients are not finite. Other values of `kind`
    do not change gradients."""
    for microbatch in range(count):
        out = model(models.tokens(10 * number + microbatch)).float()
        loss = (out - number % 3).square().mean() / count
        (loss * torch.inf if kind == "inf" and microbatch == count - 1 else loss).backward()
    if kind == "write":
        last = list(model.parameters())[-1]
        assert last.grad is not None
        last.grad.mul_(0.5)
    try:
        optimizer.step()
        assert kind != "inf" or optimizer._clip_norm is None
    except NonFiniteError:
        assert kind == "inf"
    optimizer.zero_grad()


def states(optimizer: OffloadOptimizer) -> dict[str, torch.Tensor]:
    loaded = copy.deepcopy(optimizer.state_dict()["state"])
    return {f"{n}.{key}": value for n, state in loaded.items() for key, value in state.items()}


@pytest.mark.parametrize("seed", range(16))
def test_random_tiers_and_early_updates_change_no_bit(tmp_path, monkeypatch, seed):
    """Draw at random: the placement, the times of copies, `early_adam`, the limit of the gradient
    norm, the number of microbatches of each step, and the steps whose gradients are not finite or
    are changed by user code."""
    draw = random.Random(seed)
    dtype = draw.choice([torch.float32, torch.bfloat16])
    options: dict[str, Any] = {"lr": 1e-2, "clip_norm": draw.choice([0.05, 0.5, 1e9])}
    plan = [(draw.randrange(1, 4), draw.choice(["", "", "write", "inf"])) for _ in range(6)]
    plan += [(2, ""), (2, ""), (2, "")]
    expected = make_model(dtype)
    reference = optimus.offload(expected, host_share=0.0, **options)
    patch(
        monkeypatch,
        copies=draw.choice(["early", "late", "random"]),
        links=draw.choice([None, LINKS]),
    )
    ours = make_model(dtype)
    limits: dict[str, Any] = {}
    if draw.random() < 0.6:
        whole, least = bytes_of(ours), bytes_of(ours, str(tmp_path))
        limits = {"disk": tmp_path, "host_memory": least + int(draw.random() * (whole - least))}
    early = draw.choice(["on", "on", "auto", "off"])
    share = 1.0 if limits else draw.choice([0.4, 1.0])
    optimizer = optimus.offload(ours, host_share=share, early_adam=early, **limits, **options)
    engine = optimizer._offloaded.engine
    assert (engine.memory.num_bytes[Tier.DISK] > 0) == bool(limits)
    for number, (count, kind) in enumerate(plan):
        step(expected, reference, number, count, kind)
        step(ours, optimizer, number, count, kind)
    assert_equal(weights(ours), weights(expected))
    assert_equal(states(optimizer), states(reference))
    optimizer.close()
    assert not list(tmp_path.iterdir())


def test_early_updates_are_used_if_gradients_passes_and_the_norm_are_as_expected(monkeypatch):
    """A step uses the early updates of all chunks if it has the same number of backward passes as
    the previous step. It uses no early update if the norm is clipped, if a learning rate changes
    during the step, or if user code reads a gradient."""
    used: list[int] = []
    exchange = ChunkState.exchange

    def record(state: ChunkState, other: Any) -> None:
        used.append(state.chunk.number)
        exchange(state, other)

    monkeypatch.setattr(ChunkState, "exchange", record)
    patch(monkeypatch)
    model = make_model()
    optimizer = optimus.offload(model, host_share=1.0, early_adam="on", clip_norm=1e9)
    everything = [chunk.chunk.number for chunk in optimizer._offloaded.engine.chunks]
    for count, change, expected in (
        (1, "", []),  # before the first step, nothing is expected
        (1, "", everything),
        (1, "lr", everything),  # between two steps, as a scheduler does
        (2, "", []),
        (2, "", everything),
        (2, "read", []),
        (2, "clip", []),
        (2, "", everything),
        (2, "lr during the step", []),
    ):
        used.clear()
        optimizer._clip_norm = 1e-3 if change == "clip" else 1e9
        if change == "lr":
            optimizer.param_groups[0]["lr"] *= 0.5
        for microbatch in range(count):
            model(models.tokens(microbatch)).square().mean().backward()
        if change == "lr during the step":
            optimizer.param_groups[0]["lr"] *= 0.5
        if change == "read":
            assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
        engine = optimizer._offloaded.engine
        for early in [*engine._updates._early.values()]:
            early.job.result()
        optimizer.step()
        optimizer.zero_grad()
        engine.wait()
        assert sorted(used) == expected, (count, change)


def test_early_updates_need_a_second_copy_of_the_states_within_the_host_memory():
    """Early updates write to a second copy of the states (spare buffers). By default, there is no
    second copy. With "auto", the second copy uses at most half of the host memory that the states
    leave free."""
    model = make_model()
    whole, sizes = bytes_of(model), []
    optimizer: Any = None
    limits = ("off", whole), ("auto", whole + 300_000), ("on", 10 * whole)
    for early, host_memory in limits:
        optimizer = optimus.offload(
            make_model(), host_share=1.0, early_adam=early, host_memory=host_memory
        )
        sizes.append(optimizer._offloaded.engine.state_bytes()["host"])
    (spare,) = {b.nbytes for b in optimizer._offloaded.engine._spare.values() if b.nbytes < 150_000}
    assert [size - whole for size in sizes[:2]] == [0, 150_000 // spare * spare]
    assert sizes[2] == whole + sum(b.nbytes for b in optimizer._offloaded.engine._spare.values())


def test_early_updates_of_all_chunks_are_within_the_host_memory(tmp_path):
    """If `host_memory` is one byte less than the bytes of the states and of the spare buffers, some
    states are placed on disk. Chunks on disk have no spare buffers. Without `disk`, the model is
    refused."""
    on = {"host_share": 1.0, "early_adam": "on"}
    engine = optimus.offload(make_model(), **on)._offloaded.engine
    whole = engine.state_bytes()["host"]
    with pytest.raises(
        ConfigError, match="early_adam = 'on', 1 byte more than .* 'auto', set disk"
    ):
        optimus.offload(make_model(), **on, host_memory=whole - 1)
    for host_memory in (whole, whole - 1):
        optimizer = optimus.offload(make_model(), **on, host_memory=host_memory, disk=tmp_path)
        engine, model = optimizer._offloaded.engine, optimizer._offloaded
        on_disk = sum(bool(chunk.on_disk) for chunk in engine.chunks)
        assert (on_disk > 0) == (host_memory < whole)
        assert engine.state_bytes()["host"] <= host_memory
        assert engine.memory.num_bytes[Tier.HOST] <= host_memory
        assert len(engine._spare) == len(engine.chunks) - on_disk and model.trained
        optimizer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_on_disk_are_saved_and_loaded(tmp_path, dtype):
    """State dicts are saved with states in memory and with states on disk. After a load under the
    other placement, or from disk to disk, training continues with the same bits."""
    model = make_model(dtype)
    disk = tmp_path / "disk"
    disk.mkdir()
    on_disk = {"disk": disk, "host_memory": bytes_of(model, str(disk))}
    files, results = [], []
    for number, placement in enumerate(({}, on_disk)):
        model = make_model(dtype)
        optimizer = optimus.offload(model, host_share=1.0, **placement)
        for index in range(2):
            step(model, optimizer, index, 1, "")
        files.append(tmp_path / f"{number}.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, files[-1])
        step(model, optimizer, 2, 1, "")
        results.append((weights(model), states(optimizer)))
        optimizer.close()
    assert results[0][1].keys() == results[1][1].keys()
    for file, placement in ((files[0], on_disk), (files[1], {}), (files[1], on_disk)):
        loaded = torch.load(file)
        model = make_model(dtype)
        optimizer = optimus.offload(model, host_share=1.0, lr=5.0, **placement)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        step(model, optimizer, 2, 1, "")
        for of_model, of_states in results:
            assert_equal(weights(model), of_model)
            assert_equal(states(optimizer), of_states)
        optimizer.close()


def test_a_state_dict_has_the_last_update(monkeypatch):
    """An update on the host takes 50 ms. `state_dict` waits for the end of the update."""
    expected = make_model()
    reference = optimus.offload(expected, host_share=0.0)
    patch(monkeypatch, links=Links(to_device=1e10, to_host=1e10, host_adam=1e6))
    model = make_model()
    optimizer = optimus.offload(model, host_share=1.0)
    for trained, of_model in ((expected, reference), (model, optimizer)):
        step(trained, of_model, 0, 1, "")
    assert_equal(states(optimizer), states(reference))


def test_a_step_keeps_the_last_update_of_parameters_without_a_gradient(monkeypatch):
    """The first step trains only the last blocks, whose updates are slow. The second step trains
    only the first blocks, whose updates come first in the order of the chunks. The second step must
    not lose the updates of the first step."""
    results = []
    patch(monkeypatch, links=Links(to_device=1e10, to_host=1e10, host_adam=1e6))
    for share in (0.0, 1.0):
        model = make_model()
        optimizer = optimus.offload(model, host_share=share)
        halves = model[1][6:], model[1][:6]
        for half in halves:
            half(torch.ones(1, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(weights(model))
    assert_equal(*results)


@pytest.mark.parametrize("loads", ["weights", "states"])
def test_loaded_values_replace_early_updates(loads):
    """Weights or states are loaded between the last backward of a step and `optimizer.step`. The
    step must update the loaded values, and must not use an early update of the old values."""
    results = []
    for early in ("off", "on"):
        model = make_model(torch.bfloat16)
        optimizer = optimus.offload(model, host_share=1.0, early_adam=early)
        for number in range(3):
            step(model, optimizer, number, 1, "")
            if number == 1:
                saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            state["step"] += 1  # the current step of the states
        model(models.tokens(1)).square().mean().backward()
        if loads == "weights":
            model.load_state_dict(make_model(torch.bfloat16).state_dict())
        else:
            optimizer.load_state_dict(saved)
        optimizer.step()
        results.append(weights(model))
    assert_equal(*results)


def test_as_few_states_are_on_disk_as_the_host_memory_allows(tmp_path):
    """If `host_memory` is enough for all states, no state is on disk; with one byte less, some are.
    With the smallest permitted `host_memory`, all chunks are on disk; with one byte less, the model
    is refused. `disk_memory` is exact to the byte, too."""
    model = make_model()
    whole, least = bytes_of(model), bytes_of(model, str(tmp_path))
    on_disk = []
    for host_memory in (whole, whole - 1, least):
        optimizer = optimus.offload(
            make_model(), host_share=1.0, disk=tmp_path, host_memory=host_memory
        )
        engine = optimizer._offloaded.engine
        assert engine.state_bytes()["host"] <= host_memory
        on_disk.append(engine.state_bytes()["disk"])
        optimizer.close()
    assert on_disk[0] == 0 < on_disk[1] < on_disk[2]
    with pytest.raises(ConfigError, match=f"{least:,} bytes of host memory even with .* 1 byte"):
        optimus.offload(model, host_share=1.0, disk=tmp_path, host_memory=least - 1)
    arguments = {"host_share": 1.0, "disk": tmp_path, "host_memory": least}
    with pytest.raises(ConfigError, match=f"need {on_disk[2]:,} bytes on disk, 1 more"):
        optimus.offload(model, **arguments, disk_memory=on_disk[2] - 1)
    optimus.offload(model, **arguments, disk_memory=on_disk[2]).close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("with_spare", [False, True])
@pytest.mark.parametrize("vocab", [64, 3000])
def test_limit_of_the_host_memory_is_exact_for_each_number_of_chunks_on_disk(
    tmp_path, vocab, with_spare
):
    """For each number of chunks on disk, the limit is the host memory that this number needs, or
    one byte less. The smallest number of chunks on disk whose need is within the limit is selected.
    With a large embedding or spare buffers, more chunks on disk can need more host memory."""
    blocks = nn.Sequential(*(nn.Linear(48, 48 + 8 * (n % 3)) for n in range(10)))
    model = nn.ModuleDict({"blocks": blocks, "embed": nn.Embedding(vocab, 48)})
    chunks = optimizer_module._chunks_of(model, dict(model.named_parameters()), 3000)
    placement = OffloadPlacement(1.0, 3)
    count = len(chunks.on_meta(placement).chunks)

    def needed(number: int) -> int:
        changed = placement._replace(disk_share=max(0.0, number - 0.5) / count)
        return chunks.on_meta(changed, with_spare).state_bytes()["host"]

    sizes = list(map(needed, range(count + 1)))
    assert vocab < 3000 or min(sizes) < sizes[-1]
    for limit in {size - missing for size in sizes for missing in (0, 1)}:
        limits = OffloadLimits(None, limit, None, str(tmp_path))
        if limit < min(sizes):
            with pytest.raises(ConfigError, match=f"need {min(sizes):,} bytes .* 1 byte more"):
                _with_disk(chunks, placement, limits, with_spare)
            continue
        selected = _with_disk(chunks, placement, limits, with_spare)
        number = math.ceil(selected.disk_share * count)
        assert number == next(n for n, size in enumerate(sizes) if size <= limit)
        assert selected.host_bytes == sizes[number]


ARGUMENTS = {
    "missing": (
        {"disk": "/missing/folder"},
        "cannot create /missing/folder/.*: No such",
    ),
    "file": ({"disk": __file__}, "Not a directory; use another directory"),
    "number": ({"disk": 5}, "disk = 5: use the path of a directory"),
    "no disk": ({"disk_memory": "1GB"}, "disk_memory = 1000000000 has no effect without disk"),
    "size": ({"disk": "/tmp", "disk_memory": "lots"}, "disk_memory = 'lots': use a size"),
    "absurd": ({"host_memory": "900TB"}, "host_memory = .* more than this process can use"),
    "early": ({"early_adam": "always"}, "early_adam = 'always': use 'off', 'on' or 'auto'"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_are_refused_in_a_single_line(case):
    arguments, message = ARGUMENTS[case]
    model = make_model()
    with pytest.raises(ConfigError, match=message) as error:
        optimus.offload(model, host_share=1.0, **arguments)
    assert "\n" not in str(error.value)
    optimus.offload(model, host_share=1.0)  # the refusal has not changed the model


def refused(disk: Path, memory: int) -> str:
    """Assert that `optimus.offload` refuses a model whose states need the directory `disk`, and
    does not change the model. Return the message of the error. `memory` is the limit of host memory
    in bytes."""
    model = make_model()
    before = weights(model)
    with pytest.raises(ConfigError) as error:
        optimus.offload(model, host_share=1.0, disk=disk, host_memory=memory)
    assert "\n" not in str(error.value)
    assert_equal(weights(model), before)
    optimus.offload(model, host_share=1.0)
    return str(error.value)


def test_a_full_or_read_only_disk_and_that_of_another_run_are_refused(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    memory = bytes_of(make_model(), str(disk))
    with small_disk(tmp_path / "small", "256k") as remount:
        message = refused(tmp_path / "small", memory)
        assert "more than are free; use a directory with more space" in message
        assert not list((tmp_path / "small").iterdir())
        remount("ro")
        message = refused(tmp_path / "small", memory)
        assert "Read-only file system" in message or "Permission denied" in message
    first = optimus.offload(make_model(), host_share=1.0, disk=disk, host_memory=memory)
    message = refused(disk, memory)
    assert message == (
        f"disk = '{disk}': another optimizer of this process uses optimus-states-rank00000; call "
        "its close(), or use another directory"
    )
    first.close()
    assert not list(disk.iterdir())


@pytest.mark.parametrize(
    ("name", "fails", "reason"),
    [("preadv", lambda *_: 0, "0 of "), ("pwritev", None, "No space left on device")],
    ids=["short read", "full"],
)
def test_an_error_of_the_disk_ends_the_training(tmp_path, monkeypatch, name, fails, reason):
    """After an error of the disk, states can be partly updated. Reading weights or states then
    raises the error again."""
    model = make_model()
    memory = bytes_of(model, str(tmp_path))
    optimizer = optimus.offload(model, host_share=1.0, disk=tmp_path, host_memory=memory)
    step(model, optimizer, 0, 1, "")
    optimizer._offloaded.engine.wait()

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, name, fails or full)
    with pytest.raises(OptimusError, match="^disk: cannot") as error:
        for number in range(1, 3):
            step(model, optimizer, number, 1, "")
    assert reason in str(error.value) and "\n" not in str(error.value)
    for use in (model.state_dict, optimizer.state_dict):
        with pytest.raises(OptimusError, match="^disk: cannot"):
            use()
    optimizer.close()
    assert not list(tmp_path.iterdir())
