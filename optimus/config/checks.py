"""Check combinations of settings when a configuration is loaded.

Each error names the key, the value and the remedy. `optimus.train.resolve` checks settings that
depend on the world size or on files.
"""

from __future__ import annotations

import math

from optimus.config.axes import WITHIN_BLOCK
from optimus.config.model import ROPE_FIELDS, ModelConfig, RopeScaling
from optimus.config.sections import (
    MAX_PATTERN_CHARS,
    MAX_PATTERNS,
    Config,
    OffloadConfig,
    OptimConfig,
    ParallelConfig,
    RecomputeConfig,
    TrainConfig,
)
from optimus.errors import ConfigError, counted, refuse_if

_MAX_ELEMENTS = 1 << 56
"""Largest accepted number of elements of a tensor. Torch counts the bytes of a tensor in a signed
64-bit integer, which would overflow at 2^60 elements of 8 bytes."""


def check(config: Config) -> None:
    """Raise ConfigError for the first invalid combination of settings."""
    model, train, optim = config.model, config.train, config.optim
    _heads(model)
    _experts(model)
    _sizes(model)
    _rope(model)
    _sequence(train, model)
    _batch(train)
    _schedule(optim, train)
    _patterns(optim)
    _determinism(config)
    _residency(optim, train, config.offload)
    _loss_scale(optim, train)
    _kernels(config)
    _compile(config)
    _pipeline(config.parallel, model, config.offload)
    _recompute(config.recompute, model)
    checkpoint = config.checkpoint
    refuse_if(
        checkpoint.keep_models_every and not checkpoint.keep_models,
        f"checkpoint.keep_models_every = {checkpoint.keep_models_every}: all model-only "
        "checkpoints are kept anyway, because checkpoint.keep_models = 0; set "
        "checkpoint.keep_models, or leave keep_models_every out",
    )


def _sizes(model: ModelConfig) -> None:
    hidden, experts = model.hidden_size, max(1, *model.experts_by_layer)
    width = max(model.intermediate_size, model.dense_intermediate_size)
    heads = max(model.num_attention_heads, model.num_kv_heads) * max(model.head_size, 1)
    sizes = {
        "vocab_size": model.vocab_size * hidden,
        "num_attention_heads * head_dim": heads * hidden,
        "num_experts * intermediate_size": 2 * experts * width * hidden,
    }
    for name, size in sizes.items():
        refuse_if(
            size > _MAX_ELEMENTS,
            f"model.{name} and model.hidden_size = {hidden} make a tensor of {size:,} "
            "elements, more elements than torch can count; use smaller sizes",
        )
    refuse_if(
        model.pad_token_id >= model.vocab_size,
        f"model.pad_token_id = {model.pad_token_id} is not below model.vocab_size = "
        f"{model.vocab_size}; give the id of a token of the vocabulary, or -1 for none",
    )


def _heads(model: ModelConfig) -> None:
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    refuse_if(
        kv_heads and heads % kv_heads,
        f"model.num_key_value_heads = {kv_heads} must divide num_attention_heads = {heads}; "
        f"the nearest divisor is {nearest_divisor(heads, kv_heads)}",
    )
    refuse_if(
        not model.head_dim and model.hidden_size % heads,
        f"model.hidden_size = {model.hidden_size} is not divisible by num_attention_heads = "
        f"{heads}; change one of them or set model.head_dim",
    )
    refuse_if(
        model.head_size % 2,
        f"model.head_dim = {model.head_size} is odd, but rotary embeddings rotate pairs of "
        "elements; use an even head_dim",
    )


def _experts(model: ModelConfig) -> None:
    refuse_if(
        model.architecture == "olmo" and (model.num_experts or model.num_experts_per_tok),
        f"model.num_experts = {model.num_experts}: architecture 'olmo' is dense; leave "
        "out num_experts and num_experts_per_tok, or use model.architecture = 'olmoe'",
    )
    if model.architecture == "olmoe":
        _sparse_layers(model)
    else:
        for key in (
            "router",
            "norm_topk_prob",
            "aux_loss_form",
            "aux_loss_coef",
            "z_loss_coef",
            "dense_intermediate_size",
        ):
            value, default = getattr(model, key), ModelConfig.model_fields[key].default
            refuse_if(
                value and value != default,
                f"model.{key} = {value!r}: architecture 'olmo' is dense and has no router; "
                "leave this setting out",
            )


