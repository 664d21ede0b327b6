"""Every setting, its type, its default and what it means. Help and docs are made from this file.

Zero means "derived" or "off" where a setting can be left out; each docstring says which.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


def _experts(value: Any) -> Any:
    """A whole number, or one for each layer as a tuple."""
    numbers = value if isinstance(value, (list, tuple)) else [value]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("must be a whole number >= 0, or a list with one for each layer")
    return tuple(value) if isinstance(value, list) else value


Experts = Annotated[int | tuple[int, ...], BeforeValidator(_experts)]


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class RopeScaling(Section):
    """Stretching of the rotary embedding, in the field names Hugging Face gives it."""

    type: Literal["linear", "dynamic", "llama3", "yarn"]
    """`linear` divides positions by `factor`, `llama3` does so for the slow frequencies only,
    `yarn` blends the two, `dynamic` raises the base beyond max_position_embeddings."""
    factor: Annotated[float, Field(gt=0)]
    """How many times longer the context becomes."""
    original_max_position_embeddings: CountOrZero = 0
    """llama3, yarn: the context that the model was first trained with, in tokens."""
    low_freq_factor: NonNegative = 0.0
    """llama3: wavelengths above original / this are divided by `factor`."""
    high_freq_factor: NonNegative = 0.0
    """llama3: wavelengths below original / this are left alone."""
    beta_fast: NonNegative = 0.0
    """yarn: frequencies that turn more often than this in the original context are left alone;
    0: 32."""
    beta_slow: NonNegative = 0.0
    """yarn: frequencies that turn less often than this are divided by `factor`; 0: 1."""
    truncate: bool = True
    """yarn: whether the bounds of the blend are rounded outwards to whole frequencies."""
    attention_factor: NonNegative = 0.0
    """yarn: multiplies the rotated queries and keys; 0: derived from `factor` and the mscales."""
    mscale: NonNegative = 0.0
    """yarn: numerator's slope in the derived attention factor; 0: not given."""
    mscale_all_dim: NonNegative = 0.0
    """yarn: denominator's slope in the derived attention factor; 0: not given."""


ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "original_max_position_embeddings",
        "low_freq_factor",
        "high_freq_factor",
    ),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "truncate",
        "attention_factor",
        "mscale",
        "mscale_all_dim",
    ),
}
"""The fields of `RopeScaling` that each type reads."""


