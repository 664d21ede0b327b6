"""`optimus bench optimizer` on several ranks: EPSO against SO, FSDP2, and the peak of memory.

The parent starts local ranks of `optimus bench optimizer --ranks N --result FILE`, one group of
processes for each number of ranks; there the contestants take turns on copies of one model, whose
experts and other parameters stand to each other as in Mula-7B-A1B.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from optimus import platform
from optimus.bench.fsdp import against_fsdp
from optimus.bench.meters import paired, race
from optimus.bench.ours import make_ours
from optimus.bench.peak import measure_peak
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.optimizer import AdamW
from optimus.config import Config, make_config
from optimus.distributed.world import World, end_run, end_world, start_world
from optimus.errors import ConfigError, OptimusError, counted
from optimus.launch.spawn import spawn_local

_SEQ_LEN = 128


def mula_like(hidden: int, ranks: int, ep: int = 1, **optim: Any) -> Config:
    """A model of Mula-7B-A1B's proportions: 13.5 times as many parameters in experts as outside of
    them. At hidden 256 it has 27 M in 4 layers."""
    heads = max(1, hidden // 64)
    return make_config(
        {
            "model": {
                "architecture": "olmoe",
                "num_layers": 4,
                "hidden_size": hidden,
                "num_attention_heads": heads,
                "intermediate_size": hidden // 2,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "vocab_size": 23 * hidden // 4,
            },
            "train": {
                "dtype": "fp32",
                "seq_len": _SEQ_LEN,
                "global_batch_tokens": _SEQ_LEN * ranks,
                "threads": 1,
                "device": "cpu",
            },
            "parallel": {"ep": ep, "ep_dispatch": "allgather"},
            "optim": {"chunk_length": hidden**2 * 16, "warmup_steps": 0, "schedule": "constant"}
            | optim,
        }
    )


def check_ranks(counts: Sequence[int], hidden: int) -> None:
    """Raises ConfigError."""
    if hidden < 64 or hidden % 64 or any(count < 2 or count % 2 for count in counts):
        raise ConfigError("--ranks are even numbers, --hidden is a multiple of 64")


def on_ranks(
    bench: str, counts: Sequence[int], hidden: int, rounds: int, directory: str | None = None
) -> list[dict[str, Any]]:
    """What `optimus bench BENCH` found on each number of local ranks, each with `directory` (the
    system's own for temporary files) to start in. Raises OptimusError."""
    found = []
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="optimus-bench-", dir=directory) as scratch:
            result = Path(scratch) / "result.json"
            settings = ("--hidden", str(hidden), "--rounds", str(rounds), "--result", str(result))
            arguments = ("bench", bench, "--ranks", str(count), *settings)
            # Libraries talk on standard output, which is the result's (`--json`).
            if spawn_local(arguments, count, stdout=2) or not result.exists():
                raise OptimusError(
                    f"bench {bench} on {counted(count, 'rank')} failed; see their messages"
                )
            found.append(json.loads(result.read_text()))
    return found


def be_a_rank(
    measure: Callable[[World, int, int, Path], dict[str, Any]],
    hidden: int,
    rounds: int,
    result: str,
) -> None:
    """One rank of `on_ranks`: all `measure(world, hidden, rounds, scratch)`, with a directory that
    they share, and the first writes the file `result`."""
    world = start_world(device="cpu")
    try:
        platform.set_threads(1, False, world.launch.local_world_size)
        found = measure(world, hidden, rounds, Path(result).parent)
    except Exception as error:
        raise end_run(error, world.launch, world.agreement, "benchmark") from error
    end_world()
    if world.is_first:
        Path(result).write_text(json.dumps(found))


def measure_optimizer(world: World, hidden: int, rounds: int, scratch: Path) -> dict[str, Any]:
    """Peak of memory, EPSO against SO, and FSDP2. A collective of all ranks."""
    size = world.size
    large, small = (mula_like(width, size, sharding="epso") for width in (hidden, 64))
    peak = measure_peak(large, small, world)
    shardings = []
    for ep in (2, size // 2):
        so, epso = (mula_like(hidden, size, ep, sharding=name) for name in ("so", "epso"))
        shardings.append(compare_shardings(so, epso, world, rounds))
        if size == 4:
            break
    fsdp = against_fsdp(mula_like(hidden, size, sharding="epso"), world, rounds)
    return {
        "ranks": size, "torch": torch.__version__,
        "peak": peak, "shardings": shardings, "fsdp": fsdp,
    }  # fmt: skip


def compare_shardings(so: Config, epso: Config, world: World, rounds: int) -> dict[str, Any]:
    """Seconds of the slowest rank and paired ratios, EPSO by SO.

    `update` is AdamW over the shards alone, in processor seconds of the rank; `step` is all that
    stands between a backward and the next forward (reduction, norm, update, gather), on the wall.
    A collective of all ranks.
    """
    both = {"so": make_ours(so, world), "epso": make_ours(epso, world)}
    updates = {name: _make_update(one.states, one.config) for name, one in both.items()}
    steps = {name: _make_step(one.states) for name, one in both.items()}
    update_s = race(updates, rounds, world, time.thread_time)
    step_s = race(steps, rounds, world)
    experts, others = _elements(both["so"].states)
    dp, ep = both["so"].groups.mesh.dp, both["so"].groups.mesh.ep
    return {
        "dp": dp,
        "ep": ep,
        "experts": experts,
        "others": others,
        "predicted": (experts / dp + others / (dp * ep)) / (experts / dp + others / dp),
        "shard_elements": [one.states.layout.shard_length for one in both.values()],
        "update": _of_both(update_s),
        "step": _of_both(step_s),
    }


def _of_both(seconds: dict[str, list[float]]) -> dict[str, Any]:
    so, epso = seconds["so"], seconds["epso"]
    return {"so_s": so, "epso_s": epso, "paired": paired(epso, so)}


def _elements(states: ChunkEngine) -> tuple[int, int]:
    """Of this rank's experts and of all else."""
    sizes = {name: slot.stop - slot.start for name, slot in states.slots.items()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return experts, sum(sizes.values()) - experts


def _make_update(states: ChunkEngine, config: Config) -> Callable[[], None]:
    optimizer = AdamW(config.optim)

    def update() -> None:
        optimizer.num_updates += 1
        for state in states.chunks:
            optimizer.update(state, 1e-4, 1.0)

    return update


def _make_step(states: ChunkEngine) -> Callable[[], None]:
    def step() -> None:
        states.gradients.reduce(0)
        states.gradients.finish()
        states.grad_norm()
        states.update(1e-4)
        states.wait()

    states.start_step()
    for one in states.chunks:
        one.grads.fill_(1e-3)
    return step


def format_ranks(found: Sequence[dict[str, Any]]) -> str:
    """In Markdown; of ratios the least, the median and the greatest."""
    lines = [
        "",
        "| ranks | dp x ep | EPSO by SO: update alone (predicted) | with collectives | "
        "ours by FSDP2, a step | peak by formula |",
        "|---|---|---|---|---|---|",
    ]
    for one in found:
        fsdp, peak = one["fsdp"], one["peak"]
        for row in one["shardings"]:
            timed = (row["update"], row["step"], fsdp)
            update, step, whole = (_told(part["paired"]) for part in timed)
            lines.append(
                f"| {one['ranks']} | {row['dp']} x {row['ep']} | {update} ({row['predicted']:.3f}) "
                f"| {step} | {whole} | {peak['measured'] / peak['formula']:.3f} |"
            )
    return "\n".join(lines)


def _told(ratios: Sequence[float]) -> str:
    return ", ".join(f"{ratio:.3f}" for ratio in ratios)
