"""What must hold before any process group starts. Needs no torch, so the spawner can ask first."""

from __future__ import annotations

import difflib
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_prep.manifest import held_out_problem, read_manifest
from data_prep.mixing import integer_weights
from data_prep.token_plan import PARTS
from optimus.checkpoint.manager import NOTHING, Start, decide_start
from optimus.checkpoint.manifest import DATA_EOS
from optimus.config import Config
from optimus.data.batch import BatchPlan, plan_batch
from optimus.data.dataset import FiniteSource, InstanceSource, TokenDataset
from optimus.data.mixture import MixedDataset
from optimus.distributed.mesh import Mesh, make_mesh
from optimus.errors import CheckpointError, ConfigError, DamageError, DataError, counted
from optimus.io.files import read_regular
from optimus.model.identity import FREE_IN_LOGITS, setting
from optimus.parallel.divisible import check_divisible
from optimus.parallel.pipeline.plan import plan_stages, schedule_of
from optimus.train.schedule import rate_change

_TOKENIZER_BYTES = 1 << 28
_BATCH = "train.global_batch_tokens"
FROZEN = (
    "data.identity",
    "train.seq_len",
    "train.batch_tokens",
    "train.seed",
    "train.dtype",
    "optim.betas",
    "optim.eps",
    "optim.weight_decay",
    "optim.groups",
    "optim.frozen",
)
"""Besides every `model.` setting: what a resumed run must share with its checkpoint. The batch is
stored as it really was, whatever train.global_batch_tokens left to the world."""

_OF_THE_DATA = ("data.identity", "train.batch_tokens")
"""What tells, with the step, which instances are read."""

# Moments of parameters that were not trained do not exist: those start from model@STEP.
_FIXED = ("optim.frozen",)
CHANGEABLE = (
    *(_BATCH if key == "train.batch_tokens" else key for key in FROZEN if key not in _FIXED),
    "train.threads",
    *(f"model.{key}" for key in FREE_IN_LOGITS),
)
"""Frozen settings that `checkpoint.allow_change` may name: the weights still fit."""

# Settled later, once devices are known: `optimus.train.kernels` compares them.
_SETTLED_LATER = ("kernels.backend", "kernels.grouped_gemm")
_PER_LAUNCH = ("train.run_dir", "train.deadline_s", "train.stop_at_step", "checkpoint.load")


@dataclass(frozen=True)
class Preflight:
    """Everything about a run that is known before it starts."""

    mesh: Mesh
    plan: BatchPlan
    dataset: InstanceSource | None
    """None in a dry run that skips the data."""
    eval_dataset: FiniteSource | None
    start: Start
    settings: dict[str, Any]
    differences: tuple[str, ...]
    """Free settings that differ from the checkpoint's and what they do to the learning rate, a line
    each, for the log."""
    tokenizer: bytes = b""
    """Content of the data's tokenizer file, of which every checkpoint gets a copy; empty on ranks
    that write none."""

    @property
    def data(self) -> InstanceSource:
        """The data set of a run that is no dry run."""
        assert self.dataset is not None
        return self.dataset

    def tokens_after(self, step: int) -> int:
        """Tokens that the run has read once update `step` is done."""
        return self.start.tokens + (step - self.start.step) * self.plan.tokens


def preflight(
    config: Config, world_size: int, check_data: bool = True, check_run_dir: bool = True
) -> Preflight:
    """Check the run against the world and its data; where it starts is left to `with_start`.

    Creates nothing. Raises ConfigError or DataError with one line naming key, value and remedy.

    Args:
        config: The run's configuration.
        world_size: How many ranks it has.
        check_data: False on a machine that does not see the data; there is no data set then.
        check_run_dir: False on a machine that does not see the run directory.
    """
    try:
        mesh, plan = _check_settings(config, world_size)
    except ConfigError as error:
        error.on_every_rank = True  # they follow from the settings and the world alone
        raise
    if check_run_dir:
        _check_run_dir(config.train.run_dir)
    dataset = _training_data(config) if check_data else None
    eval_dataset = _held_out_data(config) if check_data else None
    tokenizer = _read_tokenizer(dataset) if dataset is not None else b""
    settings, start = flat_settings(config, dataset, plan), Start("undecided")
    return Preflight(mesh, plan, dataset, eval_dataset, start, settings, (), tokenizer)


def with_start(
    config: Config, flight: Preflight, damaged: Mapping[Path, str] = NOTHING
) -> Preflight:
    """The same with its start, which `checkpoint.load` allows and which fits the settings.

    Decided by one rank, once it has the run directory for itself: until then another run may seal
    a checkpoint there. `damaged`: those that proved so as they were loaded, why by path. Raises
    CheckpointError with one line naming key, value and remedy.
    """
    start = decide_start(config.train.run_dir, config.checkpoint.load, damaged)
    differences = _compare(config, flight.settings, start)
    train = config.train
    if start.step < (train.stop_at_step or train.max_steps):
        rate = rate_change(start.step + 1, config.optim, train.max_steps, start.settings)
        differences += (rate,) if rate else ()
    return replace(flight, start=start, differences=differences)


