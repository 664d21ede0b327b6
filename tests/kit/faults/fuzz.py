"""Random runs: a model, a batch, two layouts and what happens between them, drawn axis by axis.

A case trains under one layout, is ended as the case says, goes on under another layout to the last
step, and is compared with one process that trained straight through, within the bounds of
deterministic mode.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from optimus.checkpoint import store
from optimus.config import make_config
from optimus.errors import CheckpointError, ConfigError, OptimusError, OutcomeKind
from optimus.observe.metrics import read_json_lines
from optimus.rank.states import check_slots
from optimus.train.resolve import divide
from tests.kit.layouts.matrix import MODELS, SCHEDULES, TOLERANCE, WIDE
from tests.kit.ranks.pool import RankPool, RanksFailed
from tests.kit.runs.results import metrics_of, weights_of
from tests.kit.runs.tiny import CONTEXT, make_tiny_data, tiny_tree
from tests.kit.runs.training import run_tree

STEPS = 5
_LIMIT_S = 600.0
"""For one part of a case, on a machine that does much else."""
_NOTICE_S = 60.0
"""Within which all ranks must have ended of themselves, once one is lost."""
Case = dict[str, Any]
"""A choice for every axis of SHARED, and for every axis of LAYOUT as `first.` and `second.`."""

_MODELS = MODELS | {
    "moe-by-layer": {"model__num_experts": [8, 0, 4, 8, 0, 8, 8, 4]},
    "moe-uniform": {"model__router": "uniform"},
}
SHARED: dict[str, tuple] = {  # the simplest choice of an axis stands first
    "model": tuple(_MODELS),
    "num_layers": (4, 5, 8),
    "dtype": ("fp32", "bf16"),
    "data": ("plain", "masked", "mix"),
    "microbatches": (4, 8, 6, 1),
    "microbatch_size": (1, 2, 3),
    "lr_schedule": ("cosine", "linear", "constant"),
    "clip_norm": (1.0, 0.0, 0.05),
    "groups": ("one", "two"),
    "frozen": ("none", "queries"),
    "eval_interval": (0, 2),
    "seed": (0, 1, 2, 3, 4, 5, 6, 7),
    "end": ("last", "stop", "term", "kill", "damage"),
    "end_step": (1, 2, 3, 4),
    "interval": (1, 2, 3),
}
LAYOUT: dict[str, tuple] = {
    "deterministic": (True, False),
    "pp": (1, 2, 4, 8),
    "dp": (1, 2, 4, 8),
    "ep": (1, 2, 4, 8),
    "tp": (1, 2, 4, 8),
    "schedule": ("1f1b", *(one for one in SCHEDULES if one != "1f1b")),
    "virtual_stages": (1, 2),
    "sequence_parallel": (False, True),
    "ep_dispatch": ("auto", "alltoall"),
    "sharding": ("none", "so", "epso"),
    "resident": ("all", "parameters", "cache"),
    "cache_chunks": (0, 3, 8),
    "chunk_length": (1 << 24, 1 << 13, 5003),
    "overlap": (True, False),
    "recompute": ((), ("block",), ("norm",), ("attention", "moe"), ("experts",)),
    "scatter": ("balanced", "paper"),
    "distribute": ("broadcast", "all_reduce"),
    "async_save": (False, True),
}
_SIZES = ("pp", "dp", "ep", "tp")


def axes() -> dict[str, tuple]:
    """Every axis of a case and its choices."""
    parts = [{f"{part}.{axis}": of for axis, of in LAYOUT.items()} for part in ("first", "second")]
    return SHARED | parts[0] | parts[1]


def draw(number: random.Random) -> Case:
    """A legal case; every other one is to be exact."""
    exact = number.choice((True, False))
    sizes = _SIZES[:2] if exact else _SIZES
    worlds = {part: number.choice((1, 2, 2, 4, 4, 8, 8)) for part in ("first", "second")}
    divided = {part: number.sample(sizes, number.choice((1, 2))) for part in worlds}
    while True:  # until a model and a batch are drawn that these worlds can divide
        case = {axis: number.choice(choices) for axis, choices in SHARED.items()}
        if not exact:
            case["dtype"] = "fp32"  # nothing is promised of bf16 there
        for part, world in worlds.items():
            case |= {f"{part}.{axis}": choices[0] for axis, choices in LAYOUT.items()}
            while world_size(case, part) < world:
                case[f"{part}.{number.choice(divided[part])}"] *= 2
        if _choose_rest(case, number, exact):
            return case


def _choose_rest(case: Case, number: random.Random, exact: bool) -> bool:
    """Choose what else a layout has until both are accepted; False: for these sizes it is hard."""
    rest = {axis: choices for axis, choices in LAYOUT.items() if axis not in _SIZES}
    if exact:
        rest["deterministic"] = (True,)
    for part in ("first", "second"):
        for _ in range(20):
            case |= {f"{part}.{axis}": number.choice(choices) for axis, choices in rest.items()}
            if _is_accepted(case, part):
                break
        else:
            return False
    if case["end"] == "last":
        case |= _alike(case)
    return True


def is_legal(case: Case) -> bool:
    """Whether its runs are accepted and something is promised of them."""
    if case["dtype"] == "bf16" and not is_exact(case):
        return False
    if case["end"] == "last" and _part(case, "first") != _part(case, "second"):
        return False
    return all(_is_accepted(case, part) for part in ("first", "second"))


def _is_accepted(case: Case, part: str) -> bool:
    if world_size(case, part) > 8:
        return False
    try:
        config = make_config(tree(case, part, "d", "r"))
        check_slots(config, divide(config, world_size(case, part))[0])
    except ConfigError:
        return False
    return True


def _part(case: Case, part: str) -> dict[str, Any]:
    return {axis: case[f"{part}.{axis}"] for axis in LAYOUT}


def world_size(case: Case, part: str) -> int:
    return math.prod(case[f"{part}.{axis}"] for axis in _SIZES)


def is_exact(case: Case) -> bool:
    """Whether the bits of one process are promised."""
    return all(
        case[f"{part}.deterministic"] and case[f"{part}.ep"] == case[f"{part}.tp"] == 1
        for part in ("first", "second")
    )


def simpler(case: Case) -> Iterator[Case]:
    """Legal cases that differ by one step towards the simplest one, the longest steps first."""
    yield from (one for step in _steps() if (one := step(case)) != case and is_legal(one))


def _steps() -> Iterator[Callable[[Case], Case]]:
    """Each takes a case to one that is simpler in some axes, or to itself."""

    def take(choice: Mapping[str, Any]) -> Callable[[Case], Case]:
        def step(case: Case) -> Case:
            places = {axis: every.index for axis, every in axes().items() if axis in choice}
            is_less = all(at(choice[axis]) <= at(case[axis]) for axis, at in places.items())
            return case | choice if is_less else case

        return step

    yield lambda case: _alike(case) | {"end": "last"}
    yield _alike
    simplest = {axis: choices[0] for axis, choices in axes().items()}
    parts = ("first.", "second.")
    yield take({axis: simplest[axis] for axis in SHARED if axis != "end"})
    for part in (*((one,) for one in parts), parts):
        yield take({axis: choice for axis, choice in simplest.items() if axis.startswith(part)})
    for axis, choices in axes().items():
        for choice in choices:
            yield take({axis: choice})
            if axis.startswith("first."):  # both at once, where they have to be alike
                yield take({axis: choice, axis.replace("first", "second"): choice})


def _alike(case: Case) -> Case:
    """The second layout is the first one."""
    return case | {f"second.{axis}": case[f"first.{axis}"] for axis in LAYOUT}


def shrink(judge: Callable[[Case], str], case: Case, limit_s: float) -> Case:
    """The simplest case found within the time that fails, too; `judge`: as in Bench."""
    end, found = time.monotonic() + limit_s, True
    while found:
        found = False
        for step in _steps():
            one = step(case)
            if one == case or not is_legal(one):
                continue
            if time.monotonic() > end:
                return case
            if judge(one):
                case, found = one, True
    return case


def tree(case: Case, part: str, folder: Path | str, run_dir: Path | str) -> dict[str, Any]:
    """The configuration of a part of a case: `first`, `second`, or `alone` on one process. The data
    sets lie in `folder`."""
    layers = case["num_layers"]
    model = {"model__num_layers": layers} | WIDE | _MODELS[case["model"]]
    if isinstance(experts := model.get("model__num_experts"), list):
        model["model__num_experts"] = experts[:layers]
    made = tiny_tree(
        f"{folder}/one/data",
        run_dir,
        **model,
        train__dtype=case["dtype"],
        train__global_batch_tokens=case["microbatches"] * case["microbatch_size"] * CONTEXT,
        train__microbatch_size=case["microbatch_size"],
        train__max_steps=STEPS,
        train__seed=case["seed"],
        train__eval_interval=case["eval_interval"],
        train__eval_instances=8,
        optim__schedule=case["lr_schedule"],
        optim__clip_norm=case["clip_norm"],
        # What AdamW makes of rounding where nothing but rounding is promised: see matrix.gently.
        optim__eps=1e-8 if is_exact(case) else 1e-5,
        checkpoint__interval=case["interval"],
        data__document_mask=case["data"] == "masked",
    )
    if case["data"] == "mix":
        weights = {"one": 1.5, "two": 0.7}
        mix = [{"path": f"{folder}/{name}/data", "weight": w} for name, w in weights.items()]
        made["data"] |= {"path": "", "mix": mix}
    if case["groups"] == "two":
        made["optim"]["groups"] = [{"pattern": "*embed*", "weight_decay": 0.0, "lr_scale": 0.5}]
    if case["frozen"] == "queries":
        made["optim"]["frozen"] = ["*q_proj*"]
    if part != "alone":
        _lay_out(made, _part(case, part))
    if part == "first" and case["end"] == "stop":
        made["train"]["stop_at_step"] = case["end_step"]
    return made


def _lay_out(made: dict[str, Any], layout: dict[str, Any]) -> None:
    rooms = {
        "train": ("deterministic",),
        "parallel": (*_SIZES, "schedule", "virtual_stages", "sequence_parallel", "ep_dispatch"),
        "optim": ("sharding", "resident", "cache_chunks", "chunk_length", "overlap"),
        "checkpoint": ("scatter", "distribute", "async_save"),
    }
    for section, keys in rooms.items():
        made.setdefault(section, {}).update({key: layout[key] for key in keys})
    made["recompute"] = {"modules": list(layout["recompute"])}


class Bench:
    """Where cases run: ranks, data sets and a folder for the runs."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        make_tiny_data(folder / "one")
        make_tiny_data(folder / "two", documents=70, tokenizer=folder / "one" / "tokenizer.json")

    def judge(self, case: Case) -> str:
        """What is wrong with it, in words; nothing if all promises hold."""
        alone, many = self.folder / "alone", self.folder / "many"
        for run_dir in (alone, many):
            shutil.rmtree(run_dir, ignore_errors=True)
        try:
            self._run(1, tree(case, "alone", self.folder, alone))
            if case["end"] != "last":
                self._run_to_its_end(case, tree(case, "first", self.folder, many))
                if case["end"] == "damage":
                    _damage(many, random.Random(repr(case)))
            second = tree(case, "second", self.folder, many)
            self._run(world_size(case, "second"), second)
        except RanksFailed as error:
            return f"it did not run: {error}"
        return compare(case, many, alone)

    def _run(self, size: int, made: dict[str, Any]) -> None:
        self.pool.run(size, run_tree, made, start_world=False, timeout_s=_LIMIT_S)

    def _run_to_its_end(self, case: Case, made: dict[str, Any]) -> None:
        size = world_size(case, "first")
        if case["end"] == "stop":
            return self._run(size, made)
        number = signal.SIGTERM if case["end"] == "term" else signal.SIGKILL
        chance = random.Random(repr(case))
        victim = chance.randrange(size)
        blow = (case["end_step"], victim, int(number), chance.random() * 0.05)
        limits = {"timeout_s": _LIMIT_S, "grace_s": _NOTICE_S}
        try:
            self.pool.run(size, run_struck, made, *blow, start_world=False, **limits)
        except RanksFailed as error:
            is_stop = number == signal.SIGTERM
            expected = OutcomeKind.STOPPED if is_stop else OutcomeKind.LOST_PEER
            for outcome in error.outcomes:
                fell = number == signal.SIGKILL and outcome.rank == victim and outcome.how == "died"
                if outcome.returned or fell:
                    continue
                error = outcome.value()
                if not isinstance(error, OptimusError) or error.kind is not expected:
                    raise