class ModelConfig(Section):
    """The decoder. `olmo` is dense, `olmoe` a sparse mixture of experts."""

    architecture: Literal["olmo", "olmoe"]
    """`olmo`: LayerNorm without weights, SwiGLU. `olmoe`: RMSNorm, q/k-norm, sparse MoE."""
    num_layers: Annotated[Count, Field(le=4096)]
    """Decoder blocks."""
    hidden_size: Count
    """Width of the residual stream (D)."""
    num_attention_heads: Count
    """Query heads."""
    num_key_value_heads: CountOrZero = 0
    """Key and value heads; 0: as many as query heads."""
    head_dim: CountOrZero = 0
    """Width of one head; 0: hidden_size / num_attention_heads."""
    intermediate_size: Count
    """Width of the SwiGLU, of one expert for `olmoe` (F)."""
    dense_intermediate_size: CountOrZero = 0
    """Width of the SwiGLU in layers of an `olmoe` without experts; 0: intermediate_size."""
    num_experts: Experts = 0
    """Experts of a layer (E), or a list with one number for each layer, 0 where it is dense; 0 for
    `olmo`."""
    num_experts_per_tok: CountOrZero = 0
    """Experts chosen for a token (K); 0 for `olmo`."""
    vocab_size: Count
    """Rows of the embedding and of the output head (V)."""
    tie_embeddings: bool = False
    """Whether the output head is the embedding."""
    attention_bias: bool = False
    """Whether the four attention projections have a bias."""
    clip_qkv: NonNegative = 0.0
    """Clamp q, k and v to [-clip_qkv, clip_qkv]; 0: off."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the variance in every norm."""
    router: Literal["top-k", "uniform"] = "top-k"
    """`top-k`: a token goes to its most probable experts. `uniform`: to experts in turn, whatever
    their probabilities, so that all get equally many rows (forced uniform routing, for measuring
    speed)."""
    norm_topk_prob: bool = False
    """Whether the chosen experts' weights are divided by their sum."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary embedding; absent: none."""
    max_position_embeddings: Count = 4096
    """Longest context, in tokens; `train.seq_len` may not exceed it."""
    pad_token_id: Annotated[int, Field(ge=-1)] = -1
    """A token whose embedding receives no gradient, as in transformers; -1: none."""
    bos_token_id: Annotated[int, Field(ge=-1)] = -1
    """The token that begins a text, written to Hugging Face directories; -1: none."""
    eos_token_ids: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Tokens at which generation stops; empty: none."""
    init_std: NonNegative = 0.02
    """Standard deviation of the initial weights, a normal cut at three of them."""
    embedding_init_std: NonNegative = 0.0
    """Standard deviation of the initial embedding, cut in the same way; 0: `init_std`. A larger one
    keeps tokens apart in the residual stream, and so in the routers, while blocks learn what all
    tokens have in common."""
    aux_loss_coef: NonNegative = 0.01
    """Weight of the load-balancing loss in the objective."""
    z_loss_coef: NonNegative = 0.001
    """Weight of the router z-loss in the objective."""
    aux_loss_form: Literal["olmo", "hf"] = "olmo"
    """`olmo`: 1 when balanced, averaged over layers. `hf`: transformers' form, for parity only."""

    @property
    def head_size(self) -> int:
        """Width of one head, given or derived."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads, given or derived."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def experts_by_layer(self) -> tuple[int, ...]:
        """Experts of every layer; 0 where it is dense."""
        one = self.num_experts
        return one if isinstance(one, tuple) else (one,) * self.num_layers

    @property
    def uniform_experts(self) -> int | None:
        """Experts of a layer, where all layers have the same number; otherwise None."""
        numbers = set(self.experts_by_layer)
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        return tuple(n for n, experts in enumerate(self.experts_by_layer) if experts)

    @property
    def experts(self) -> int:
        """E, of settings with one number for all layers, as `layer` gives them."""
        assert isinstance(self.num_experts, int)
        return self.num_experts

    def layer(self, number: int) -> ModelConfig:
        """The settings that one layer is made from: num_experts is its own, intermediate_size that
        of its SwiGLU or of one of its experts."""
        experts, inner = self.experts_by_layer[number], self.intermediate_size
        if not experts:
            inner = self.dense_intermediate_size or inner
        return self.model_copy(update={"num_experts": experts, "intermediate_size": inner})


class MixSource(Section):
    """One data set of a mix."""

    path: Annotated[str, Field(min_length=1)]
    """Its directory."""
    weight: Annotated[float, Field(gt=0)]
    """Its share of the instances, relative to the others; exactly the decimal that is written."""


class DataConfig(Section):
    """Data sets written by `optimus-data`."""

    path: str = ""
    """Directory of the training data set."""
    mix: Annotated[tuple[MixSource, ...], Field(strict=False)] = ()
    """Instead of `path`: several data sets, each with its share of the instances, as exact integer
    quotas; each source has its own epochs."""
    eval_path: str = ""
    """Directory of the held-out data set; empty: `path`/eval where it exists. Of a `mix` the
    held-out parts are mixed in the same way, until one would repeat, if every source has one."""
    document_mask: bool = False
    """Whether attention stays within documents, in training and evaluation; false: it crosses
    them."""


class ParallelConfig(Section):
    """How the world is divided. World = pp * dp * ep * tp."""

    pp: Count = 1
    """Pipeline stages."""
    dp: CountOrZero = 0
    """Data-parallel replicas; 0: what the world leaves."""
    ep: Count = 1
    """Ranks over which a layer's experts are divided."""
    tp: Count = 1
    """Ranks over which heads and intermediate sizes are divided."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] = "1f1b"
    """Order of a pipeline's forward and backward passes."""
    virtual_stages: Count = 1
    """Stages that one pipeline rank holds; `1f1b` and `zb-h1` hold one."""
    stage_layers: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Layers of each of the pp * virtual_stages stages, first to last; empty: evened out by cost,
    the output head counted."""
    ep_dispatch: Literal["auto", "allgather", "alltoall"] = "auto"
    """How tokens reach the ranks that hold their experts: `allgather` sends all tokens to all,
    `alltoall` each to those that need it, `auto` times both at the start and keeps the faster, also
    when the run is resumed. `auto` means `allgather` if deterministic, and on Intel GPUs, where an
    all-to-all can kill the process; `alltoall` is obeyed there."""
    sequence_parallel: bool = False
    """Divide norms along the sequence over the tensor-parallel ranks."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """A wait for another rank that takes longer than this ends the run with exit status 5; also
    one for a rank that still reads its part of a checkpoint."""


class TrainConfig(Section):
    """The run itself."""

    run_dir: str = ""
    """Where metrics, logs and checkpoints go."""
    max_steps: CountOrZero = 0
    """The run is complete after this update."""
    stop_at_step: CountOrZero = 0
    """End early after this update without touching the schedule; 0: at max_steps."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Seed of the initial weights and of sampling."""
    seq_len: CountOrZero = 0
    """Tokens of an instance; must equal the data set's context."""
    global_batch_tokens: CountOrZero = 0
    """Tokens of one update over all ranks; 0: one microbatch on every data rank."""
    microbatch_size: Count = 1
    """Sequences of one forward and backward pass; gradient accumulation follows."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Parameters and matrix products; masters and optimizer states are fp32 always."""
    deterministic: bool = False
    """Add gradients in microbatch order: the same bits on every data- and pipeline-parallel
    layout."""
    compile: bool = False
    """Compile the model's blocks with torch.compile at the first step (minutes for large ones); not
    with tp or ep."""
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """Where ranks compute; `auto`: xpu before cuda before cpu."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Intra-op threads of a rank; 0: 1 if deterministic, else OMP_NUM_THREADS, else the rank's
    share of cores."""
    deadline_s: NonNegative = 0.0
    """Checkpoint and end with status 3 this long after a rank's process began; 0: never."""
    eval_interval: CountOrZero = 0
    """Updates between evaluations on the held-out data; 0: only after the last update."""
    eval_instances: CountOrZero = 0
    """Held-out instances an evaluation reads, from the first on; 0: all."""
    sample_interval: CountOrZero = 0
    """Updates between sampled continuations of the first held-out instance, printed on standard
    error; 0: never."""
    sample_tokens: Count = 64
    """Length of a sampled continuation, in tokens."""


