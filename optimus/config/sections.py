"""All settings, with types, defaults and meanings. Help and docs are generated from this file.

For optional settings, 0 means "off" or "derived from other settings", as each docstring explains.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from optimus.config.model import ModelConfig
from optimus.config.section import (
    Count,
    CountOrZero,
    Fraction,
    NonNegative,
    Section,
)
from optimus.config.sizes import Size

MAX_PATTERNS, MAX_PATTERN_CHARS = 1000, 256
"""Maximum number of patterns in each of `optim.frozen` and `optim.groups`, and maximum number of
characters in a pattern. The limits bound the time to match patterns with parameter names. The same
limits apply to the patterns in a checkpoint, because checkpoints may be untrusted."""


class MixSource(Section):
    """A data set in `data.mix`."""

    path: Annotated[str, Field(min_length=1)]
    """Directory of the data set."""
    weight: Annotated[float, Field(gt=0)]
    """Weight of the data set. The fraction of instances that come from the data set is this weight
    divided by the sum of all weights."""


class DataConfig(Section):
    """Data sets for training and evaluation, as written by `optimus-data`."""

    path: str = ""
    """Directory of the training data set."""
    mix: Annotated[tuple[MixSource, ...], Field(strict=False)] = ()
    """Data sets to mix, instead of `path`. Each data set contributes instances exactly in
    proportion to its weight, and starts its next epoch when its instances are used up."""
    eval_path: str = ""
    """Directory of the held-out data set; empty: the folder `eval` in `path`, if it exists. With
    `mix`, empty means a mix of the folders `eval` of all data sets in `mix`, with the same weights.
    There is no held-out data set if such a folder is missing."""
    document_mask: bool = False
    """Restrict the attention of each token to its own document, in training and evaluation."""


class ParallelConfig(Section):
    """Distribution of a run over ranks. The world size is pp * dp * ep * tp."""

    pp: Count = 1
    """Number of pipeline-parallel ranks, over which the layers are divided."""
    dp: CountOrZero = 0
    """Number of data-parallel replicas; 0: world size / (pp * ep * tp)."""
    ep: Count = 1
    """Number of expert-parallel ranks, over which the experts of a layer are divided."""
    tp: Count = 1
    """Number of tensor-parallel ranks, over which attention heads and intermediate sizes are
    divided."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] = "1f1b"
    """Pipeline schedule: the order of forward and backward passes."""
    virtual_stages: Count = 1
    """Number of pipeline stages per pipeline rank; must be 1 for `1f1b` and `zb-h1`."""
    stage_layers: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Number of layers in each pipeline stage, in order: pp * virtual_stages numbers; empty: stages
    are balanced by cost."""
    ep_dispatch: Literal["auto", "allgather", "alltoall"] = "auto"
    """Method that sends tokens to expert-parallel ranks. `allgather`: send all tokens to all ranks.
    `alltoall`: send each token only to the ranks of its experts. `auto`: measure both methods when
    a new run starts and use the faster one. In deterministic mode and on Intel GPUs, `auto` means
    `allgather`."""
    sequence_parallel: bool = False
    """Shard the residual stream and the norms along the sequence dimension over the tensor-parallel
    ranks."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Maximum time in seconds that a rank waits for another rank. A longer wait ends the run with
    exit status 5. In a supervised run, all ranks are restarted if, during an update, no rank starts
    a collective for 1.2 times this number of seconds."""


class TrainConfig(Section):
    """Length, batch, precision and device of a run."""

    run_dir: str = ""
    """Run directory, for metrics, logs and checkpoints."""
    max_steps: CountOrZero = 0
    """Number of updates (optimizer steps) of the complete run."""
    stop_at_step: CountOrZero = 0
    """Stop after this update; 0: max_steps. The setting does not change the learning rate
    schedule."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Seed of the initial weights and of the generated samples."""
    seq_len: CountOrZero = 0
    """Sequence length in tokens; must equal the sequence length of the data set, which is the value
    of `optimus-data --context`."""
    global_batch_tokens: CountOrZero = 0
    """Number of tokens per update over all ranks; 0: one microbatch on each of the dp * ep data
    ranks."""
    microbatch_size: Count = 1
    """Number of sequences per forward and backward pass. Gradients are accumulated over as many
    passes as `global_batch_tokens` requires."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Dtype of parameters and matrix products; master weights and optimizer states are fp32."""
    deterministic: bool = False
    """Make training bitwise equal for all data- and pipeline-parallel layouts. Gradients are summed
    in the order of microbatches."""
    compile: bool = False
    """Compile the blocks of the model with torch.compile. Not possible with tp or ep above 1, in
    deterministic mode, with data.document_mask = true, with offloaded chunks or with
    optim.resident = "cache". The compilation of large blocks in the first step takes minutes."""
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """Device type of all ranks; `auto`: the first available type of xpu, cuda, cpu."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Number of intra-op threads per rank. 0: 1 thread in deterministic mode. In other modes, 0
    means OMP_NUM_THREADS or, if this variable is not set, the number of cores of the node divided
    by the number of its ranks."""
    fit_check: Literal["refuse", "warn", "off"] = "refuse"
    """Check once, before the ranks of a run connect, that each rank fits in the memory of its
    device. On a CPU, the ranks of a node share the memory of the machine. `refuse`: end with exit
    status 2 if a lower bound of the needed memory exceeds the available memory. If only the
    prediction of `optimus plan` exceeds the available memory, print a warning. `warn`: print a
    warning in both cases. `off`: make no check. The comparison of predicted and measured memory and
    step time, after the first updates, is then also left out."""
    machine: str = ""
    """Machine whose device `fit_check` and the predictions refer to: a name in configs/machine, or
    the path of a TOML file. With offload.mode = "auto", the rates and links of this machine also
    select the placement of model states, as in `optimus plan` (unless `offload.links` is set).
    Empty: the device of the first rank, without a predicted step time."""
    deadline_s: NonNegative = 0.0
    """Seconds after the start of the process at which the run saves a checkpoint and ends with exit
    status 3; 0: no deadline."""
    eval_interval: CountOrZero = 0
    """Number of updates between evaluations on held-out data; 0: only after the last update."""
    eval_instances: CountOrZero = 0
    """Number of held-out instances per evaluation, from the start of the held-out data set; 0: all
    instances."""
    sample_interval: CountOrZero = 0
    """Number of updates between samples; 0: no samples. A sample continues the first held-out
    instance and is printed to standard error."""
    sample_tokens: Count = 64
    """Maximum number of generated tokens per sample."""


