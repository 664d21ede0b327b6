"""Random training runs. A case has a model, a batch, two layouts, and an end of the first run.

The first run trains under one layout until its end, for example a stop or a kill. The second run
continues under the other layout to the last step. The results are compared with those of an
uninterrupted run on one process. If deterministic mode promises equal bits for the two layouts, the
results must have the same bits. Otherwise, the errors of losses and of the first gradient norm must
be below TOLERANCE.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from optimus.checkpoint import store
from optimus.config import make_config
from optimus.errors import CheckpointError, ConfigError, OptimusError, OutcomeKind
from optimus.observe.metrics import read_json_lines
from optimus.planner.states import check_slots
from optimus.train.resolve import divide
from tests.kit.faults.disk import flip_bit
from tests.kit.layouts.matrix import MODELS, SCHEDULES, TOLERANCE, WIDE
from tests.kit.ranks.pool import RankPool, RanksFailed
from tests.kit.runs.results import metrics_of, weights_of
from tests.kit.runs.tiny import CONTEXT, make_tiny_data, tiny_tree
from tests.kit.runs.training import run_tree

STEPS = 5
_LIMIT_S = 600.0
"""Time limit of a run, with a margin for a busy machine."""
_GRACE_S = 60.0
"""Seconds from the loss of a rank until the other ranks are killed."""
Case = dict[str, Any]
"""Maps each axis (a setting that varies between cases) to a choice. The axes of LAYOUT occur once
for each run, with the run as a prefix, such as `first.pp`."""
RUNS = ("first", "second")
"""Names of the two runs of a case. The run on one process has the name `alone`."""

_MODELS = MODELS | {
    "moe-by-layer": {"model__num_experts": [8, 0, 4, 8, 0, 8, 8, 4]},
    "moe-uniform": {"model__router": "uniform"},
}
SHARED: dict[str, tuple[Any, ...]] = {  # the first choice of an axis is the simplest
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
LAYOUT: dict[str, tuple[Any, ...]] = {
    "deterministic": (True, False),
    "pp": (1, 2, 4, 8),
    "dp": (1, 2, 4, 8),
    "ep": (1, 2, 4, 8),
    "tp": (1, 2, 4, 8),
    "schedule": ("1f1b", *(schedule for schedule in SCHEDULES if schedule != "1f1b")),
    "virtual_stages": (1, 2),
    "sequence_parallel": (False, True),
    "ep_dispatch": ("auto", "alltoall"),
    "sharding": ("none", "so", "epso"),
    "resident": ("all", "parameters", "cache"),
    "cache_chunks": (0, 3, 8),
    "host_share": (0.0, 0.0, 0.4, 1.0),
    "order": ("microbatch", "layer"),
    "has_links": (False, True),
    "chunk_length": (1 << 24, 1 << 13, 5003),
    "overlap": (True, False),
    "recompute": ((), ("block",), ("norm",), ("attention", "moe"), ("experts",)),
    "scatter": ("balanced", "paper"),
    "distribute": ("broadcast", "all_reduce"),
    "async_save": (False, True),
}
LINKS = Path(__file__).with_name("links.toml")
"""File with the rates of an emulated device. At these rates, the copies and updates of a case take
some milliseconds."""
_SIZES = ("pp", "dp", "ep", "tp")


def axes() -> dict[str, tuple[Any, ...]]:
    """Return the axes of a case and their choices."""
    return SHARED | {f"{run}.{axis}": choices for run in RUNS for axis, choices in LAYOUT.items()}


def draw(number: random.Random) -> Case:
    """Draw a legal case. In half of the cases, the result must have the same bits as a run on one
    process."""
    exact = number.choice((True, False))
    sizes = _SIZES[:2] if exact else _SIZES
    worlds = {run: number.choice((1, 2, 2, 4, 4, 8, 8)) for run in RUNS}
    divided = {run: number.sample(sizes, number.choice((1, 2))) for run in worlds}
    while True:  # until the ranks of both runs can divide the model and the batch
        case = {axis: number.choice(choices) for axis, choices in SHARED.items()}
        if not exact:
            case["dtype"] = "fp32"  # in bf16, only exact cases can be compared
        for run, world in worlds.items():
            case |= {f"{run}.{axis}": choices[0] for axis, choices in LAYOUT.items()}
            while world_size(case, run) < world:
                case[f"{run}.{number.choice(divided[run])}"] *= 2
        if _choose_rest(case, number, exact):
            return case


def _choose_rest(case: Case, number: random.Random, exact: bool) -> bool:
    """Draw all axes of both layouts except pp, dp, ep and tp, until Optimus accepts the layouts.
    Return False if Optimus refuses 20 draws of a layout."""
    rest = {axis: choices for axis, choices in LAYOUT.items() if axis not in _SIZES}
    if exact:
        rest["deterministic"] = (True,)
    for run in RUNS:
        for _ in range(20):
            case |= {f"{run}.{axis}": number.choice(choices) for axis, choices in rest.items()}
            if _is_accepted(case, run):
                break
        else:
            return False
    if case["end"] == "last":
        case |= _with_equal_layouts(case)
    return True


def is_legal(case: Case) -> bool:
    """Return True if Optimus accepts both runs, and if their results can be compared with the
    results of a run on one process."""
    if case["dtype"] == "bf16" and not is_exact(case):
        return False
    if case["end"] == "last" and _layout(case, "first") != _layout(case, "second"):
        return False
    return all(_is_accepted(case, run) for run in RUNS)


def _is_accepted(case: Case, run: str) -> bool:
    if world_size(case, run) > 8:
        return False
    try:
        config = make_config(tree(case, run, "d", "r"))
        check_slots(config, divide(config, world_size(case, run))[0])
    except ConfigError:
        return False
    return True


def _layout(case: Case, run: str) -> dict[str, Any]:
    return {axis: case[f"{run}.{axis}"] for axis in LAYOUT}


def world_size(case: Case, run: str) -> int:
    """Return the number of ranks of a run."""
    return math.prod(case[f"{run}.{axis}"] for axis in _SIZES)


def is_exact(case: Case) -> bool:
    """Return True if the result must have the same bits as a run on one process."""
    return all(
        case[f"{run}.deterministic"] and case[f"{run}.ep"] == case[f"{run}.tp"] == 1 for run in RUNS
    )


def simpler(case: Case) -> Iterator[Case]:
    """Yield legal cases that are one step closer to the simplest case. Large steps are first."""
    for step in _steps():
        smaller = step(case)
        if smaller != case and is_legal(smaller):
            yield smaller


def _steps() -> Iterator[Callable[[Case], Case]]:
    """Yield functions that return a case with some axes simplified. A function that cannot simplify
    a case returns the same case."""
    choices_of = axes()

    def take(choice: dict[str, Any]) -> Callable[[Case], Case]:
        def step(case: Case) -> Case:
            is_simpler = all(
                choices_of[axis].index(choice[axis]) <= choices_of[axis].index(case[axis])
                for axis in choice
            )
            return case | choice if is_simpler else case

        return step

    yield lambda case: _with_equal_layouts(case) | {"end": "last"}
    yield _with_equal_layouts
    simplest = {axis: choices[0] for axis, choices in choices_of.items()}
    yield take({axis: simplest[axis] for axis in SHARED if axis != "end"})
    for prefixes in (("first.",), ("second.",), ("first.", "second.")):
        yield take({axis: simplest[axis] for axis in simplest if axis.startswith(prefixes)})
    for axis, choices in choices_of.items():
        for choice in choices:
            yield take({axis: choice})
            if axis.startswith("first."):  # in both layouts, since some cases need equal layouts
                yield take({axis: choice, axis.replace("first", "second"): choice})


def _with_equal_layouts(case: Case) -> Case:
    """Return a copy of the case in which both runs have the layout of the first run."""
    return case | {f"second.{axis}": case[f"first.{axis}"] for axis in LAYOUT}


def shrink(judge: Callable[[Case], str], case: Case, limit_s: float) -> Case:
    """Return the simplest case that fails.

    Args:
        judge: Function that returns a message if a case fails, else "" (`CaseRunner.judge`).
        case: A case that fails.
        limit_s: Time limit, after which the simplest case so far is returned.
    """
    end, has_changed = time.monotonic() + limit_s, True
    while has_changed:
        has_changed = False
        for step in _steps():
            smaller = step(case)
            if smaller == case or not is_legal(smaller):
                continue
            if time.monotonic() > end:
                return case
            if judge(smaller):
                case, has_changed = smaller, True
    return case


def tree(case: Case, run: str, folder: Path | str, run_dir: Path | str) -> dict[str, Any]:
    """Return the configuration of a run.

    Args:
        case: The case.
        run: One of RUNS, or "alone".
        folder: The directory of the data sets.
        run_dir: The run directory.
    """
    layers = case["num_layers"]
    model = {"model__num_layers": layers} | WIDE | _MODELS[case["model"]]
    if isinstance(experts := model.get("model__num_experts"), list):
        model["model__num_experts"] = experts[:layers]
    result = tiny_tree(
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
        # With a small eps, AdamW enlarges rounding errors: see matrix.with_large_eps.
        optim__eps=1e-8 if is_exact(case) else 1e-5,
        checkpoint__interval=case["interval"],
        data__document_mask=case["data"] == "masked",
    )
    if case["data"] == "mix":
        weights = {"one": 1.5, "two": 0.7}
        mix = [{"path": f"{folder}/{name}/data", "weight": w} for name, w in weights.items()]
        result["data"] |= {"path": "", "mix": mix}
    if case["groups"] == "two":
        result["optim"]["groups"] = [{"pattern": "*embed*", "weight_decay": 0.0, "lr_scale": 0.5}]
    if case["frozen"] == "queries":
        result["optim"]["frozen"] = ["*q_proj*"]
    if run != "alone":
        _set_layout(result, _layout(case, run))
    if run == "first" and case["end"] == "stop":
        result["train"]["stop_at_step"] = case["end_step"]
    return result


def _set_layout(tree: dict[str, Any], layout: dict[str, Any]) -> None:
    sections = {
        "train": ("deterministic",),
        "parallel": (*_SIZES, "schedule", "virtual_stages", "sequence_parallel", "ep_dispatch"),
        "optim": ("sharding", "resident", "cache_chunks", "chunk_length", "overlap"),
        "checkpoint": ("scatter", "distribute", "async_save"),
    }
    for section, keys in sections.items():
        tree.setdefault(section, {}).update({key: layout[key] for key in keys})
    tree["recompute"] = {"modules": list(layout["recompute"])}
    if layout["host_share"]:
        tree["offload"] = {"mode": "manual", "host_share": layout["host_share"]}
        if layout["pp"] == layout["virtual_stages"] == 1:
            tree["offload"]["order"] = layout["order"]
        if layout["has_links"]:
            tree["offload"]["links"] = str(LINKS)


class CaseRunner:
    """Runs cases on a pool of ranks.

    Args:
        pool: The pool.
        folder: A directory for the data sets and the runs.
    """

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        make_tiny_data(folder / "one")
        make_tiny_data(folder / "two", documents=70, tokenizer=folder / "one" / "tokenizer.json")

    def judge(self, case: Case) -> str:
        """Run a case. Return "" if all promises hold, else a message about the failure."""
        alone, many = self.folder / "alone", self.folder / "many"
        for run_dir in (alone, many):
            shutil.rmtree(run_dir, ignore_errors=True)
        try:
            self._run(1, tree(case, "alone", self.folder, alone))
            if case["end"] != "last":
                self._run_first(case, tree(case, "first", self.folder, many))
                if case["end"] == "damage":
                    _damage(many, random.Random(repr(case)))
            second = tree(case, "second", self.folder, many)
            self._run(world_size(case, "second"), second)
        except RanksFailed as error:
            return f"a run failed: {error}"
        return compare(case, many, alone)

    def _run(self, size: int, tree: dict[str, Any]) -> None:
        self.pool.run(size, run_tree, tree, start_world=False, timeout_s=_LIMIT_S)

    def _run_first(self, case: Case, tree: dict[str, Any]) -> None:
        """Execute the first run, which ends as the case defines, for example by a stop or a
        kill."""
        size = world_size(case, "first")
        if case["end"] == "stop":
            return self._run(size, tree)
        number = signal.SIGTERM if case["end"] == "term" else signal.SIGKILL
        generator = random.Random(repr(case))
        victim = generator.randrange(size)
        arguments = (tree, case["end_step"], victim, int(number), generator.random() * 0.05)
        limits = {"timeout_s": _LIMIT_S, "grace_s": _GRACE_S}
        try:
            self.pool.run(size, run_with_signal, *arguments, start_world=False, **limits)
        except RanksFailed as failure:
            is_stop = number == signal.SIGTERM
            expected = OutcomeKind.STOPPED if is_stop else OutcomeKind.LOST_PEER
            for outcome in failure.outcomes:
                was_killed = not is_stop and outcome.rank == victim and outcome.how == "died"
                if outcome.returned or was_killed:
                    continue
                error = outcome.value()
                if not isinstance(error, OptimusError) or error.kind is not expected:
                    raise


def run_with_signal(
    tree: dict[str, Any], step: int, victim: int, number: int, after_s: float
) -> None:
    """Run the training of a configuration on this rank, and send a signal to one rank.

    Args:
        tree: The configuration.
        step: The signal is sent after this step is in metrics.jsonl.
        victim: The rank that gets the signal.
        number: Number of the signal.
        after_s: Delay of the signal, in seconds.
    """
    if int(os.environ["RANK"]) == victim:
        metrics = Path(tree["train"]["run_dir"]) / "metrics.jsonl"
        arguments = (metrics, step, number, after_s)
        threading.Thread(target=_send_signal, args=arguments, daemon=True).start()
    run_tree(tree)


def _send_signal(metrics: Path, step: int, number: int, after_s: float) -> None:
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < step:
        time.sleep(0.001)
    time.sleep(after_s)
    os.kill(os.getpid(), number)


def _damage(run_dir: Path, number: random.Random) -> None:
    """Flip a bit of the newest valid full checkpoint, if there are at least two valid full
    checkpoints."""
    steps = [step for step in range(1, STEPS + 1) if store.full_path(run_dir, step).is_dir()]
    valid = [store.full_path(run_dir, step) for step in steps if _is_valid(run_dir, step)]
    if len(valid) < 2:
        return
    files = [path for path in sorted(valid[-1].rglob("*")) if path.is_file()]
    path = number.choice([path for path in files if path.stat().st_size])
    content = bytearray(path.read_bytes())
    flip_bit(content, number)
    path.write_bytes(content)


def _is_valid(run_dir: Path, step: int) -> bool:
    try:
        store.decide_start(run_dir, str(store.full_path(run_dir, step)))
    except CheckpointError:
        return False
    return True


def compare(case: Case, many: Path, alone: Path) -> str:
    """Compare the runs of a case with the run on one process.

    Args:
        case: The case.
        many: The run directory of the first and the second run.
        alone: The run directory of the run on one process.

    Returns:
        The first broken promise; "" if there is none.
    """
    lines, expected = metrics_of(many), metrics_of(alone)
    if [line["step"] for line in lines] != [line["step"] for line in expected]:
        return f"steps {[line['step'] for line in lines]} in metrics.jsonl"
    if not is_exact(case):
        return _compare_losses(lines, expected)
    for line, other in zip(lines, expected, strict=True):
        differing = [key for key in other if line.get(key) != other[key]]
        if differing:
            return f"step {line['step']}: {', '.join(differing)} are not the same bits"
    lines, expected = (read_json_lines(run_dir / "eval.jsonl") for run_dir in (many, alone))
    if len(lines) > len({line["step"] for line in lines}):
        return "a step is evaluated twice in eval.jsonl"
    if not all(line in lines for line in expected):  # the first run can add an evaluation
        return "the evaluations are not the same bits"
    ours, theirs = weights_of(many), weights_of(alone)
    if ours.keys() != theirs.keys():
        return f"the last checkpoint differs in names: {sorted(ours.keys() ^ theirs.keys())[:3]}"
    differing = [name for name in theirs if not ours[name].equal(theirs[name])]
    return f"not the same bits: {', '.join(differing[:3])}" if differing else ""


def _compare_losses(lines: list[dict[str, Any]], expected: list[dict[str, Any]]) -> str:
    for line, other in zip(lines, expected, strict=True):
        error = abs(line["loss"] - other["loss"]) / other["loss"]
        if not error < TOLERANCE:
            return f"step {line['step']}: the relative error of the loss is {error:.1e}"
    norm, other_norm = lines[0]["grad_norm"], expected[0]["grad_norm"]
    error = abs(norm - other_norm) / other_norm
    if error < TOLERANCE:
        return ""
    return f"the relative error of the first gradient norm is {error:.1e}"