def _sparse_layers(model: ModelConfig) -> None:
    numbers, top_k = model.experts_by_layer, model.num_experts_per_tok
    refuse_if(
        len(numbers) != model.num_layers,
        f"model.num_experts = {list(numbers)} has {counted(len(numbers), 'number')}, but "
        f"model.num_layers = {model.num_layers}; give one number for each layer",
    )
    refuse_if(
        not any(numbers),
        f"model.num_experts = {model.num_experts}: no layer has experts; give at least "
        "one layer experts, or use model.architecture = 'olmo'",
    )
    fewest = min(number for number in numbers if number)
    if not 1 <= top_k <= fewest:
        layers = "" if model.uniform_experts is not None else " in the smallest sparse layer"
        raise ConfigError(
            f"model.num_experts_per_tok = {top_k} must be between 1 and "
            f"model.num_experts = {fewest}{layers}; change one of them"
        )
    refuse_if(
        model.dense_intermediate_size and all(numbers),
        f"model.dense_intermediate_size = {model.dense_intermediate_size}: every layer has "
        "experts; leave this setting out, or make layers dense with a 0 in model.num_experts",
    )
    refuse_if(
        model.aux_loss_form == "hf" and model.uniform_experts is None,
        "model.aux_loss_form = 'hf' needs the same number of experts in all layers, but "
        f"model.num_experts = {list(numbers)}; use 'olmo'",
    )


def _kernels(config: Config) -> None:
    grouped_gemm = config.kernels.grouped_gemm
    refuse_if(
        config.model.architecture == "olmo" and grouped_gemm != "auto",
        f"kernels.grouped_gemm = {grouped_gemm!r}: architecture 'olmo' has no experts; "
        "leave this setting out",
    )
    refuse_if(
        config.train.deterministic and grouped_gemm == "torch",
        "kernels.grouped_gemm = 'torch': train.deterministic needs 'loop'; leave this setting "
        "out, or use train.deterministic = false",
    )


def _compile(config: Config) -> None:
    if not config.train.compile:
        return
    refuse_if(
        config.train.deterministic,
        "train.compile = true: the order of sums in compiled code depends on shapes; "
        "train.deterministic needs train.compile = false",
    )
    refuse_if(
        config.data.document_mask,
        "train.compile = true: with data.document_mask = true, torch would recompile the "
        "blocks for each arrangement of documents; use data.document_mask = false or "
        "train.compile = false",
    )
    for axis in WITHIN_BLOCK:
        if (size := getattr(config.parallel, axis)) > 1:
            raise ConfigError(
                f"train.compile = true and parallel.{axis} = {size}: a block is compiled as one "
                "graph, but ranks communicate within the block; use "
                f"parallel.{axis} = 1 or train.compile = false"
            )


_FEWEST_ROTATIONS = 1e-6
"""Smallest nonzero value of `beta_fast` and `beta_slow`. With a far smaller value, the computation
of the RoPE frequencies would overflow."""


def _rope(model: ModelConfig) -> None:
    scaling = model.rope_scaling
    if scaling is None:
        return
    for key, field in RopeScaling.model_fields.items():
        value = getattr(scaling, key)
        refuse_if(
            key not in ("type", *ROPE_FIELDS[scaling.type]) and value != field.default,
            f"model.rope_scaling.{key} = {value!r} has no meaning for type = "
            f"{scaling.type!r}; leave it out",
        )
    refuse_if(
        scaling.type in ("llama3", "yarn") and not scaling.original_max_position_embeddings,
        f"model.rope_scaling.original_max_position_embeddings is missing for type = "
        f"{scaling.type!r}; set it to the context length before scaling, in tokens",
    )
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    refuse_if(
        scaling.type == "llama3" and not 0 < low < high,
        f"model.rope_scaling.low_freq_factor = {low} must be above 0 and below "
        f"high_freq_factor = {high}",
    )
    for key in ("beta_fast", "beta_slow"):
        refuse_if(
            0 < getattr(scaling, key) < _FEWEST_ROTATIONS,
            f"model.rope_scaling.{key} = {getattr(scaling, key)} is below {_FEWEST_ROTATIONS}; use "
            "a larger number, or leave it out",
        )
    refuse_if(
        scaling.type == "yarn" and model.rope_theta == 1,
        "model.rope_theta = 1.0 makes all rotary frequencies equal, but "
        "model.rope_scaling.type = 'yarn' needs different frequencies; use a larger rope_theta",
    )
    refuse_if(
        scaling.type == "dynamic" and model.head_size == 2,
        "model.rope_scaling.type = 'dynamic' needs a head_dim above 2; use a larger "
        "model.head_dim or another type",
    )


