"""The end of an offloaded model: its memory, its last update, and its weights."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import nn

import optimus
from optimus import platform
from optimus.chunks.memory import Memory, Tier
from optimus.config.machine import Links
from optimus.errors import ConfigError
from tests.offloading import models
from tests.offloading.models import assert_equal, weights


@pytest.mark.parametrize("closes", [True, False])
def test_an_offloaded_model_is_freed(closes, monkeypatch):
    """With or without `close`, the memory of the states is freed when no code refers to the model.
    `close` also unlocks page-locked memory. If user code keeps a gradient and a loss after `close`,
    parameters can remain in memory, but not the model, the optimizer or the states."""
    unlocked: list[bool] = []
    monkeypatch.setattr(Memory, "close", lambda self: unlocked.append(True))
    model = models.llama().bfloat16()
    optimizer = optimus.offload(model, host_share=1.0, early_adam="on", clip_norm=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        loss = models.loss_of(model, 1)
        loss.backward()
        optimizer.step()
    chunk = optimizer._offloaded.engine.chunks[0]
    states = [chunk.master, chunk.grad, chunk.params, *chunk.moments.values()]
    references = [weakref.ref(value) for value in (model, optimizer, *model.parameters(), *states)]
    kept = [loss, model.model.layers[0].mlp.up_proj.weight.grad] if closes else []
    if closes:
        optimizer.close()
        assert len(unlocked) == 1
    del model, optimizer, chunk, states, loss
    gc.collect()
    alive = [reference() for reference in references if reference() is not None]
    # The graph of the loss refers to the parameters.
    assert all(isinstance(value, nn.Parameter) for value in alive) if kept else not alive


def test_memory_unlocks_its_host_buffers(monkeypatch):
    locked, unlocked = [], []

    def host_zeros(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        locked.append(torch.zeros(length, dtype=dtype))
        return locked[-1]

    monkeypatch.setattr(platform, "host_zeros", host_zeros)
    monkeypatch.setattr(platform, "free_host", lambda flat: unlocked.append(flat.data_ptr()))
    monkeypatch.setattr(platform, "synchronize", lambda device: unlocked.append(device.type))
    memory = Memory(torch.device("cuda"))
    for _ in range(2):
        memory.new(8, torch.float32, Tier.HOST)
    for _ in range(2):
        memory.close()
    assert unlocked == ["cuda", *(flat.data_ptr() for flat in locked)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_closed_model_has_the_last_update_and_can_be_offloaded_again(
    tmp_path, monkeypatch, dtype
):
    """An update is in progress when `close` is called. After `close`, the model equals a model that
    was trained with all states on the device."""
    expected = models.llama().to(dtype)
    reference = optimus.offload(expected, host_share=0.0)
    links = Links(to_device=1e10, to_host=1e10, host_adam=1e10, disk_read=1e9, disk_write=1e9)
    models.set_residency(monkeypatch, poison=True, links=links)
    model = models.llama().to(dtype)
    with pytest.raises(ConfigError) as refused:
        optimus.offload(model, host_share=1.0, host_memory=1, disk=tmp_path)
    size = re.search("need ([0-9,]+) bytes of host memory", str(refused.value))
    assert size is not None
    least = int(size[1].replace(",", ""))
    optimizer = optimus.offload(model, host_share=1.0, host_memory=least, disk=tmp_path)
    engine, closing = optimizer._offloaded.engine, threading.Event()
    engine._updates._submit(partial(closing.wait, 60.0), 0)  # updates run after this job
    for trained, of_model in ((expected, reference), (model, optimizer)):
        models.loss_of(trained, 1).backward()
        of_model.step()
    assert not any(engine._updates.is_done(chunk.chunk.number) for chunk in engine.chunks)
    gradient = next(model.parameters()).grad
    threading.Timer(0.2, closing.set).start()
    for _ in range(2):
        optimizer.close()
    assert not list(tmp_path.iterdir())
    assert_equal(weights(model), weights(expected))
    reference.close()
    model.save_pretrained(tmp_path / "saved")
    saved = models.transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert_equal(weights(saved), weights(expected))
    with pytest.raises(ConfigError, match="is closed; call optimus.offload again"):
        assert gradient is not None
        gradient.clone()
    for use in (optimizer.step, optimizer.zero_grad, optimizer.state_dict):
        with pytest.raises(ConfigError, match="is closed; call optimus.offload again"):
            use()
    loss = models.loss_of(model, 2)
    loss.backward()
    assert torch.equal(loss, models.loss_of(expected, 2))
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}
    for trained in (model, expected):
        trained.zero_grad()
    models.train(model, optimus.offload(model, host_share=1.0), (1,))
    models.train(expected, optimus.offload(expected, host_share=0.0), (1,))
    assert_equal(weights(model), weights(expected))


def test_backward_after_close_is_refused():
    model = models.llama()
    optimizer = optimus.offload(model, host_share=1.0)
    loss = models.loss_of(model, 1)
    optimizer.close()
    with pytest.raises(ConfigError, match="is closed"):
        loss.backward()