def _check_settings(config: Config, world_size: int) -> tuple[Mesh, BatchPlan]:
    mesh, plan = divide(config, world_size)
    for key, value in (
        ("data.path", config.data.path or config.data.mix),
        ("train.run_dir", config.train.run_dir),
        ("train.max_steps", config.train.max_steps),
    ):
        if not value:
            raise ConfigError(f"{key} is missing; give it in the file or as {key}=VALUE")
    _check_allowed_changes(config)
    return mesh, plan


def divide(config: Config, world_size: int) -> tuple[Mesh, BatchPlan]:
    """How the world divides the model and its batch; ConfigError, alike on every rank, where it
    cannot."""
    try:
        mesh = make_mesh(config.parallel, world_size)
        check_divisible(config, mesh)
        plan = plan_batch(config, mesh.num_data_ranks)
        schedule_of(config, mesh, plan.microbatches_per_rank)
        plan_stages(config, mesh.pp)
    except ConfigError as error:
        error.on_every_rank = True
        raise
    return mesh, plan


def doubts(config: Config, mesh: Mesh, local_world_size: int) -> list[str]:
    """What will work, but dearly: axes meant for one node that reach over several. A line each,
    with the bytes that then pass between nodes."""
    train, model = config.train, config.model
    width = {"fp32": 4, "bf16": 2, "fp16": 2}[train.dtype]
    rows = train.microbatch_size * train.seq_len
    token = model.hidden_size * width
    routed = token + model.num_experts_per_tok * (width + 8)
    # tp adds up the stream behind attention and behind the feed-forward part.
    costs = {"tp": (mesh.tp, 2 * rows * token), "ep": (mesh.ep * mesh.tp, mesh.ep * rows * routed)}
    lines = []
    for axis, (ranks, size) in costs.items():
        if getattr(mesh, axis) == 1 or local_world_size % ranks == 0:
            continue
        what = "gathers and sums" if axis == "ep" else "sums"
        few = local_world_size == 1
        remedy = "start several ranks a node" if few else f"let ep * tp divide {local_world_size}"
        lines.append(
            f"parallel.{axis} = {getattr(mesh, axis)} reaches over nodes of "
            f"{counted(local_world_size, 'rank')}: every layer {what} {size / 1e6:.1f} MB "
            "of each microbatch over the network, "
            f"forward and again backward; {remedy} to stay inside"
        )
    return lines


def flat_settings(
    config: Config, dataset: InstanceSource | None, plan: BatchPlan
) -> dict[str, Any]:
    """All settings as "section.key": value, with the data's identity and the real batch."""
    flat = {
        f"{section}.{key}": value
        for section, table in config.model_dump(mode="json").items()
        for key, value in table.items()
    }
    if config.train.deterministic:
        flat["train.threads"] = config.train.threads or 1
    # Left out or given as what it would be derived to, a size is the same.
    for key in ("num_key_value_heads", "head_dim", "num_experts"):
        flat[f"model.{key}"] = setting(config.model, key)
    flat["train.batch_tokens"] = plan.tokens
    if dataset is not None:
        flat |= {"data.identity": dataset.identity, DATA_EOS: dataset.eos_id}
    return flat


def _compare(config: Config, settings: Mapping[str, Any], start: Start) -> tuple[str, ...]:
    """Refuse a frozen setting that differs from the checkpoint's; return the free differences. From
    a model all is free, and only what tells where in the data a step stands is listed."""
    stored, free = start.settings, []
    exact = settings["train.deterministic"] and stored.get("train.deterministic")
    compared = settings if start.full is not None else _OF_THE_DATA
    # Without data (a dry run that skips it) there is no data.identity.
    for key in sorted(set(stored) & set(compared) & set(settings)):
        if stored[key] == settings[key] or key in (*_PER_LAUNCH, *_SETTLED_LATER, _BATCH):
            continue
        if key == "parallel.ep_dispatch" and settings[key] == "auto":
            continue  # settled once the ranks are there
        name = _BATCH if key == "train.batch_tokens" else key
        change = f"{name} = {settings[key]!r} (checkpoint of step {start.step}: {stored[key]!r})"
        if key in _OF_THE_DATA:
            change += _data_moved(settings, stored, start.step)
        frozen = key.startswith("model.") or key in FROZEN or (key == "train.threads" and exact)
        if start.full is not None and frozen and name not in config.checkpoint.allow_change:
            allow = f', or allow it with checkpoint.allow_change=["{name}"]'
            raise CheckpointError(
                f"{change}: a resumed run must keep it; set it back or start in another "
                f"train.run_dir{allow if name in CHANGEABLE else ''}"
            )
        free.append(change)
    return tuple(free)