class ParameterGroup(Section):
    """AdamW settings of the parameters whose names match a pattern."""

    pattern: Annotated[str, Field(min_length=1)]
    """Glob pattern of parameter names, such as `*norm*` or `blocks.[01].*`."""
    weight_decay: NonNegative | None = None
    """Weight decay of these parameters; absent: optim.weight_decay."""
    lr_scale: NonNegative = 1.0
    """Factor by which the learning rate of these parameters is multiplied."""


class OptimConfig(Section):
    """AdamW, its learning rate schedule and the sharding of model states."""

    lr: Annotated[float, Field(gt=0)] = 4e-4
    """Peak learning rate."""
    min_lr: NonNegative = 4e-5
    """Learning rate at update `decay_steps` and after it."""
    warmup_steps: CountOrZero = 0
    """Number of updates in which the learning rate increases linearly from 0 to `lr`."""
    decay_steps: CountOrZero = 0
    """Update at which the learning rate reaches `min_lr`; 0: train.max_steps."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Form of the decay of the learning rate after the warm-up."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of the first and the second moment of AdamW."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Epsilon that AdamW adds to the square root of the second moment."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of all parameters, unless `groups` sets another value."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = ()
    """Weight decay and learning rate of parameters that are selected by name. The name of a
    parameter is the name of its tensor in a checkpoint's model.safetensors. If several groups match
    a parameter, the first of them applies. A pattern that matches no parameter is an error."""
    frozen: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Glob patterns of the names of parameters that are not trained. Such parameters have neither
    gradients nor optimizer states."""
    clip_norm: NonNegative = 1.0
    """Maximum global norm to which gradients are clipped; 0: no clipping."""
    clip_after_warmup: bool = False
    """Clip gradients only after the warm-up, as in the Optimus paper."""
    sharding: Literal["none", "so", "epso"] = "none"
    """Axes of parallelism over which optimizer states are sharded. `none`: no sharding. `so`: dp.
    `epso`: dp for the states of experts, dp and ep for the states of all other parameters."""
    resident: Literal["all", "parameters", "cache"] = "all"
    """Model states that each rank keeps unsharded. `all`: parameters and gradients (ZeRO-1).
    `parameters`: only parameters (ZeRO-2). `cache`: neither; parameters are gathered when they are
    needed (ZeRO-3, the rCache of Elixir). `cache` needs sharding = `so` or `epso`."""
    cache_chunks: CountOrZero = 0
    """With resident = `cache` or with offloading, the maximum number of chunks whose parameters are
    gathered on the device at the same time; 0: no limit."""
    chunk_length: Count = 1 << 24
    """Approximate number of elements in a chunk, a flat buffer of model states. Each chunk is
    reduced, updated and gathered as a unit."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of gradients in the reduction over ranks."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which a rank sums the gradients of its microbatches. `bf16`, as in the Optimus
    paper, takes half the memory of `fp32` but rounds each sum. `bf16` needs
    train.dtype = "bf16"."""
    overlap: bool = True
    """Overlap the reduction of gradients with backward, and the gather of updated parameters with
    the next forward. In deterministic mode, only the gather overlaps. Results do not change."""
    loss_scale: NonNegative = 0.0
    """fp16: initial loss scale, a power of two; 0: 65536 times the number of microbatches, rounded
    up to a power of two. If a gradient overflows, all ranks skip the update and halve the loss
    scale. An overflow at `min_loss_scale` ends the run."""
    min_loss_scale: Annotated[float, Field(gt=0)] = 1.0
    """fp16: minimum loss scale, a power of two."""
    loss_scale_growth_steps: Count = 1000
    """fp16: the loss scale doubles after this number of consecutive updates without overflow."""

    def clips_at(self, step: int) -> bool:
        """Return True if the gradient norm is clipped at update `step`, counted from 1."""
        after_warmup = step > self.warmup_steps
        return self.clip_norm > 0 and (after_warmup or not self.clip_after_warmup)


