"""All settings with types, defaults and meanings. Help and docs are generated from this file.

For optional settings, 0 means "off" or "derived from other settings"; the docstring says which.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
MAX_FROZEN, MAX_PATTERN_CHARS = 1000, 256
"""Limits of `optim.frozen`, which checkpoints store: each pattern is compared with each name."""


def _experts(value: Any) -> Any:
    """Validate an integer, or a list with an integer for each layer, which becomes a tuple."""
    numbers = value if isinstance(value, (list, tuple)) else [value]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("must be a whole number >= 0, or a list with one for each layer")
    return tuple(value) if isinstance(value, list) else value


Experts = Annotated[int | tuple[int, ...], BeforeValidator(_experts)]


class Section(BaseModel):
    """Base class of sections: frozen, without unknown keys, without conversion of types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class RopeScaling(Section):
    """Scaling of the rotary embedding to a longer context, with the field names of Hugging Face."""

    type: Literal["linear", "dynamic", "llama3", "yarn"]
    """`linear` divides positions by `factor`; `llama3` does so for low frequencies only; `yarn`
    interpolates between the two; `dynamic` raises the base for positions above
    max_position_embeddings."""
    factor: Annotated[float, Field(gt=0)]
    """Ratio of the new context length to the old one."""
    original_max_position_embeddings: CountOrZero = 0
    """llama3, yarn: context length of the original training, in tokens."""
    low_freq_factor: NonNegative = 0.0
    """llama3: frequencies whose wavelength exceeds original_max_position_embeddings /
    low_freq_factor are divided by `factor`."""
    high_freq_factor: NonNegative = 0.0
    """llama3: frequencies whose wavelength is below original_max_position_embeddings /
    high_freq_factor are not changed."""
    beta_fast: NonNegative = 0.0
    """yarn: frequencies with more rotations than this in the original context are not changed;
    0: 32."""
    beta_slow: NonNegative = 0.0
    """yarn: frequencies with fewer rotations than this in the original context are divided by
    `factor`; 0: 1."""
    truncate: bool = True
    """yarn: round the bounds of the interpolated range outwards to whole frequencies."""
    attention_factor: NonNegative = 0.0
    """yarn: factor of the rotated queries and keys; 0: derived from `factor`, `mscale` and
    `mscale_all_dim`."""
    mscale: NonNegative = 0.0
    """yarn: slope of the numerator in the derived attention factor; 0: not set."""
    mscale_all_dim: NonNegative = 0.0
    """yarn: slope of the denominator in the derived attention factor; 0: not set."""


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
    """Inner width of the SwiGLU; for `olmoe`, of one expert (F)."""
    dense_intermediate_size: CountOrZero = 0
    """Inner width of the SwiGLU in dense layers of an `olmoe`; 0: intermediate_size."""
    num_experts: Experts = 0
    """Experts per layer (E), or a list with a number for each layer, in which 0 makes a layer
    dense; 0 for `olmo`."""
    num_experts_per_tok: CountOrZero = 0
    """Experts per token (K); 0 for `olmo`."""
    vocab_size: Count
    """Rows of the embedding and of the output head (V)."""
    tie_embeddings: bool = False
    """Use the weights of the embedding as the output head."""
    attention_bias: bool = False
    """Add a bias to the four attention projections."""
    clip_qkv: NonNegative = 0.0
    """Clamp q, k and v to [-clip_qkv, clip_qkv]; 0: off."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Epsilon that each norm adds to the variance."""
    router: Literal["top-k", "uniform"] = "top-k"
    """`top-k`: each token goes to its most probable experts. `uniform`: tokens are assigned to
    experts in turn, so that all experts get the same number of tokens (forced uniform routing, to
    measure speed)."""
    norm_topk_prob: bool = False
    """Divide the weights of a token's experts by their sum."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary embedding; absent: none."""
    max_position_embeddings: Count = 4096
    """Longest context, in tokens; `train.seq_len` must not exceed it."""
    pad_token_id: Annotated[int, Field(ge=-1)] = -1
    """Token whose embedding gets no gradient, as in transformers; -1: none."""
    bos_token_id: Annotated[int, Field(ge=-1)] = -1
    """Beginning-of-sequence token, written to Hugging Face directories; -1: none."""
    eos_token_ids: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Tokens at which generation stops; empty: none."""
    init_std: NonNegative = 0.02
    """Standard deviation of the initial weights; normal, truncated at three standard deviations."""
    embedding_init_std: NonNegative = 0.0
    """Standard deviation of the initial embedding, truncated in the same way; 0: `init_std`. With a
    larger one, the residual streams of different tokens, and so their routes, differ more while the
    blocks learn what all tokens have in common."""
    aux_loss_coef: NonNegative = 0.01
    """Weight of the load-balancing loss in the objective."""
    z_loss_coef: NonNegative = 0.001
    """Weight of the router z-loss in the objective."""
    aux_loss_form: Literal["olmo", "hf"] = "olmo"
    """Load-balancing loss. `olmo`: per layer, then averaged; 1 if balanced. `hf`: as in
    transformers, over the tokens of all layers; only for comparison."""

    @property
    def head_size(self) -> int:
        """Width of a head: `head_dim`, or else derived from `hidden_size`."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key and value heads; by default the number of query heads."""
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def experts_by_layer(self) -> tuple[int, ...]:
        """Number of experts of each layer; 0 for a dense layer."""
        experts = self.num_experts
        return experts if isinstance(experts, tuple) else (experts,) * self.num_layers

    @property
    def uniform_experts(self) -> int | None:
        """Number of experts per layer if it is the same for all layers, else None."""
        numbers = set(self.experts_by_layer)
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Indices of the layers that have experts."""
        return tuple(n for n, experts in enumerate(self.experts_by_layer) if experts)

    @property
    def experts(self) -> int:
        """Number of experts (E) of the configuration of one layer, as `layer` returns it."""
        assert isinstance(self.num_experts, int)
        return self.num_experts

    def layer(self, number: int) -> ModelConfig:
        """Return the settings of one layer.

        `num_experts` is the layer's number of experts, `intermediate_size` the inner width of its
        SwiGLU or of one of its experts.
        """
        experts, width = self.experts_by_layer[number], self.intermediate_size
        if not experts:
            width = self.dense_intermediate_size or width
        return self.model_copy(update={"num_experts": experts, "intermediate_size": width})


class MixSource(Section):
    """One data set of a mix."""

    path: Annotated[str, Field(min_length=1)]
    """Directory of the data set."""
    weight: Annotated[float, Field(gt=0)]
    """Share of the instances, relative to the other weights; used as an exact decimal number."""


class DataConfig(Section):
    """Data sets for training and evaluation, as written by `optimus-data`."""

    path: str = ""
    """Directory of the training data set."""
    mix: Annotated[tuple[MixSource, ...], Field(strict=False)] = ()
    """Data sets to mix by weight, in place of `path`. The shares are exact integer quotas. The
    epochs of each data set are counted separately."""
    eval_path: str = ""
    """Directory of the held-out data set; empty: `path`/eval if it exists. With `mix`: the held-out
    data of all data sets, mixed by the same weights until one of them would repeat, if each has
    some."""
    document_mask: bool = False
    """Restrict attention to the document of each token, in training and evaluation."""


class ParallelConfig(Section):
    """Sizes of parallelism. World size = pp * dp * ep * tp."""

    pp: Count = 1
    """Pipeline stages."""
    dp: CountOrZero = 0
    """Data-parallel replicas; 0: world size / (pp * ep * tp)."""
    ep: Count = 1
    """Expert-parallel ranks, over which the experts of a layer are divided."""
    tp: Count = 1
    """Tensor-parallel ranks, over which attention heads and intermediate sizes are divided."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1"] = "1f1b"
    """Order of forward and backward passes in a pipeline."""
    virtual_stages: Count = 1
    """Stages per pipeline rank; 1 for `1f1b` and `zb-h1`."""
    stage_layers: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    """Layers of each of the pp * virtual_stages stages, from the first to the last; empty: balanced
    by cost, including that of the output head."""
    ep_dispatch: Literal["auto", "allgather", "alltoall"] = "auto"
    """Communication of tokens between expert-parallel ranks. `allgather` sends all tokens to all
    ranks, `alltoall` sends each token to the ranks of its experts. `auto` measures both when a run
    starts and keeps the faster one on resume. `auto` is `allgather` in deterministic mode, and on
    Intel GPUs, where an all-to-all can crash the process."""
    sequence_parallel: bool = False
    """Divide the sequences in norms over the tensor-parallel ranks."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """Time limit of a wait for another rank, also for one that still loads a checkpoint. A wait
    that exceeds it ends the run with exit status 5."""


class TrainConfig(Section):
    """Length, batch, precision and device of a run."""

    run_dir: str = ""
    """Directory of metrics, logs and checkpoints."""
    max_steps: CountOrZero = 0
    """Updates of the complete run."""
    stop_at_step: CountOrZero = 0
    """Stop after this update, with the learning rate schedule of the complete run; 0: at
    max_steps."""
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Seed of the initial weights and of sampling."""
    seq_len: CountOrZero = 0
    """Tokens per instance; must equal the context of the data set."""
    global_batch_tokens: CountOrZero = 0
    """Tokens per update over all ranks; 0: one microbatch on each data rank."""
    microbatch_size: Count = 1
    """Sequences per forward and backward pass. The number of gradient accumulation steps is derived
    from it and `global_batch_tokens`."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of parameters and matrix products; master weights and optimizer states are fp32."""
    deterministic: bool = False
    """Sum gradients in the order of microbatches: training gives the same bits on all data- and
    pipeline-parallel layouts."""
    compile: bool = False
    """Compile the blocks of the model with torch.compile at the first step, which takes minutes for
    large blocks; not with tp or ep."""
    device: Literal["auto", "cpu", "cuda", "xpu"] = "auto"
    """Device type of all ranks; `auto`: the first available one of xpu, cuda, cpu."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Intra-op threads per rank; 0: 1 if deterministic, else OMP_NUM_THREADS, else the cores
    divided by the local ranks."""
    deadline_s: NonNegative = 0.0
    """Save a checkpoint and end with exit status 3 at this time after the start of the process; 0:
    never."""
    eval_interval: CountOrZero = 0
    """Updates between evaluations on held-out data; 0: only after the last update."""
    eval_instances: CountOrZero = 0
    """Held-out instances per evaluation, always the first ones; 0: all."""
    sample_interval: CountOrZero = 0
    """Updates between samples: continuations of the first held-out instance, printed to standard
    error; 0: never."""
    sample_tokens: Count = 64
    """Tokens of a sample."""


