"""Compare `optimus.offload` with other libraries that train models larger than the device memory.

A point is a training run of one library with one model, one batch and one limit of device memory.
torch's allocator enforces this limit. Each point trains transformers' GPT-2 with random weights,
gradient checkpointing, sequences of 1,024 tokens and AdamW with clipping. Each point runs in a new
process, so that the libraries do not affect each other's memory. Points run in a fixed order, the
most important first, until the time is over.

    python scripts/bench/offload_peers.py [--budget SECONDS] [--out FILE] [--rehearse]

`--rehearse` runs small models on the CPU, where the device is emulated. This option is for tests of
the script. The measured times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import common
import torch

import optimus
from optimus import platform
from optimus.config.machine import Links
from optimus.errors import one_line
from optimus.planner.rates import find_links

GB = 10**9
LR, CLIP = 1e-4, 1.0
MODELS = {
    # Hidden size, number of layers, number of heads. The model 4B has the sizes in Table 6 of the
    # second Elixir paper.
    "1.5B": (1600, 48, 25),
    "4B": (3072, 32, 24),
    "8B": (4096, 40, 32),
    "tiny": (64, 4, 4),
}
LIBRARIES = (
    *("optimus", "fsdp2", "deepspeed-zero3", "superoffload"),
    *("deepspeed-zero2", "megatrain", "resident"),
)
SUPEROFFLOAD = {"ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9}
"""Options that the examples of SuperOffload add to `offload_optimizer` of DeepSpeed's ZeRO-3."""
MEGATRAIN = "reports 6 x parameters x tokens as FLOPs and keeps no fp32 master weights"


@dataclass(frozen=True)
class Point:
    """A training run of a few steps with a single library."""

    library: str
    model: str
    memory: int
    """Limit of the device memory, in bytes."""
    batch: int
    """Sequences of a microbatch."""
    microbatches: int
    seq_len: int = 1024


def points(rehearse: bool) -> Iterator[Point]:
    """Yield all points, the most important first."""
    if rehearse:
        for library in LIBRARIES:
            for microbatches in (1, 2):
                yield Point(library, "tiny", 16 * 10**6, 2, microbatches, 64)
        return
    cases = [
        ("4B", 20, 4, 1),
        ("4B", 20, 16, 1),
        ("4B", 20, 4, 4),
        ("1.5B", 40, 16, 1),
        ("8B", 40, 4, 1),
        ("8B", 20, 4, 1),
        ("8B", 40, 16, 1),
        ("1.5B", 20, 4, 1),
    ]
    for model, memory, batch, microbatches in cases:
        for library in LIBRARIES:
            if library == "resident" and model != "1.5B":
                continue  # the states of larger models exceed the limit
            yield Point(library, model, memory * GB, batch, microbatches)