def _sequence(train: TrainConfig, model: ModelConfig) -> None:
    seq_len, longest = train.seq_len, model.max_position_embeddings
    refuse_if(seq_len == 1, "train.seq_len = 1 leaves no target to predict; use at least 2")
    refuse_if(
        seq_len > longest,
        f"train.seq_len = {seq_len} exceeds model.max_position_embeddings = {longest}; "
        "raise max_position_embeddings or lower seq_len",
    )


def _batch(train: TrainConfig) -> None:
    microbatch_tokens = train.microbatch_size * train.seq_len
    refuse_if(
        train.global_batch_tokens and not train.seq_len,
        "train.seq_len is missing; set it to the data set's context, in tokens",
    )
    if train.global_batch_tokens and train.global_batch_tokens % microbatch_tokens:
        near = max(1, round(train.global_batch_tokens / microbatch_tokens)) * microbatch_tokens
        raise ConfigError(
            f"train.global_batch_tokens = {train.global_batch_tokens} is not a multiple of "
            f"{microbatch_tokens}, the number of tokens in a microbatch "
            f"({counted(train.microbatch_size, 'sequence')} x {train.seq_len} tokens); the nearest "
            f"multiple is {near}"
        )


def _schedule(optim: OptimConfig, train: TrainConfig) -> None:
    steps = train.max_steps
    refuse_if(
        optim.min_lr > optim.lr,
        f"optim.min_lr = {optim.min_lr} exceeds optim.lr = {optim.lr}; lower optim.min_lr",
    )
    refuse_if(
        optim.schedule == "constant" and optim.decay_steps,
        f"optim.decay_steps = {optim.decay_steps} has no meaning with optim.schedule = "
        "'constant'; leave it out, or use 'cosine' or 'linear'",
    )
    refuse_if(
        optim.clip_after_warmup and not optim.clip_norm,
        "optim.clip_after_warmup = true has no effect with optim.clip_norm = 0; set "
        "optim.clip_norm above 0, or leave clip_after_warmup out",
    )
    decay = optim.decay_steps or steps
    refuse_if(
        decay and optim.schedule != "constant" and optim.warmup_steps > decay,
        f"optim.warmup_steps = {optim.warmup_steps} exceeds the {counted(decay, 'step')} of "
        "the schedule; shorten the warm-up or set optim.decay_steps",
    )
    refuse_if(
        steps and train.stop_at_step > steps,
        f"train.stop_at_step = {train.stop_at_step} exceeds train.max_steps = {steps}; lower "
        "train.stop_at_step",
    )


def _patterns(optim: OptimConfig) -> None:
    for key, patterns in (
        ("optim.frozen", optim.frozen),
        ("optim.groups", [group.pattern for group in optim.groups]),
    ):
        length = max(map(len, patterns), default=0)
        refuse_if(
            len(patterns) > MAX_PATTERNS or length > MAX_PATTERN_CHARS,
            f"{key} has {counted(len(patterns), 'pattern')} of up to {length:,} characters each; "
            f"use at most {MAX_PATTERNS:,} patterns of at most {MAX_PATTERN_CHARS} characters "
            "(a * matches several names)",
        )


def _determinism(config: Config) -> None:
    refuse_if(
        config.train.deterministic and config.optim.grad_reduce_dtype != "fp32",
        f"optim.grad_reduce_dtype = {config.optim.grad_reduce_dtype!r} rounds gradients before "
        "their reduction; train.deterministic needs 'fp32'",
    )
    if config.optim.grad_dtype != "fp32":
        refuse_if(
            config.train.deterministic,
            f"optim.grad_dtype = {config.optim.grad_dtype!r} rounds the sums of gradients "
            "over microbatches; train.deterministic needs 'fp32'",
        )
        refuse_if(
            config.offload.host_share > 0,
            f"optim.grad_dtype = {config.optim.grad_dtype!r}: offloading sums gradients in fp32; "
            "leave optim.grad_dtype at 'fp32', or use offload.mode = 'off'",
        )
        refuse_if(
            config.offload.grad_dtype == "bf16",
            f"optim.grad_dtype = {config.optim.grad_dtype!r}: offload.grad_dtype = 'bf16' sums "
            "gradients in fp32; leave one of these two settings out",
        )
        refuse_if(
            config.optim.resident != "all",
            f"optim.grad_dtype = {config.optim.grad_dtype!r} needs optim.resident = 'all', "
            f"because {config.optim.resident!r} sums gradients in fp32; use "
            "optim.resident = 'all' or leave optim.grad_dtype at 'fp32'",
        )
        refuse_if(
            config.train.dtype != config.optim.grad_dtype,
            f"optim.grad_dtype = {config.optim.grad_dtype!r} needs train.dtype = 'bf16', "
            f"not {config.train.dtype!r}; leave optim.grad_dtype at 'fp32'",
        )
    refuse_if(
        config.train.deterministic and config.parallel.ep_dispatch == "alltoall",
        "parallel.ep_dispatch = 'alltoall': train.deterministic needs 'allgather'; leave "
        "parallel.ep_dispatch out",
    )


