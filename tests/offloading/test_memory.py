"""Resident memory of a process that offloads a model, compared with the plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CODE = """
import gc, json, re, sys, threading
from pathlib import Path
import torch
from torch import nn
import optimus
from optimus.platform import trim_heap

torch.set_num_threads(1)
WIDTH, FOLDER = 640, sys.argv[1]

def make(layers, dtype):
    torch.manual_seed(0)
    pairs = ([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)] for _ in range(layers))
    return nn.Sequential(*(nn.Sequential(*pair) for pair in pairs)).to(dtype)

def memory():
    # Pages of the file of states are in the page cache, which is not memory of the process.
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def settled():
    gc.collect()
    trim_heap()
    return memory()

def peak_of(action):
    peaks, ended = [memory()], threading.Event()
    def watch():
        while not ended.wait(0.0005):
            peaks.append(memory())
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = action()
    finally:
        ended.set()
        thread.join()
    return max(*peaks, memory()), result

def run(layers, dtype, arguments):
    before = settled()
    model = make(layers, dtype)
    offload = lambda: optimus.offload(model, host_share=1.0, clip_norm=1.0, **arguments)
    peak, optimizer = peak_of(offload)
    converted = settled()
    engine = optimizer._offloaded.engine
    for _ in range(2):
        model(torch.ones(4, WIDTH, dtype=dtype)).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.wait()
    trained = settled()
    states = lambda: {"model": model.state_dict(), "states": optimizer.state_dict()}
    saved, _ = peak_of(lambda: torch.save(states(), FOLDER + "/saved"))
    sizes, chunk = engine.state_bytes(), engine.chunks[0]
    optimizer.close()
    return {
        "planned": sizes["host"],
        "allocated": engine.memory.num_bytes[type(chunk.home).HOST],
        "disk": sizes["disk"],
        "chunk": sum(sizes[tier] // layers for tier in ("host", "disk"))
        + chunk.params.nbytes
        + chunk.grads.nbytes,
        "peak": peak - before,
        "converted": converted - before,
        "trained": trained - before,
        "saved": saved - before,
    }

BF16, on_disk = torch.bfloat16, {"disk": FOLDER, "host_memory": 92_000_000}
run(6, BF16, on_disk)  # so that libraries allocate their memory now
results = [run(14, torch.float32, {"early_adam": "on"}), run(14, BF16, {})]
print(json.dumps([*results, run(14, BF16, {**on_disk, "host_memory": 150_000_000})]))
"""


def test_resident_memory_is_that_of_the_plan(tmp_path):
    """During `optimus.offload`, the peak of the resident memory exceeds the resident memory after
    the call by at most the memory of one chunk. This memory contains the states of the chunk, even
    if the states are then written to disk. It also contains the parameters and gradients of the
    chunk, because the emulated device uses host memory.

    After training, the resident memory is at most 1.02 times the planned bytes. A save needs at
    most the memory of one more chunk."""
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    results = json.loads(ended.stdout)
    assert [sizes["disk"] > 0 for sizes in results] == [False, False, True]
    for sizes in results:
        assert sizes["allocated"] == sizes["planned"]
        assert sizes["peak"] <= sizes["converted"] + sizes["chunk"], sizes
        assert 0.9 * sizes["planned"] < sizes["converted"], sizes
        assert sizes["trained"] <= 1.02 * sizes["planned"], sizes
        assert sizes["saved"] <= sizes["trained"] + sizes["chunk"], sizes
    assert results[2]["planned"] <= 150_000_000