def run_struck(made: dict[str, Any], step: int, victim: int, number: int, after_s: float) -> None:
    """A run in which one rank gets a signal a moment after the metrics of a step are written."""
    if int(os.environ["RANK"]) == victim:
        metrics = Path(made["train"]["run_dir"]) / "metrics.jsonl"
        blow = (metrics, step, number, after_s)
        threading.Thread(target=_strike, args=blow, daemon=True).start()
    run_tree(made)


def _strike(metrics: Path, step: int, number: int, after_s: float) -> None:
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < step:
        time.sleep(0.001)
    time.sleep(after_s)
    os.kill(os.getpid(), number)


def _damage(run_dir: Path, number: random.Random) -> None:
    """Flip a bit of the newest full checkpoint, where there is another to fall back to."""
    steps = [step for step in range(1, STEPS + 1) if store.full_path(run_dir, step).is_dir()]
    valid = [store.full_path(run_dir, step) for step in steps if _is_valid(run_dir, step)]
    if len(valid) < 2:
        return
    files = [path for path in sorted(valid[-1].rglob("*")) if path.is_file()]
    chosen = number.choice([path for path in files if path.stat().st_size])
    content = bytearray(chosen.read_bytes())
    content[number.randrange(len(content))] ^= 1 << number.randrange(8)
    chosen.write_bytes(content)