class RecomputeConfig(Section):
    """Selective activation checkpointing."""

    modules: Annotated[
        tuple[Literal["norm", "attention", "moe", "experts", "block"], ...], Field(strict=False)
    ] = ()
    """Modules whose activations are recomputed in backward. `norm`: the output of each norm.
    `attention`, `moe`, `block`: all activations of the module. `experts`: only the pre-activation
    of the experts, the largest activation of the MoE layer. Recomputation does not change
    results."""


class KernelsConfig(Section):
    """Kernels of the MoE layers."""

    backend: Literal["auto", "sycl", "cuda", "cpu", "torch"] = "auto"
    """Implementation of the MoE layers. `sycl`, `cuda`, `cpu`: the kernels of Optimus for xpu, cuda
    or cpu devices. `torch`: torch operations. `auto`: the kernels for the device or, if they are
    not available, `torch`. The environment variable OPTIMUS_KERNELS takes precedence."""
    grouped_gemm: Literal["auto", "torch", "loop"] = "auto"
    """Implementation that computes the matrix products of all experts in a layer. `torch`: the
    grouped GEMM of torch. `loop`: a loop over the experts. `auto`: `loop` in deterministic mode. In
    other modes, `auto` measures both implementations when a new run starts and uses the faster
    implementation."""