def _data_moved(settings: Mapping[str, Any], stored: Mapping[str, Any], step: int) -> str:
    """What other data or another batch mean: step n begins at instance (n - 1) * batch."""
    needed = ("train.seq_len", "train.batch_tokens", "data.identity")
    if not all(stored.get(key) for key in needed):
        return ""  # no run of ours wrote these settings
    here, there = (
        step * one["train.batch_tokens"] // one["train.seq_len"] for one in (settings, stored)
    )
    # Without a look at the data, they are taken to be the same.
    same = settings.get("data.identity", stored["data.identity"]) == stored["data.identity"]
    come_to = there if same else 0
    low, high = sorted((here, come_to))
    return f"; instances {low} to {high} are {'skipped' if here > come_to else 'read again'}"


def _check_allowed_changes(config: Config) -> None:
    for key in config.checkpoint.allow_change:
        if key not in CHANGEABLE:
            near = difflib.get_close_matches(key, CHANGEABLE, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(CHANGEABLE)}"
            raise ConfigError(f"checkpoint.allow_change = {key!r} names no such setting; {hint}")


def _training_data(config: Config) -> InstanceSource:
    """The data set of data.path, or the mix of those of data.mix. None may be a held-out part."""
    path, mix = config.data.path, config.data.mix
    if not mix:
        dataset = _fitting_dataset("data.path", path, config)
        _check_trained_on("data.path", dataset)
        return dataset
    if path:
        raise ConfigError(f"data.path = {path!r} and data.mix are both given; leave one out")
    mixed = _mixed(config, [source.path for source in mix])
    for index, source in enumerate(mixed.sources):
        _check_trained_on(f"data.mix[{index}].path", source)
    return mixed


def _read_tokenizer(dataset: InstanceSource) -> bytes:
    """Return the content of the tokenizer file that made the data. Raises DamageError for another
    one: checkpoints with it would decode to other text."""
    file = Path(dataset.tokenizer_file)
    try:
        content = read_regular(file, _TOKENIZER_BYTES)
    except OSError as error:
        what = error.strerror
    else:
        if hashlib.sha256(content).hexdigest() == dataset.tokenizer_sha256:
            return content
        what = "is not the tokenizer that made the data set: its sha256 is not that of the manifest"
    raise DamageError(f"{file}: {what}; run optimus-data verify {file.parent}")


def _check_trained_on(key: str, dataset: TokenDataset) -> None:
    """Raises DataError for a held-out part: what it measures is worth nothing once it is learnt."""
    if dataset.part == PARTS[1]:
        whose = dataset.path.resolve().parent
        own = whose if (whose / "manifest.json").is_file() else "the data set that it came with"
        raise DataError(
            f"{key} = {dataset.path} is a held-out part, which is not trained on; give {own}, and "
            "the held-out part as data.eval_path"
        )


def _held_out_data(config: Config) -> FiniteSource | None:
    """That of data.eval_path, or what came with the data: of a mix, mixed alike."""
    path, mix = config.data.eval_path, config.data.mix
    if path or not mix:
        path = path or _own_eval_path(config.data.path)
        return _fitting_dataset("data.eval_path", path, config) if path else None
    paths = [_own_eval_path(source.path) for source in mix]
    return _mixed(config, paths) if all(paths) else None


def _mixed(config: Config, paths: Sequence[str]) -> MixedDataset:
    """The data sets at `paths` by the weights of data.mix."""
    try:
        weights = integer_weights([source.weight for source in config.data.mix])
    except ConfigError as error:
        raise ConfigError(f"data.mix: {error}") from None
    sources = [
        _fitting_dataset(f"data.mix[{index}].path", path, config)
        for index, path in enumerate(paths)
    ]
    return MixedDataset(sources, weights)


def _fitting_dataset(key: str, path: str, config: Config) -> TokenDataset:
    dataset = TokenDataset(path)
    if dataset.context != config.train.seq_len:
        raise DataError(
            f"train.seq_len = {config.train.seq_len}, but {key} = {path} was sharded with context "
            f"{dataset.context}; set train.seq_len={dataset.context} or shard the data again"
        )
    if dataset.vocab_size > config.model.vocab_size:
        raise DataError(
            f"model.vocab_size = {config.model.vocab_size} is smaller than the vocabulary of "
            f"{key} = {path} ({dataset.vocab_size}); raise it to at least that"
        )
    return dataset


def _own_eval_path(path: str) -> str:
    """The held-out part that came with the data, unless it is too small for one instance. Raises
    DataError for another data set in its folder."""
    own = Path(path) / "eval"
    if not (own / "manifest.json").is_file():
        return ""
    manifest = read_manifest(own)
    if problem := held_out_problem(read_manifest(path), Path(path), manifest):
        raise DataError(f"{problem}; make the data again or set data.eval_path")
    return str(own) if manifest.num_instances > 0 else ""


def _check_run_dir(run_dir: str) -> None:
    """Raise ConfigError where `run_dir` is no directory, cannot be written or cannot be made."""
    path = Path(run_dir).absolute()
    nearest = next(place for place in (path, *path.parents) if os.path.exists(place))
    if not nearest.is_dir():
        problem = f"{nearest} is not a directory"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"{nearest} is not writable"
    else:
        return
    raise ConfigError(f"train.run_dir = {run_dir!r}: {problem}; choose another")