def make_model(name: str, seq_len: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a GPT-2 on the CPU with random weights and gradient checkpointing."""
    from transformers import GPT2Config, GPT2LMHeadModel

    hidden, layers, heads = MODELS[name]
    config = GPT2Config(
        n_embd=hidden, n_layer=layers, n_head=heads, n_positions=seq_len, use_cache=False,
        vocab_size=1000 if name == "tiny" else 50257,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = GPT2LMHeadModel(config)
        model.to(dtype)
    model.to_empty(device="cpu")
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():  # random numbers from the CPU would take minutes
        noise = torch.empty(parameter.shape, device=device).normal_(0, 0.02, generator=generator)
        parameter.data.copy_(noise)
    model.tie_weights()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


Step = Callable[[list[torch.Tensor]], None]


def optimus_step(point: Point, device: torch.device) -> tuple[Step, int, str]:
    """Return (function that runs a training step, number of parameters, remarks)."""
    model = make_model(point.model, point.seq_len, device, torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    tokens = torch.zeros(point.batch, point.seq_len, dtype=torch.int64)
    optimizer = optimus.offload(
        model,
        lr=LR,
        clip_norm=CLIP,
        device_memory=point.memory,
        example={"input_ids": tokens, "labels": tokens},
    )

    def step(batches: list[torch.Tensor]) -> None:
        for tokens in batches:
            (model(tokens, labels=tokens).loss / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, count, ""


def fsdp2_step(point: Point, device: torch.device) -> tuple[Step, int, str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    start_alone("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    model = make_model(point.model, point.seq_len, device, torch.float32)
    count = sum(p.numel() for p in model.parameters())
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    }
    if device.type == "cuda":  # on a CPU, there is nothing to offload
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    for block in model.transformer.h:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(batches: list[torch.Tensor]) -> None:
        for number, tokens in enumerate(batches):
            model.set_requires_gradient_sync(number == len(batches) - 1)
            (model(tokens, labels=tokens).loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step, count, "AdamW(fused=True) on fp32 parameters of the host"


def deepspeed_step(
    stage: int, point: Point, device: torch.device, options: dict[str, Any] | None = None
) -> tuple[Step, int, str]:
    """Return the same values as `optimus_step`, for DeepSpeed's ZeRO stage `stage`. `options` are
    added to the setting `offload_optimizer` of DeepSpeed."""
    try:
        import deepspeed
    except ImportError:
        raise common.Absent("deepspeed is not installed") from None
    start_alone("nccl" if device.type == "cuda" else "gloo")
    model = make_model(point.model, point.seq_len, device, torch.bfloat16)
    count = sum(p.numel() for p in model.parameters())
    host = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": host | (options or {})}
    zero["overlap_comm"] = True
    if stage == 3:
        zero["offload_param"] = host
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": point.batch,
            "gradient_accumulation_steps": point.microbatches,
            "gradient_clipping": CLIP,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": LR}},
            "zero_optimization": zero,
        },
    )

    def step(batches: list[torch.Tensor]) -> None:
        for tokens in batches:
            engine.backward(engine(tokens, labels=tokens).loss)
            engine.step()

    return step, count, f"deepspeed {deepspeed.__version__}"


def megatrain_step(point: Point, device: torch.device) -> tuple[Step, int, str]:
    raise common.Absent(f"megatrain is not in a package registry; its release {MEGATRAIN}")


def resident_step(point: Point, device: torch.device) -> tuple[Step, int, str]:
    """Return the same values as `optimus_step`, for plain torch without offloading: all states are
    on the device, in fp32, and the model computes in bf16 by autocast."""
    model = make_model(point.model, point.seq_len, device, torch.float32).to(device)
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)

    def step(batches: list[torch.Tensor]) -> None:
        for tokens in batches:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(tokens, labels=tokens).loss / len(batches)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step, count, "torch with autocast, without offloading"


STEPS: dict[str, Callable[[Point, torch.device], tuple[Step, int, str]]] = {
    "optimus": optimus_step,
    "fsdp2": fsdp2_step,
    "deepspeed-zero3": lambda *arguments: deepspeed_step(3, *arguments),
    "superoffload": lambda point, device: deepspeed_step(3, point, device, SUPEROFFLOAD),
    "deepspeed-zero2": lambda *arguments: deepspeed_step(2, *arguments),
    "megatrain": megatrain_step,
    "resident": resident_step,
}


def start_alone(backend: str) -> None:
    """Create a process group that contains only this process."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0"}
    os.environ |= {"WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.distributed.init_process_group(backend, rank=0, world_size=1)


def run_point(point: Point, device: torch.device, steps: int) -> dict[str, Any]:
    """Train a few steps. Return the seconds of each step after the first, or the reason why the
    library cannot train."""
    platform.limit_device_memory(device, point.memory)
    try:
        step, count, remarks = STEPS[point.library](point, device)
        shape = point.batch, point.seq_len
        vocabulary = 1000 if point.model == "tiny" else 50257
        batches = [
            torch.randint(vocabulary, shape, device=device) for _ in range(point.microbatches)
        ]
        times = []
        for _ in range(steps + 1):
            start = time.perf_counter()
            step(batches)
            platform.synchronize(device)
            times.append(time.perf_counter() - start)
    except Exception as error:  # of any type; its text goes into the table
        return {"failed": f"{type(error).__name__}: {one_line(error)}"[:200]}
    tokens = point.batch * point.seq_len * point.microbatches
    return {
        "seconds": times[1:],
        "first": times[0],
        "parameters": count,
        "tokens": tokens,
        "memory": platform.peak_memory_bytes(device) if device.type != "cpu" else None,
        "remarks": remarks,
    }


def shortest_step(point: Point, parameters: int, links: Links) -> float:
    """Return a lower limit of the time of a training step with all chunks on the host, in seconds.
    The limit is the longest of four times: the computation with recomputation, the copies to the
    device (two gathers of 2 bytes per parameter), the copies to the host (a bf16 gradient per
    parameter), and the updates on the host."""
    tokens = point.batch * point.seq_len * point.microbatches
    return max(
        8 * parameters * tokens / links.flops,
        2 * 2 * parameters / links.to_device,
        2 * parameters / links.to_host,
        parameters / links.host_adam,
    )


def format_rows(rows: list[tuple[Point, dict[str, Any]]], links: Links) -> str:
    """Return a Markdown table of the results."""
    lines = [
        "| model | limit | batch | microbatches | library | tokens/s | TFLOP/s | of the limit | "
        "peak memory | remarks |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for point, result in rows:
        start = f"| {point.model} | {point.memory / GB:g} GB | {point.batch} | {point.microbatches}"
        if "failed" in result:
            lines.append(f"{start} | {point.library} | | | | | {result['failed']} |")
            continue
        seconds = sorted(result["seconds"])[len(result["seconds"]) // 2]
        rate, work = result["tokens"] / seconds, 8 * result["parameters"] * result["tokens"]
        limit = shortest_step(point, result["parameters"], links) / seconds
        memory = "" if result["memory"] is None else f"{result['memory'] / GB:.1f} GB"
        lines.append(
            f"{start} | {point.library} | {rate:,.0f} | {work / seconds / 1e12:,.2f} | "
            f"{limit:.0%} | {memory} | {result['remarks']} |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=480.0, help="seconds for all runs")
    parser.add_argument("--steps", type=int, default=3, help="number of timed steps of each run")
    parser.add_argument("--out", type=Path, help="file to which the table is written")
    parser.add_argument("--rehearse", action="store_true", help="run small models on the CPU")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    device = torch.device("cpu" if args.rehearse else "cuda")
    if args.point:
        point = Point(**json.loads(args.point))
        print(json.dumps(run_point(point, device, args.steps)))
        return
    end = time.monotonic() + args.budget
    links = find_links(device, torch.bfloat16, lambda line: print(line, file=sys.stderr))
    rows: list[tuple[Point, dict[str, Any]]] = []
    for point in points(args.rehearse):
        left = end - time.monotonic()
        if left < 5:
            rows.append((point, {"failed": "no time left"}))
            continue
        command = [sys.executable, __file__, "--steps", str(args.steps)]
        command += ["--point", json.dumps(asdict(point)), *(["--rehearse"] * args.rehearse)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=left)
            lines = done.stdout.splitlines()
            crashed = f"status {done.returncode}: {done.stderr.strip()[-150:]}"
            result = json.loads(lines[-1]) if lines else {"failed": one_line(crashed)}
        except subprocess.TimeoutExpired:
            result = {"failed": f"ended after {left:.0f} s"}
        rows.append((point, result))
        print(format_rows(rows[-1:], links).splitlines()[-1], file=sys.stderr, flush=True)
    name = platform.device_name(device)
    kind = "Rehearsal on a CPU: the times say nothing about a GPU. " if args.rehearse else ""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    text = (
        f"# Offloading on {name}\n\n{kind}{date}, torch {torch.__version__}. Rates: "
        f"{links.to_device / GB:.1f} and {links.to_host / GB:.1f} GB/s to the device and to the "
        f"host, {links.host_adam / GB:.2f} G elements/s of AdamW on the host, "
        f"{links.flops / 1e12:.3g} TFLOP/s.\n\n{format_rows(rows, links)}\n"
    )
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