class CheckpointConfig(Section):
    """Saving and loading of checkpoints."""

    interval: CountOrZero = 1000
    """Number of updates between full checkpoints; 0: only after the last update. The newest two
    full checkpoints are kept."""
    at_end: bool = True
    """Save a full checkpoint after the last update of a command, also if a signal or the deadline
    stops the run. If false, the next command continues from the last checkpoint at a multiple of
    `interval`, or from the start if there is none."""
    model_interval: CountOrZero = 0
    """Number of updates between model-only checkpoints; 0: no model-only checkpoints."""
    keep_models: CountOrZero = 0
    """Number of the newest model-only checkpoints to keep; 0: all."""
    keep_models_every: CountOrZero = 0
    """With `keep_models`, also keep model-only checkpoints whose step is a multiple of this number;
    0: keep only the newest."""
    scatter: Literal["balanced", "paper"] = "balanced"
    """Ranks that write a state if several ranks have a copy of it. `balanced`: each of these ranks
    writes an equal share. `paper`: a single rank writes the whole state, as in the Optimus
    paper."""
    distribute: Literal["broadcast", "all_reduce"] = "broadcast"
    """Collective that sends a loaded state from the rank that reads it to the other ranks."""
    async_save: bool = False
    """Write checkpoints in background threads. Training waits only until the states are copied to
    host memory."""
    direct_io: bool = True
    """Write with O_DIRECT if the file system supports it, so that other files stay in the page
    cache."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Maximum time in seconds for saving a checkpoint. A save that takes longer has failed."""
    max_failures: CountOrZero = 3
    """Number of consecutive failed saves that end the run with exit status 1; 0: no limit. A failed
    save after the last update always ends the run with this status."""
    allow_change: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of settings that are allowed to change when a run is resumed. Without an entry in this
    list, some settings, such as `optim.weight_decay`, must keep the values in the checkpoint."""
    load: str = "auto"
    """State from which the run starts. `auto`: the newest valid checkpoint in the run directory, or
    initial weights in a new run. `none`: initial weights. A path: a checkpoint or a Hugging Face
    directory. `model@STEP`: the model-only checkpoint of that step in the run directory, with new
    optimizer states."""


class ResilienceConfig(Section):
    """Supervised runs (`optimus launch`)."""

    heartbeat_s: Annotated[float, Field(gt=0)] = 3.0
    """Number of seconds without a message from a node after which the node counts as lost."""
    on_exhausted: Literal["shrink", "requeue", "stop"] = "requeue"
    """Action if a node is lost and no buffer (spare) node is free. `shrink`: continue with fewer
    nodes and the same global batch. `requeue`: end with exit status 3, so that the next job
    continues. `stop`: end with exit status 6."""
    on_repeat_nan: Literal["stop", "skip"] = "stop"
    """Action if the same data gives non-finite values on two nodes. `stop`: end with exit status 6
    and a report. `skip`: skip the update of this step in all attempts, as after an overflow in
    fp16."""
    max_restarts: CountOrZero = 100
    """Maximum number of restarts of the ranks in a job of the scheduler."""
    supervisor_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Number of seconds without a running supervisor after which the ranks save a checkpoint and
    end."""
    end_margin_s: Annotated[float, Field(ge=0)] = 120.0
    """Number of seconds before the end of the scheduler's job at which the ranks save a checkpoint
    and end."""


class ObserveConfig(Section):
    """Logging and metrics of a run."""

    tensorboard: bool = True
    """Write TensorBoard events to `tb/` in the run directory."""
    log_interval: Count = 1
    """Number of updates between progress lines, if standard error is not a terminal."""
    expert_load_interval: CountOrZero = 100
    """Number of updates from one write of the expert loads to the next. The loads are written to
    `expert_load.jsonl` in the run directory, a file that `optimus plan --load` reads. The loads of
    the first update are also written. 0: no file."""
    step_components: bool = False
    """Divide the time of each update on the first rank into computation, exposed communication,
    pipeline bubble, optimizer and the rest, and write these components to `metrics.jsonl`. All runs
    of `optimus study scaling` have the value true."""