def _disk(offload: OffloadConfig) -> None:
    for key in ("disk_share", "disk", "disk_memory"):
        value = getattr(offload, key)
        refuse_if(
            value and offload.mode == "off",
            f"offload.{key} = {value!r} has no meaning with offload.mode = 'off'; leave it out",
        )
    refuse_if(
        offload.disk_share and not offload.disk,
        f"offload.disk_share = {offload.disk_share} needs offload.disk; set it to a directory on a "
        "local disk",
    )
    refuse_if(
        offload.disk_memory and not offload.disk,
        f"offload.disk_memory = {offload.disk_memory!r} needs offload.disk; set it to a directory "
        "on a local disk",
    )
    for key in ("disk", "disk_memory"):
        value = getattr(offload, key)
        refuse_if(
            value and not offload.disk_share and offload.mode == "manual",
            f"offload.{key} = {value!r} has no effect with offload.disk_share = 0; set "
            f"offload.disk_share, or leave offload.{key} out",
        )


def _residency(optim: OptimConfig, train: TrainConfig, offload: OffloadConfig) -> None:
    for key in ("device_memory", "host_memory"):
        value = getattr(offload, key)
        refuse_if(
            value and offload.mode == "off",
            f"offload.{key} = {value!r} has no meaning with offload.mode = 'off'; use "
            "offload.mode = 'auto'",
        )
    refuse_if(
        offload.expert_imbalance != OffloadConfig().expert_imbalance and offload.mode == "off",
        f"offload.expert_imbalance = {offload.expert_imbalance} has no meaning with offload.mode = "
        "'off'; leave it out",
    )
    for key, value in (
        ("offload.host_share", offload.host_share),
        ("offload.disk_share", offload.disk_share),
        ("offload.order", offload.order),
        ("optim.cache_chunks", optim.cache_chunks),
    ):
        refuse_if(
            offload.mode == "auto" and value not in (0, "microbatch"),
            f"{key} = {value!r}: offload.mode = 'auto' chooses this value; leave the setting out, "
            "or use offload.mode = 'manual'",
        )
    refuse_if(
        offload.host_share and offload.mode == "off",
        f"offload.host_share = {offload.host_share} has no meaning with offload.mode = 'off'; "
        "use offload.mode = 'manual'",
    )
    refuse_if(
        offload.links and offload.mode == "off",
        f"offload.links = {offload.links!r} has no meaning with offload.mode = 'off'; leave it out",
    )
    refuse_if(
        offload.early_adam != "auto" and offload.mode == "off",
        f"offload.early_adam = {offload.early_adam!r} has no meaning with offload.mode = 'off'; "
        "leave it out",
    )
    refuse_if(
        offload.grad_dtype == "fp32" and offload.mode == "off",
        "offload.grad_dtype = 'fp32' has no meaning with offload.mode = 'off'; leave it out",
    )
    refuse_if(
        offload.mode == "manual" and not offload.host_share,
        "offload.mode = 'manual' needs offload.host_share above 0; set it, or use "
        "offload.mode = 'off'",
    )
    _disk(offload)
    refuse_if(
        offload.host_share and train.compile,
        "train.compile = true: offload.mode = 'manual' cannot copy parameters to the device "
        "within compiled blocks; use train.compile = false, or offload.mode = 'off'",
    )
    refuse_if(
        optim.cache_chunks and optim.resident != "cache" and not offload.host_share,
        f"optim.cache_chunks = {optim.cache_chunks} has no meaning with optim.resident = "
        f"{optim.resident!r}; leave it out, or use optim.resident = 'cache'",
    )
    refuse_if(
        optim.resident == "cache" and optim.sharding == "none",
        "optim.resident = 'cache' keeps only a shard of the parameters on each rank, but "
        "optim.sharding = 'none' makes no shards; use optim.sharding = 'so' or 'epso'",
    )
    refuse_if(
        optim.resident == "cache" and train.compile,
        "train.compile = true: optim.resident = 'cache' cannot gather parameters within "
        "compiled blocks; use train.compile = false, or optim.resident = 'parameters'",
    )


