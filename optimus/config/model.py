"""Settings of the model's architecture."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from optimus.config.section import (
    Count,
    CountOrZero,
    InitStd,
    NonNegative,
    Rotations,
    Section,
)


def _experts(value: Any) -> Any:
    """Validate and return the value of `model.num_experts`, with a list converted to a tuple.
    Raises ValueError if an element is not a whole number >= 0."""
    numbers = value if isinstance(value, (list, tuple)) else [value]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError("must be a whole number >= 0, or a list with such a number for each layer")
    return tuple(value) if isinstance(value, list) else value


Experts = Annotated[int | tuple[int, ...], BeforeValidator(_experts)]


class RopeScaling(Section):
    """Scaling of rotary embeddings (RoPE) to a longer context. The settings have the same names as
    in Hugging Face configurations."""

    type: Literal["linear", "dynamic", "llama3", "yarn"]
    """Method. `linear`: divide all frequencies by `factor`. `llama3`, `yarn`: divide low
    frequencies, with a gradual transition to unchanged high frequencies. `dynamic`: increase
    rope_theta for sequences longer than max_position_embeddings."""
    factor: Annotated[float, Field(gt=0)]
    """Ratio of the extended context length to the original context length."""
    original_max_position_embeddings: CountOrZero = 0
    """llama3, yarn: context length of the original training, in tokens."""
    low_freq_factor: NonNegative = 0.0
    """llama3: divide frequencies by `factor` if their wavelength exceeds
    original_max_position_embeddings / low_freq_factor."""
    high_freq_factor: NonNegative = 0.0
    """llama3: keep frequencies if their wavelength is below original_max_position_embeddings /
    high_freq_factor."""
    beta_fast: Rotations = 0.0
    """yarn: keep frequencies that make more than this number of rotations in the original context.
    The value 0 means the usual number, 32."""
    beta_slow: Rotations = 0.0
    """yarn: divide frequencies by `factor` if they make fewer than this number of rotations in the
    original context. The value 0 means the usual number, 1."""
    truncate: bool = True
    """yarn: round the bounds of the transition to integers, the lower bound down and the upper
    bound up. The bounds are indices of frequencies. The transition is between unchanged and divided
    frequencies."""
    attention_factor: NonNegative = 0.0
    """yarn: factor by which the rotated queries and keys are multiplied; 0: a factor derived from
    `factor`, `mscale` and `mscale_all_dim`."""
    mscale: NonNegative = 0.0
    """yarn: coefficient in the derived attention factor, (0.1 * mscale * ln(factor) + 1) / (0.1 *
    mscale_all_dim * ln(factor) + 1). If one of the coefficients is 0, the derived factor is 0.1 *
    ln(factor) + 1."""
    mscale_all_dim: NonNegative = 0.0
    """yarn: coefficient in the derived attention factor; see `mscale`."""


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
"""Fields of `RopeScaling` that each scaling type uses."""


FREE_IN_LOGITS = {
    "pad_token_id",
    "bos_token_id",
    "eos_token_ids",
    "init_std",
    "embedding_init_std",
    "aux_loss_coef",
    "z_loss_coef",
    "aux_loss_form",
    "max_position_embeddings",
}
"""Settings that do not change the logits of a model with given weights. With dynamic scaling of the
rotary embedding, `max_position_embeddings` changes the logits nevertheless."""


class ModelConfig(Section):
    """Architecture, sizes and auxiliary losses of the model, a decoder-only transformer."""

    architecture: Literal["olmo", "olmoe"]
    """`olmo`: dense, with non-parametric LayerNorm. `olmoe`: sparse MoE, with RMSNorm and
    q/k-norm. Both architectures use SwiGLU."""
    num_layers: Annotated[Count, Field(le=4096)]
    """Number of decoder blocks."""
    hidden_size: Count
    """Width of the residual stream (D)."""
    num_attention_heads: Count
    """Number of query heads."""
    num_key_value_heads: CountOrZero = 0
    """Number of key and value heads; 0: the number of query heads."""
    head_dim: CountOrZero = 0
    """Width of one head; 0: hidden_size / num_attention_heads."""
    intermediate_size: Count
    """Inner width of the SwiGLU; for `olmoe`, inner width of each expert (F)."""
    dense_intermediate_size: CountOrZero = 0
    """Inner width of the SwiGLU in dense layers of an `olmoe` model; 0: intermediate_size."""
    num_experts: Experts = 0
    """Number of experts per layer (E), or a list with one number for each layer. A layer with 0
    experts is dense. Must be 0 for `olmo`."""
    num_experts_per_tok: CountOrZero = 0
    """Number of experts to which each token is routed (K); must be 0 for `olmo`."""
    vocab_size: Count
    """Vocabulary size (V): the number of rows in the embedding and in the output head."""
    tie_embeddings: bool = False
    """Use the weights of the embedding as the output head."""
    attention_bias: bool = False
    """Add a bias to the four attention projections (q, k, v and output)."""
    clip_qkv: NonNegative = 0.0
    """Clamp q, k and v to [-clip_qkv, clip_qkv]; 0: off."""
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Epsilon that each norm adds to the variance."""
    router: Literal["top-k", "uniform"] = "top-k"
    """`top-k`: route each token to its num_experts_per_tok most probable experts. `uniform`: route
    tokens to experts in a fixed cyclic order, for measurements of speed."""
    norm_topk_prob: bool = False
    """Normalize the routing weights of each token's selected experts to the sum 1."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """RoPE scaling to a longer context; absent: no scaling."""
    max_position_embeddings: Count = 4096
    """Longest context, in tokens; `train.seq_len` must not exceed it."""
    pad_token_id: Annotated[int, Field(ge=-1)] = -1
    """Id of the padding token, whose embedding gets no gradient, as in transformers; -1: the model
    has no padding token."""
    bos_token_id: Annotated[int, Field(ge=-1)] = -1
    """Id of the beginning-of-sequence token, written to Hugging Face directories; -1: the model has
    no such token."""
    eos_token_ids: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Ids of the end-of-sequence tokens, at which generation stops; empty: the model has no such
    tokens."""
    init_std: InitStd = 0.02
    """Standard deviation of the initial weights. Their normal distribution is truncated at three
    standard deviations."""
    embedding_init_std: InitStd = 0.0
    """Standard deviation of the initial embedding; 0: init_std. If the value is too small,
    the router can send all tokens to the same experts early in training."""
    aux_loss_coef: NonNegative = 0.01
    """Coefficient of the load-balancing loss in the training objective."""
    z_loss_coef: NonNegative = 0.001
    """Coefficient of the router z-loss in the training objective."""
    aux_loss_form: Literal["olmo", "hf"] = "olmo"
    """Form of the load-balancing loss. `olmo`: mean of the losses of the layers, which is 1 if the
    load is balanced. `hf`: a single loss from the expert choices and router probabilities of all
    layers together, for comparison with transformers."""

    @property
    def head_size(self) -> int:
        """Width of a head: `head_dim` if set, else hidden_size / num_attention_heads."""
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
        """Number of experts (E) of a layer. Use this property only on the configuration of a single
        layer, as returned by the method `layer`."""
        assert isinstance(self.num_experts, int)
        return self.num_experts

    def layer(self, number: int) -> ModelConfig:
        """Return the configuration of layer `number`, counted from 0.

        In the result, `num_experts` and `intermediate_size` are the numbers of this layer.
        """
        experts, width = self.experts_by_layer[number], self.intermediate_size
        if not experts:
            width = self.dense_intermediate_size or width
        return self.model_copy(update={"num_experts": experts, "intermediate_size": width})

    def setting(self, key: str) -> object:
        """Return the value of setting `key`. If the value is 0 and 0 means "derived from other
        settings", return the derived value.

        For `num_experts`, return a number if all layers have the same number of experts, else a
        list with the number of each layer.
        """
        if key == "num_key_value_heads":
            return self.num_kv_heads
        if key == "head_dim":
            return self.head_size
        if key == "num_experts":
            uniform = self.uniform_experts
            return list(self.experts_by_layer) if uniform is None else uniform
        return getattr(self, key)

    def first_difference(self, other: ModelConfig) -> tuple[str, object, object] | None:
        """Return the first setting that gives the two models different logits for the same weights.

        Returns:
            (key, value in `self`, value in `other`); None if there is no such setting.
        """
        scaling = self.rope_scaling
        is_dynamic = scaling is not None and scaling.type == "dynamic"
        for key in ModelConfig.model_fields:
            values = self.setting(key), other.setting(key)
            matters = is_dynamic and key == "max_position_embeddings"
            if values[0] != values[1] and (matters or key not in FREE_IN_LOGITS):
                return key, *values
        return None