class OffloadConfig(Section):
    """Offloading of chunks to host memory, as in Elixir."""

    mode: Literal["off", "auto", "manual"] = "off"
    """Placement of model states. `off`: all on the device. `manual`: the share `host_share` of the
    chunks in host memory, the other chunks on the device. `auto`: all on the device if the model
    states, activations and temporary tensors fit there; otherwise the placement with the shortest
    predicted step. For this placement, `auto` sets `host_share`, `order`, `optim.cache_chunks` and
    `optim.chunk_length`. It also sets `disk_share` if host memory is too small and `disk` is set.
    `optimus plan` prints the placement."""
    device_memory: Size = ""
    """Limit of the device memory of a rank for model states, activations and temporary tensors, as
    a number with a unit, such as "20GB" or "20GiB". A run that needs more does not start. Empty:
    the memory of the device; on a CPU, the memory of the machine, divided by its ranks."""
    host_memory: Size = ""
    """Limit of the host memory of a rank for model states and for copies of checkpoints and
    gradients. A run that needs more does not start. Empty: the memory of the machine, divided by
    its ranks."""
    host_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """With mode = `manual`, the share of the chunks whose parameters and optimizer states are in
    host memory. The host updates these chunks. Their parameters are copied to the device before
    each use, unless they are still in the cache (`optim.cache_chunks`)."""
    disk_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """With mode = `manual`, the share of the chunks in host memory that have their fp32 master
    weights and moments on disk. The host reads these states for each update and writes them back.
    The parameters in `train.dtype` and the sums of gradients stay in host memory. With
    `train.dtype` = "fp32", the parameters are the master weights, and only the moments are on
    disk."""
    disk: str = ""
    """Directory for the states on disk, on a local disk of each node. At the start, each rank
    creates a file with space for all its states on disk, and removes the file at the end of the
    run. Checkpoints contain these states, too. With mode = `auto`, as few states as possible are on
    disk."""
    disk_memory: Size = ""
    """Maximum size of the file of a rank in `disk`, as a number with a unit, such as "500GB" or
    "1.5TiB". A run whose states need more does not start. Empty: the free space of the disk."""
    expert_imbalance: Annotated[float, Field(ge=1)] = 1.5
    """Imbalance of the ep ranks for which memory is left free with `parallel.ep` above 1. The
    imbalance is the number of tokens that the experts of an ep rank process in a layer, divided by
    the mean over the ep ranks. A token counts once for each of its experts. `optimus plan --load
    RUN_DIR` prints the imbalance of a run. On accelerators, the needed memory depends on the
    imbalance only with `parallel.ep_dispatch` = "alltoall"."""
    order: Literal["microbatch", "layer"] = "microbatch"
    """Order of the microbatches of a step. `microbatch`: forward and backward of a microbatch, then
    forward and backward of the next microbatch. `layer`: all microbatches pass a layer before the
    next layer begins, as in the schedule `gpipe` with one stage for each layer. With `layer`, for
    any number of microbatches, each chunk is copied to the device at most twice per step, and its
    gradients are copied to the host once per step. However, the activations of all microbatches
    are kept until backward; with `recompute.modules` = ["block"], only the inputs of the blocks are
    kept. In a pipeline with `layer`, each rank has every pp-th layer, and `parallel.schedule` is
    not used."""
    grad_dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of the gradients that are copied to the host. With order = `microbatch`, gradients are
    copied once for each microbatch. With order = `layer`, they are copied once per step. `bf16`
    rounds the gradients once, and the link between the device and the host then carries at most 6
    bytes per parameter instead of 8. The host adds gradients in fp32. The gradients of chunks on
    the device are rounded in the same way, also with mode = `off`, so that results do not depend on
    the placement. `auto`: `bf16` if mode is not `off`, `train.dtype` = "bf16" and
    `train.deterministic` = false; otherwise `fp32`."""
    early_adam: Literal["auto", "on", "off"] = "auto"
    """Early updates: the host updates a chunk during backward, as soon as the gradients of the
    chunk are complete. The new states are written to spare buffers in host memory, with 14 bytes
    per parameter (12 with fp32 parameters). If the gradients must be clipped or are not finite, the
    buffers are discarded, and clipped gradients are applied as with `off`. `on`: update all chunks
    early, except those with states on disk. `auto`: update chunks early only if clipping is off in
    the step, or if the previous step was not clipped. The spare buffers have at most half of the
    host memory that the states leave free. With fewer buffers than chunks, the remaining chunks are
    updated after backward. If mode is also `auto`, early updates are used only if they shorten the
    predicted step. `off`: no early updates. All values give the same results."""
    links: str = ""
    """File with the rates of copies between the device and the host, and of updates on the host:
    the path of a file that `optimus bench links` has written, or the name of a file in
    configs/machine. With mode = `auto`, these rates determine the placement. On a CPU, which
    emulates a device, copies and updates take the time that these rates determine. On accelerators,
    the setting needs mode = `auto`. Empty: `auto` uses the rates in the file of `train.machine` or,
    if there are none, measured rates. Copies and updates are as fast as this machine permits."""

    def rounds_gradients(self, train: TrainConfig) -> bool:
        """Return True if gradients are rounded to bf16 before they are added to the sum of a
        step."""
        if self.grad_dtype != "auto":
            return self.grad_dtype == "bf16"
        return self.mode != "off" and train.dtype == "bf16" and not train.deterministic


class Config(Section):
    """All settings of a run. Only section `[model]` is required."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    kernels: KernelsConfig = KernelsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    resilience: ResilienceConfig = ResilienceConfig()
    observe: ObserveConfig = ObserveConfig()
    offload: OffloadConfig = OffloadConfig()
