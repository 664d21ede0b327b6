"""Planning of a run: check the configuration, and derive the mesh of ranks, the batch sizes, the
data sets and the checkpoint from which the run starts.

This module imports no torch, so that `optimus train --nproc` finds mistakes before it starts ranks.
`optimus.train.autotune` chooses the settings whose values must be measured.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.dataset import SPLITS, held_out_problem, integer_weights, read_manifest
from optimus.checkpoint.format import DATA_EOS
from optimus.checkpoint.store import NOTHING, Start, decide_start
from optimus.config import FREE_IN_LOGITS, Config, DataConfig, MixSource, ModelConfig, TrainConfig
from optimus.config.machine import load_links
from optimus.data.batch import BatchPlan, plan_batch
from optimus.data.dataset import FiniteSource, InstanceSource, TokenDataset
from optimus.data.mixture import MixedDataset
from optimus.distributed.mesh import Mesh, make_mesh
from optimus.errors import CheckpointError, ConfigError, DamageError, DataError, counted, reason_of
from optimus.io.files import read_regular
from optimus.parallel.divisible import check_divisible
from optimus.parallel.pipeline.plan import plan_stages, schedule_of
from optimus.planner.fit import capacity_of_machine
from optimus.resilience.supervision.attempt import read_skipped_steps
from optimus.train.schedule import rate_change

_MAX_TOKENIZER_BYTES = 1 << 28
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
"""Settings that a resumed run must not change, in addition to all settings in `[model]`. A setting
that is also in CHANGEABLE is allowed to change if `checkpoint.allow_change` names it.
`train.batch_tokens` is the actual number of tokens per update."""

_DATA_POSITION = ("data.identity", "train.batch_tokens")
"""Settings that, together with the step, determine which instances (token sequences) an update
reads."""

# optim.frozen is left out, since a checkpoint has no moments of frozen parameters. To train such
# parameters, start from model@STEP.
CHANGEABLE = (
    *(_BATCH if key == "train.batch_tokens" else key for key in FROZEN if key != "optim.frozen"),
    "train.threads",
    *(f"model.{key}" for key in FREE_IN_LOGITS),
)
"""Settings that a resumed run is allowed to change if `checkpoint.allow_change` names them."""

# These values are known only after ranks have measured them. `optimus.train.autotune` then compares
# the values with those of the checkpoint.
_MEASURED = ("kernels.backend", "kernels.grouped_gemm")
_PER_LAUNCH = (
    *("train.run_dir", "train.deadline_s", "train.stop_at_step", "checkpoint.load"),
    *("train.fit_check", "train.machine"),
)
"""Settings that can have another value in each command of a run. Differences between these values
are not reported."""


class RunData(NamedTuple):
    """The training and held-out data sets of a run, and the content of the tokenizer file."""

    training: InstanceSource
    held_out: FiniteSource | None
    """Data for the held-out loss; None if the run does not compute this loss."""
    tokenizer: bytes
    """Content of the tokenizer file of the training data. Every checkpoint contains a copy of this
    file."""

    def check_shards(self) -> None:
        """Raise DataError if a shard of a data set is missing or has the wrong size. Call this
        method on only one rank of a run, since data sets may have many thousands of shards."""
        for source in (self.training, self.held_out):
            for dataset in getattr(source, "sources", (source,)):
                if isinstance(dataset, TokenDataset):
                    dataset.check_shards()


@dataclass(frozen=True)
class PartialPlan:
    """The plan of a run, which can also be made on a machine that does not have the data sets or
    the run directory.

    Without the data sets, `data` is None. Without the run directory, `start` is the start of a new
    run.
    """

    mesh: Mesh
    batch: BatchPlan
    data: RunData | None
    """The data sets; None if they were not opened."""
    start: Start
    """The step and the checkpoint from which the run starts. If the run directory was not read,
    this is the start of a new run."""
    changes: tuple[str, ...]
    """Log lines about settings whose values differ from those in the checkpoint, and about a
    changed learning rate."""
    skipped_steps: tuple[int, ...]
    """The steps whose updates are skipped, from the file SKIPPED_STEPS of the run directory."""

    def tokens_after(self, step: int) -> int:
        """Return the total number of tokens that the run has read when update `step` is
        complete."""
        return self.start.tokens + (step - self.start.step) * self.batch.tokens


@dataclass(frozen=True)
class RunPlan(PartialPlan):
    """The plan of a run whose data sets have been opened."""

    data: RunData


class RunInputs(NamedTuple):
    """The fields of a RunPlan that every rank computes without communication."""

    mesh: Mesh
    batch: BatchPlan
    data: RunData


class ResolvedStart(NamedTuple):
    """The fields of a RunPlan that only the first rank computes. The first rank locks the run
    directory, computes the fields, and broadcasts the fields to all ranks."""

    start: Start
    changes: tuple[str, ...]
    skipped_steps: tuple[int, ...]


def resolve(
    config: Config, world_size: int, read_data: bool = True, read_run_dir: bool = True
) -> PartialPlan:
    """Check a run and return its plan: the mesh of ranks, the batch sizes, the data sets and the
    start. Creates no file.

    A training run calls `read_inputs` and `find_start` instead, and gets the same plan.

    Args:
        config: The run's configuration.
        world_size: Number of ranks.
        read_data: True to open the data sets. False on a machine that does not have them.
        read_run_dir: True to read the run directory and its checkpoints. False on a machine that
            does not have them.

    Returns:
        A RunPlan if the data sets were opened, otherwise a PartialPlan.

    Raises:
        ConfigError, DataError, CheckpointError: The run cannot start. The message is one line with
            the key, the value and the remedy.
    """
    mesh, batch = check_settings(config, world_size)
    if read_run_dir:
        check_run_dir(config.train.run_dir)
    data, training = None, None
    if read_data:
        data = open_data(config.data, config.train.seq_len, config.model.vocab_size)
        data.check_shards()
        training = data.training
    start = ResolvedStart(Start("none"), (), ())
    if read_run_dir:
        start = find_start(config, batch, training)
    if data is None:
        return PartialPlan(mesh, batch, None, *start)
    return RunPlan(mesh, batch, data, *start)


def read_inputs(config: Config, world_size: int) -> RunInputs:
    """Check the settings for the given number of ranks, and return the mesh, the batch sizes and
    the opened data sets. Creates no file.

    Raises:
        ConfigError, DataError: The settings or the data cannot be used. The message is one line
            with the key, the value and the remedy.
    """
    mesh, batch = check_settings(config, world_size)
    check_run_dir(config.train.run_dir)
    if config.offload.disk:
        _check_disk(Path(config.offload.disk))
    data = open_data(config.data, config.train.seq_len, config.model.vocab_size)
    return RunInputs(mesh, batch, data)


def _check_disk(directory: Path) -> None:
    try:
        if not stat.S_ISDIR(directory.stat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ConfigError(
            f"offload.disk = '{directory}': {reason_of(error)}; use a directory on a local disk "
            "that this user can write"
        ) from None


def check_settings(config: Config, world_size: int) -> tuple[Mesh, BatchPlan]:
    """Check the settings of a run. Return the mesh of its ranks and the batch sizes of an update.

    Raises:
        ConfigError: A setting is missing, or contradicts another setting or the number of ranks.
            All ranks raise the same error.
    """
    mesh, batch = divide(config, world_size)
    if config.offload.links:
        load_links(config.offload.links)  # refuse a wrong file before the rendezvous
    if config.train.machine:
        capacity_of_machine(config.train.machine, 1)  # refuse a wrong file
    for key, value in (
        ("data.path", config.data.path or config.data.mix),
        ("train.run_dir", config.train.run_dir),
        ("train.max_steps", config.train.max_steps),
    ):
        if not value:
            raise ConfigError(
                f"{key} is missing; set it in the configuration file, or add {key}=VALUE to the "
                "command"
            )
    for key in config.checkpoint.allow_change:
        if key not in CHANGEABLE:
            near = difflib.get_close_matches(key, CHANGEABLE, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(CHANGEABLE)}"
            raise ConfigError(
                f"checkpoint.allow_change does not support the setting {key!r}; {hint}"
            )
    return mesh, batch


def divide(config: Config, world_size: int) -> tuple[Mesh, BatchPlan]:
    """Check that the run can be divided over `world_size` ranks. Return the mesh of the ranks and
    the batch sizes of an update.

    Raises:
        ConfigError: The mesh, the model or the global batch does not fit the number of ranks. All
            ranks raise the same error.
    """
    mesh = make_mesh(config.parallel, world_size)
    check_divisible(config, mesh)
    batch = plan_batch(config.train, mesh.num_data_ranks)
    schedule_of(config, mesh, batch.microbatches_per_rank)
    plan_stages(config, mesh.pp)
    return mesh, batch


def check_run_dir(run_dir: str) -> None:
    """Check that `run_dir` is a writable directory or can be created. Raises ConfigError
    otherwise."""
    path = Path(run_dir).absolute()
    # lexists: mkdir cannot replace a link without a target.
    nearest = next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
    if not os.path.isdir(nearest):  # Path.is_dir raises an error if access is denied
        problem = f"{nearest} is not a directory"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problem = f"{nearest} is not writable"
    else:
        return
    raise ConfigError(f"train.run_dir = {run_dir!r}: {problem}; choose another directory")


def find_start(
    config: Config,
    batch: BatchPlan,
    training: InstanceSource | None,
    damaged: Mapping[Path, str] = NOTHING,
) -> ResolvedStart:
    """Return the start of a run. It consists of the start step, the checkpoint or the weights to
    load, log lines about settings whose values differ from those in the checkpoint, and the steps
    to skip.

    A run must lock the run directory before this call, so that no other run commits a checkpoint to
    the directory.

    Args:
        config: The run's configuration. `checkpoint.load` selects the start.
        batch: The batch sizes of an update.
        training: The training data; None if it was not opened.
        damaged: Checkpoints that must not be used because an attempt to load them failed, as a dict
            from path to reason.

    Raises:
        CheckpointError: A checkpoint is unusable, or a frozen setting differs from the
            checkpoint's. The message is one line with the key, the value and the remedy.
        ConfigError: The file SKIPPED_STEPS of the run directory is damaged or cannot be read.
    """
    train, optim = config.train, config.optim
    start = decide_start(train.run_dir, config.checkpoint.load, damaged)
    settings = flat_settings(config, batch, training)
    changes = _compare(settings, start, config.checkpoint.allow_change)
    if start.step < (train.stop_at_step or train.max_steps):
        rate = rate_change(start.step + 1, optim, train.max_steps, start.settings)
        changes += [rate] if rate else []
    return ResolvedStart(start, tuple(changes), read_skipped_steps(train.run_dir))


def flat_settings(
    config: Config, batch: BatchPlan, training: InstanceSource | None
) -> dict[str, Any]:
    """Return the settings that a checkpoint records, as a dict from "section.key" to the value.

    The dict also has the number of tokens per update and, if `training` is not None, the identity
    (fingerprint) of the training data.
    """
    flat = {
        f"{section}.{key}": value
        for section, table in config.model_dump(mode="json").items()
        for key, value in table.items()
    }
    if config.train.deterministic:
        flat["train.threads"] = config.train.threads or 1
    # Record derived sizes, so that a size that is left out equals the same size given explicitly.
    for key in ("num_key_value_heads", "head_dim", "num_experts"):
        flat[f"model.{key}"] = config.model.setting(key)
    flat["train.batch_tokens"] = batch.tokens
    if training is not None:
        flat |= {"data.identity": training.identity, DATA_EOS: training.eos_id}
    return flat


def network_warnings(
    model: ModelConfig, train: TrainConfig, mesh: Mesh, ranks_per_node: int
) -> list[str]:
    """Return a warning for each of the mesh axes tp and ep whose process groups span several nodes.
    Each warning contains the number of bytes that a layer sends over the network."""
    width = {"fp32": 4, "bf16": 2, "fp16": 2}[train.dtype]
    rows = train.microbatch_size * train.seq_len
    token_bytes = model.hidden_size * width
    # Bytes that the allgather dispatcher gathers for a token in forward. The formulas at the top of
    # parallel/expert.py instead count all bytes that a rank receives in forward and backward.
    routed_bytes = token_bytes + model.num_experts_per_tok * (width + 8)
    # tp all-reduces [tokens, hidden size] after attention and after the feed-forward layer.
    costs = {
        "tp": (mesh.tp, 2 * rows * token_bytes),
        "ep": (mesh.ep * mesh.tp, mesh.ep * rows * routed_bytes),
    }
    lines = []
    for axis, (ranks, size) in costs.items():
        if getattr(mesh, axis) == 1 or ranks_per_node % ranks == 0:
            continue
        operations = "gathers and sums" if axis == "ep" else "sums"
        single = ranks_per_node == 1
        remedy = (
            "start several ranks a node"
            if single
            else f"make ep * tp a divisor of {ranks_per_node}"
        )
        lines.append(
            f"parallel.{axis} = {getattr(mesh, axis)} spans several nodes of "
            f"{counted(ranks_per_node, 'rank')}: every layer {operations} {size / 1e6:.1f} MB "
            "of each microbatch over the network in forward and again in backward; "
            f"{remedy} to avoid this"
        )
    return lines


def _compare(settings: Mapping[str, Any], start: Start, allowed: Sequence[str]) -> list[str]:
    """Compare the settings of a run with those of the checkpoint from which the run starts. Return
    a log line for each difference.

    Raises CheckpointError if a setting that must not change differs and is not in `allowed`.
    """
    stored, changes = start.settings, []
    exact = settings["train.deterministic"] and stored.get("train.deterministic")
    # A run that starts from weights alone is allowed to change every setting.
    compared = settings if start.full is not None else _DATA_POSITION
    # `settings` has no data.identity if the data was not read.
    for key in sorted(set(stored) & set(compared) & set(settings)):
        if stored[key] == settings[key] or key in (*_PER_LAUNCH, *_MEASURED, _BATCH):
            continue
        if key == "parallel.ep_dispatch" and settings[key] == "auto":
            continue  # measured once the model exists
        name = _BATCH if key == "train.batch_tokens" else key
        change = f"{name} = {settings[key]!r} (checkpoint of step {start.step}: {stored[key]!r})"
        if key in _DATA_POSITION:
            change += _position_change(settings, stored, start.step)
        frozen = key.startswith("model.") or key in FROZEN or (key == "train.threads" and exact)
        if start.full is not None and frozen and name not in allowed:
            allow = f', or allow the change with checkpoint.allow_change=["{name}"]'
            raise CheckpointError(
                f"{change}: a resumed run must keep the checkpoint's value; restore this value or "
                f"start in another train.run_dir{allow if name in CHANGEABLE else ''}"
            )
        changes.append(change)
    return changes


def _position_change(settings: Mapping[str, Any], stored: Mapping[str, Any], step: int) -> str:
    """Return the range of instances that a resumed run skips or reads again because its data or its
    batch size has changed. The result is a text to append to the log line about the change. Return
    "" if the checkpoint does not record its data, batch size and sequence length."""
    needed = ("train.seq_len", "train.batch_tokens", "data.identity")
    if not all(stored.get(key) for key in needed):
        return ""  # the settings are not from a run of Optimus
    # The batch of step n starts at instance (n - 1) * (instances per batch).
    now, before = (
        step * source["train.batch_tokens"] // source["train.seq_len"]
        for source in (settings, stored)
    )
    # If the data was not opened, its identity counts as unchanged.
    same = settings.get("data.identity", stored["data.identity"]) == stored["data.identity"]
    read = before if same else 0
    low, high = sorted((now, read))
    return f"; instances {low} to {high} are {'skipped' if now > read else 'read again'}"


def open_data(data: DataConfig, seq_len: int, vocab_size: int) -> RunData:
    """Open and return the data sets of a run.

    Args:
        data: The section `[data]`.
        seq_len: Tokens per instance.
        vocab_size: Size of the model's vocabulary; the data's vocabulary must not be larger.

    Raises:
        ConfigError, DataError: A data set cannot be used. The message is one line with the key, the
            value and the remedy.
    """
    opener = _Opener(seq_len, vocab_size)
    training = _training_data(data, opener)
    return RunData(training, _evaluation_data(data, opener), _read_tokenizer(training))


class _Opener(NamedTuple):
    """Opens data sets, and checks that the sequence length and the vocabulary of each data set fit
    the model."""

    seq_len: int
    vocab_size: int

    def open(self, key: str, path: str) -> TokenDataset:
        """Open and return the data set at `path`, the value of setting `key`. Raises DataError if
        an instance of the data set does not have `seq_len` tokens, or if the vocabulary of the data
        set is larger than that of the model."""
        dataset = TokenDataset(path)
        if dataset.context != self.seq_len:
            raise DataError(
                f"train.seq_len = {self.seq_len}, but {key} = {path} was sharded with --context "
                f"{dataset.context}; set train.seq_len={dataset.context} or shard the data again"
            )
        if dataset.vocab_size > self.vocab_size:
            raise DataError(
                f"model.vocab_size = {self.vocab_size} is smaller than the vocabulary of "
                f"{key} = {path}; set model.vocab_size to at least {dataset.vocab_size}"
            )
        return dataset

    def open_mix(self, mix: Sequence[MixSource], paths: Sequence[str]) -> MixedDataset:
        """Open the data sets at `paths` and return their mixture, with the weights in `mix`."""
        try:
            weights = integer_weights([source.weight for source in mix])
        except ConfigError as error:
            raise ConfigError(f"data.mix: {error}") from None
        sources = [self.open(f"data.mix[{index}].path", path) for index, path in enumerate(paths)]
        return MixedDataset(sources, weights)


def _training_data(data: DataConfig, opener: _Opener) -> InstanceSource:
    """Return the training data: the data set at data.path or the mixture data.mix."""
    if not data.mix:
        dataset = opener.open("data.path", data.path)
        _check_trainable("data.path", dataset)
        return dataset
    if data.path:
        raise ConfigError(f"data.path = {data.path!r} and data.mix are both given; remove one")
    mixed = opener.open_mix(data.mix, [source.path for source in data.mix])
    for index, source in enumerate(mixed.sources):
        _check_trainable(f"data.mix[{index}].path", source)
    return mixed


def _check_trainable(key: str, dataset: TokenDataset) -> None:
    """Check that `dataset` is not the held-out part of a data set, which must not be trained on.
    Raises DataError, with a message that names `key`, the setting that selects `dataset`."""
    if dataset.split == SPLITS[1]:
        parent = dataset.path.resolve().parent
        has_data = (parent / "manifest.json").is_file()
        remedy = parent if has_data else "the data set that contains it"
        raise DataError(
            f"{key} = {dataset.path} is the held-out part of a data set and must not be trained "
            f"on; set {key} to {remedy}, and data.eval_path to the held-out part"
        )


def _evaluation_data(data: DataConfig, opener: _Opener) -> FiniteSource | None:
    """Return the data for the held-out loss: the data set at data.eval_path. If this setting is
    empty, return the held-out part of the training data. Return None if there is no held-out
    data."""
    if data.eval_path or not data.mix:
        path = data.eval_path or _evaluation_path(data.path)
        return opener.open("data.eval_path", path) if path else None
    # The held-out part of a mixture is a mixture, which needs held-out parts of all data sets.
    paths = [_evaluation_path(source.path) for source in data.mix]
    return opener.open_mix(data.mix, paths) if all(paths) else None


def _evaluation_path(path: str) -> str:
    """Return the path of the held-out part of the data set at `path`. Return "" if there is no
    held-out instance. Raises DataError if the directory "eval" in `path` belongs to another data
    set."""
    held_out = Path(path) / "eval"
    if not (held_out / "manifest.json").is_file():
        return ""
    manifest = read_manifest(held_out)
    if problem := held_out_problem(read_manifest(path), Path(path), manifest):
        raise DataError(f"{problem}; prepare the data set again or set data.eval_path")
    return str(held_out) if manifest.num_instances > 0 else ""


def _read_tokenizer(dataset: InstanceSource) -> bytes:
    """Return the content of a data set's tokenizer file. Raises DamageError if the file cannot be
    read, or differs from the tokenizer file with which the data set was made."""
    file = Path(dataset.tokenizer_file)
    try:
        content = read_regular(file, _MAX_TOKENIZER_BYTES)
    except OSError as error:
        problem = error.strerror
    else:
        if hashlib.sha256(content).hexdigest() == dataset.tokenizer_sha256:
            return content
        problem = (
            "is not the tokenizer that made the data set: its SHA-256 differs from the manifest's"
        )
    raise DamageError(f"{file}: {problem}; run optimus-data verify {file.parent}")