def _is_valid(run_dir: Path, step: int) -> bool:
    try:
        store.decide_start(run_dir, str(store.full_path(run_dir, step)))
    except CheckpointError:
        return False
    return True


def compare(case: Case, many: Path, alone: Path) -> str:
    """What of the promises does not hold, in words."""
    found, wanted = metrics_of(many), metrics_of(alone)
    if [line["step"] for line in found] != [line["step"] for line in wanted]:
        return f"steps {[line['step'] for line in found]} in metrics.jsonl"
    if not is_exact(case):
        return _compare_losses(found, wanted)
    for line, other in zip(found, wanted, strict=True):
        differing = [key for key in other if line.get(key) != other[key]]
        if differing:
            return f"step {line['step']}: {', '.join(differing)} are not the same bits"
    found, wanted = (read_json_lines(run_dir / "eval.jsonl") for run_dir in (many, alone))
    if len(found) > len({line["step"] for line in found}):
        return "a step is evaluated twice in eval.jsonl"
    if not all(line in found for line in wanted):  # it may hold more: a part ends with one
        return "the evaluations are not the same bits"
    ours, theirs = weights_of(many), weights_of(alone)
    if ours.keys() != theirs.keys():
        return f"the last checkpoint differs in names: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    differing = [name for name in theirs if not ours[name].equal(theirs[name])]
    return f"not the same bits: {', '.join(differing[:3])}" if differing else ""


def _compare_losses(found: list[dict], wanted: list[dict]) -> str:
    for line, other in zip(found, wanted, strict=True):
        error = abs(line["loss"] - other["loss"]) / other["loss"]
        if not error < TOLERANCE:
            return f"step {line['step']}: the loss is off by {error:.1e}"
    first, other = found[0]["grad_norm"], wanted[0]["grad_norm"]
    error = abs(first - other) / other
    return "" if error < TOLERANCE else f"the first gradient's norm is off by {error:.1e}"