def _loss_scale(optim: OptimConfig, train: TrainConfig) -> None:
    dtype = train.dtype
    refuse_if(
        dtype == "fp16" and train.deterministic,
        "train.dtype = 'fp16' needs a loss scale, which changes when gradients overflow; "
        "train.deterministic needs 'bf16' or 'fp32'",
    )
    for key in ("loss_scale", "min_loss_scale", "loss_scale_growth_steps"):
        value, default = getattr(optim, key), type(optim).model_fields[key].default
        refuse_if(
            dtype != "fp16" and value != default,
            f"optim.{key} = {value:g} has no meaning with train.dtype = {dtype!r}; leave it "
            "out, or use train.dtype = 'fp16'",
        )
        if key != "loss_scale_growth_steps" and value and math.frexp(value)[0] != 0.5:
            nearest = 2.0 ** round(math.log2(value))
            raise ConfigError(
                f"optim.{key} = {value:g} must be a power of two, such as {nearest:g}"
            )
    refuse_if(
        0 < optim.loss_scale < optim.min_loss_scale,
        f"optim.loss_scale = {optim.loss_scale:g} is below optim.min_loss_scale = "
        f"{optim.min_loss_scale:g}; raise loss_scale or lower min_loss_scale",
    )


def _recompute(recompute: RecomputeConfig, model: ModelConfig) -> None:
    modules = recompute.modules
    refuse_if(
        len(set(modules)) < len(modules),
        f"recompute.modules = {list(modules)} names a module twice; name each at most once",
    )
    sparse = [name for name in modules if name in ("moe", "experts")]
    if sparse and model.architecture == "olmo":
        raise ConfigError(
            f"recompute.modules contains '{sparse[0]}', but architecture 'olmo' has no experts; "
            f"use 'block', or leave '{sparse[0]}' out"
        )


def _pipeline(parallel: ParallelConfig, model: ModelConfig, offload: OffloadConfig) -> None:
    if offload.order == "layer":
        refuse_if(
            offload.mode == "off",
            "offload.order = 'layer' has no meaning with offload.mode = 'off'; use offload.mode = "
            "'manual', or parallel.schedule = 'gpipe' with virtual_stages = model.num_layers",
        )
        refuse_if(
            parallel.virtual_stages > 1,
            "offload.order = 'layer' makes a stage of each layer, but parallel.virtual_stages = "
            f"{parallel.virtual_stages}; use parallel.virtual_stages = 1, or offload.order = "
            "'microbatch'",
        )
        refuse_if(
            model.num_layers % parallel.pp > 0,
            f"offload.order = 'layer' needs the same number of layers on each pipeline rank, but "
            f"parallel.pp = {parallel.pp} does not divide model.num_layers = {model.num_layers}; "
            "use another parallel.pp, or offload.order = 'microbatch'",
        )
        refuse_if(
            bool(parallel.stage_layers),
            f"parallel.stage_layers = {list(parallel.stage_layers)} has no meaning with "
            "offload.order = 'layer', which makes a stage of each layer; leave stage_layers out",
        )
        refuse_if(
            model.aux_loss_form == "hf" and model.num_layers > 1,
            "model.aux_loss_form = 'hf' needs all layers on one pipeline stage; use 'olmo', or "
            "offload.order = 'microbatch'",
        )
    stages = parallel.pp * parallel.virtual_stages
    refuse_if(
        model.aux_loss_form == "hf" and stages > 1,
        "model.aux_loss_form = 'hf' needs all layers on one pipeline stage, but there are "
        f"{counted(stages, 'stage')}; use 'olmo', or parallel.pp = 1 and virtual_stages = 1",
    )


def nearest_divisor(number: int, near: int) -> int:
    """Return the divisor of `number` that is nearest to `near`.

    If `near` is less than `number` and no divisor is within 4,096 of `near`, return 1.
    """
    near = min(near, number)
    # The distance is limited, because the numbers of a faulty configuration can be huge.
    candidates = (d for distance in range(4097) for d in (near - distance, near + distance))
    return next((d for d in candidates if 0 < d <= number and number % d == 0), 1)