class ParameterGroup(Section):
    """AdamW settings of a set of parameters."""

    pattern: Annotated[str, Field(min_length=1)]
    """Pattern of parameter names with the wildcards of file names, such as `*norm*` or
    `blocks.[01].*`."""
    weight_decay: NonNegative | None = None
    """Weight decay of these parameters; absent: optim.weight_decay."""
    lr_scale: NonNegative = 1.0
    """Factor of the learning rate for these parameters."""


class OptimConfig(Section):
    """AdamW and its schedule."""

    lr: Annotated[float, Field(gt=0)] = 4e-4
    """Peak learning rate."""
    min_lr: NonNegative = 4e-5
    """Learning rate at and after `decay_steps`."""
    warmup_steps: CountOrZero = 0
    """Updates in which the learning rate increases linearly from 0 to `lr`."""
    decay_steps: CountOrZero = 0
    """Update at which the learning rate reaches `min_lr`; 0: train.max_steps."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Decay of the learning rate after the warm-up."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Epsilon added to the root of the second moment."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay of all parameters for which `groups` has no other value."""
    groups: Annotated[tuple[ParameterGroup, ...], Field(strict=False)] = ()
    """Weight decay and learning rate by parameter name. The first group that matches a parameter
    applies. A pattern without a match is refused. Names are those in a checkpoint's
    model.safetensors."""
    frozen: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Patterns of the names of parameters that are not trained; they have neither gradients nor
    optimizer states."""
    clip_norm: NonNegative = 1.0
    """Maximum of the global gradient norm; 0: no clipping."""
    clip_after_warmup: bool = False
    """Clip only after the warm-up, as in the paper."""
    sharding: Literal["none", "so", "epso"] = "none"
    """Sharding of optimizer states. `none`: not sharded. `so`: over dp. `epso`: those of experts
    over dp, all others over dp x ep."""
    resident: Literal["all", "parameters", "cache"] = "all"
    """Model states that a rank keeps unsharded. `all`: parameters and gradients (ZeRO-1).
    `parameters`: parameters; gradients only during the backward of a microbatch, then a shard of
    their sum (ZeRO-2). `cache`: none; parameters are gathered when they are needed (ZeRO-3, the
    rCache of Elixir), which needs `sharding`. In deterministic mode the choice does not change the
    bits."""
    cache_chunks: CountOrZero = 0
    """resident = `cache`: maximum number of gathered chunks at a time; 0: all, each gathered once
    per step."""
    chunk_length: Count = 1 << 24
    """Approximate number of elements in a chunk of model states, the unit of reduction, update and
    gathering."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of gradients in communication between ranks."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Type in which a rank sums the gradients of its microbatches. `bf16`, as in the paper, takes
    half the memory and rounds each sum; it needs train.dtype = "bf16"."""
    overlap: bool = True
    """Overlap the reduction of gradients with backward (not in deterministic mode), and the gather
    of updated parameters with the next forward. It does not change the bits."""
    loss_scale: NonNegative = 0.0
    """fp16: initial loss scale, a power of two; 0: 65536 times the microbatches of the global
    batch, rounded up to a power of two. If a gradient overflows on any rank, all ranks skip the
    update and halve the loss scale; if it is at `min_loss_scale` already, the run ends."""
    min_loss_scale: Annotated[float, Field(gt=0)] = 1.0
    """fp16: minimum of the loss scale, a power of two."""
    loss_scale_growth_steps: Count = 1000
    """fp16: consecutive updates without overflow after which the loss scale doubles."""

    def clips_at(self, step: int) -> bool:
        """Return whether the gradient norm is clipped at update `step`, counted from 1."""
        after_warmup = step > self.warmup_steps
        return self.clip_norm > 0 and (after_warmup or not self.clip_after_warmup)


class RecomputeConfig(Section):
    """Selective activation checkpointing."""

    modules: Annotated[
        tuple[Literal["norm", "attention", "moe", "experts", "block"], ...], Field(strict=False)
    ] = ()
    """Activations that backward recomputes: the outputs of each `norm`; all activations of
    `attention`, of the `moe` layer or of the whole `block`; or only the pre-activation of the
    `experts`, the largest activation of `moe`, without the router and its communication. It does
    not change the bits."""


class KernelsConfig(Section):
    """Implementation of the mixture of experts."""

    backend: Literal["auto", "sycl", "cuda", "cpu", "torch"] = "auto"
    """`sycl`, `cuda`, `cpu`: the kernels of Optimus for xpu, cuda or cpu; `torch`: torch
    operations; `auto`: the kernels for the device, or else torch, with the reason in the log. The
    environment variable OPTIMUS_KERNELS replaces this setting. The resolved configuration has the
    backend of the run."""
    grouped_gemm: Literal["auto", "torch", "loop"] = "auto"
    """Matrix products of all experts of a layer. `torch`: the grouped GEMM of torch; `loop`: a loop
    over the experts; `auto`: the faster one, measured when a run starts and kept on resume, or
    `loop` in deterministic mode."""


class CheckpointConfig(Section):
    """Saving of checkpoints, and the start of a run."""

    interval: CountOrZero = 1000
    """Updates between full checkpoints, of which the newest two are kept; 0: only after the last
    update."""
    model_interval: CountOrZero = 0
    """Updates between persistent model-only checkpoints; 0: none."""
    keep_models: CountOrZero = 0
    """Number of model-only checkpoints to keep, the newest ones; 0: all."""
    keep_models_every: CountOrZero = 0
    """With `keep_models`: also keep the model-only checkpoints of steps that are multiples of this;
    0: none."""
    scatter: Literal["balanced", "paper"] = "balanced"
    """Ranks that write a state of which several ranks have a copy. `balanced`: all of them, in
    equal shares; `paper`: for model-parallel rank m, the rank with data-parallel index m mod dp."""
    distribute: Literal["broadcast", "all_reduce"] = "broadcast"
    """Collective that distributes a state from the rank that reads it to the ranks that need a
    copy."""
    async_save: bool = False
    """Write checkpoints in threads. Training waits only for a copy of the states in host memory. A
    checkpoint is committed one or two updates after its last byte is written."""
    direct_io: bool = True
    """Write without the page cache (O_DIRECT) if the file system supports it, so that other files
    stay in the cache. `optimus bench checkpoint` measures both ways on a file system."""
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0
    """Time limit of a save. A save that exceeds it has failed."""
    max_failures: CountOrZero = 3
    """Consecutive failed saves that end the run with exit status 1; earlier failures print a
    warning; 0: no limit. A failed save after the last update always ends the run with exit status
    1."""
    allow_change: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Frozen settings that this resume may change, such as `optim.weight_decay`."""
    load: str = "auto"
    """Start of the run. `auto`: the newest valid checkpoint in the run directory; `none`: initial
    weights; a path: a checkpoint or a Hugging Face directory; `model@STEP`: the model-only
    checkpoint of that step, with a new optimizer."""


class ObserveConfig(Section):
    """Logs and metrics of a run."""

    tensorboard: bool = True
    """Write TensorBoard events to `tb/` in the run directory."""
    log_interval: Count = 1
    """Updates between progress lines if standard error is not a terminal."""


class OffloadConfig(Section):
    """Offloading of chunks to host memory, as in Elixir."""

    mode: Literal["off", "auto", "manual"] = "off"
    """Placement of chunks of model states; this version supports `off` only."""


class Config(Section):
    """All settings of a run. Only `[model]` has no default."""

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