class ParameterGroup(Section):
    """Parameters that AdamW treats in a way of their own."""

    pattern: Annotated[str, Field(min_length=1)]
    """Which: their names match it as file names match `*norm*` or `blocks.[01].*`."""
    weight_decay: NonNegative | None = None
    """Their weight decay; absent: optim.weight_decay."""
    lr_scale: NonNegative = 1.0
    """Their learning rate is that of the schedule times this."""


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 4e-4
    """Peak learning rate."""
    min_lr: NonNegative = 4e-5
    """Learning rate at and after `decay_steps`."""
    warmup_steps: CountOrZero = 0
    """Updates over which the rate rises linearly from 0 to `lr`."""
    decay_steps: CountOrZero = 0
    """Update at which the rate reaches `min_lr`; 0: train.max_steps."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the rate falls after the warm-up."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay, on every parameter but those that `groups` say otherwise of."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = ()
    """Weight decay and learning rate by name, the first group that matches a parameter counts; a
    pattern that matches none is refused. Names are those in a checkpoint's model.safetensors."""
    frozen: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Patterns of parameters that are not trained: they take no gradient and no optimizer state."""
    clip_norm: NonNegative = 1.0
    """Largest global gradient norm; 0: no clipping."""
    clip_after_warmup: bool = False
    """Clip only once the warm-up is over, as the paper does."""
    sharding: Literal["none", "so", "epso"] = "none"
    """Over which ranks the optimizer states are divided."""
    resident: Literal["all", "parameters", "cache"] = "all"
    """What a rank keeps whole of chunks that are divided over ranks. `all`: parameters and
    gradients (ZeRO-1). `parameters`: gradients only for the backward of one microbatch, then its
    piece of their sum (ZeRO-2). `cache`: parameters only while they are needed, too (ZeRO-3, the
    rCache of Elixir), which needs `sharding`. Bits do not change if deterministic."""
    cache_chunks: CountOrZero = 0
    """resident = `cache`: chunks of parameters that are whole at a time; 0: as many as there are,
    each gathered once a step."""
    chunk_length: Count = 1 << 24
    """Elements of a chunk of model states, about; chunks are reduced, updated, gathered whole."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which gradients travel between ranks."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which a rank adds up the gradients of its microbatches: `bf16` (the paper's) takes
    half the memory and rounds every sum; it needs train.dtype = "bf16"."""
    overlap: bool = True
    """Overlap the reduction of gradients with backward (never if deterministic) and the gathering
    of updated parameters with the next forward, which changes no bits; false: wait for each."""
    loss_scale: NonNegative = 0.0
    """fp16: what backward starts from instead of 1, a power of two, at the first update; 0: 65536
    times the microbatches of the global batch, rounded up. It halves when a gradient overflows
    anywhere, and that update is skipped on all ranks; at `min_loss_scale` the run ends instead."""
    min_loss_scale: Annotated[float, Field(gt=0)] = 1.0
    """fp16: the loss scale does not fall below this power of two."""
    loss_scale_growth_steps: Count = 1000
    """fp16: updates in a row without overflow after which the loss scale doubles."""

    def clips_at(self, step: int) -> bool:
        """Return whether the gradient norm is clipped at update `step`, counted from 1."""
        after_warmup = step > self.warmup_steps
        return self.clip_norm > 0 and (after_warmup or not self.clip_after_warmup)


class RecomputeConfig(Section):
    """Selective activation checkpointing."""

    modules: Annotated[
        tuple[Literal["norm", "attention", "moe", "experts", "block"], ...], Field(strict=False)
    ] = ()
    """What is computed again in backward instead of being kept: in every block the outputs of the
    `norm`s, all that `attention` or the `moe` makes of its input, of that the `experts`'
    pre-activation alone (most of it, without the router and communication), or the whole `block`,
    which includes the others. Bits do not change."""


class KernelsConfig(Section):
    """Which code computes the parts of a mixture of experts."""

    backend: Literal["auto", "sycl", "cuda", "cpu", "torch"] = "auto"
    """Our kernels for xpu, cuda or cpu, or plain `torch`; `auto`: those of the device, or torch
    with the reason. OPTIMUS_KERNELS in the environment wins. A run writes down what it took."""
    grouped_gemm: Literal["auto", "torch", "loop"] = "auto"
    """Matrix products of all experts: torch's grouped one or a loop over experts; `auto`: the
    faster one, measured at the start and kept on resume; a deterministic run takes the loop."""


class CheckpointConfig(Section):
    """What is saved, when, and where a run begins."""

    interval: CountOrZero = 1000
    """Updates between full checkpoints, of which the newest two are kept; 0: only at the end."""
    model_interval: CountOrZero = 0
    """Updates between persistent model-only checkpoints; 0: none."""
    keep_models: CountOrZero = 0
    """How many model-only checkpoints to keep, newest first; 0: all."""
    keep_models_every: CountOrZero = 0
    """With `keep_models`: those of steps that are multiples of this are kept as well; 0: none."""
    scatter: Literal["balanced", "paper"] = "balanced"
    """Ranks that write states which several ranks hold: `balanced`: all of them, equal shares;
    `paper`: of model-parallel shard m, data-parallel index m mod dp writes all."""
    distribute: Literal["broadcast", "all_reduce"] = "broadcast"
    """Collective that sends states which one rank has read to the ranks that hold a copy."""
    async_save: bool = False
    """Training waits only while states are copied to host memory (as much again of it); threads
    write. A checkpoint is committed an update or two after its last byte is written."""
    direct_io: bool = True
    """Bypass the page cache in writes (O_DIRECT) where the file system supports it, so that the
    cache keeps its other pages. `optimus bench checkpoint` measures which is faster on a file
    system."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """A save that takes longer than this has failed."""
    max_failures: CountOrZero = 3
    """Consecutive failed saves that end the run with exit status 1; each failure before only prints
    a warning; 0: no limit. A failed last checkpoint always ends the run with that status."""
    allow_change: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Frozen settings that this resume may change, such as `optim.weight_decay`."""
    load: str = "auto"
    """`auto`: the newest valid one of the run; `none`; a checkpoint or a Hugging Face directory;
    or `model@STEP`, that model-only checkpoint with a fresh optimizer."""


class ObserveConfig(Section):
    """Logs and metrics of a run."""

    tensorboard: bool = True
    """Write TensorBoard events under the run directory's `tb/`."""
    log_interval: Count = 1
    """Updates between lines of plain progress where standard error is not a terminal."""


class OffloadConfig(Section):
    """Elixir chunk offloading."""

    mode: Literal["off", "auto", "manual"] = "off"
    """Where chunks of model states live."""


class Config(Section):
    """A whole run. Only `[model]` has no default."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig = TrainConfig()
    optim: OptimConfig = OptimConfig()
    recompute: RecomputeConfig = RecomputeConfig()
    kernels: KernelsConfig = KernelsConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    offload: OffloadConfig = OffloadConfig()
