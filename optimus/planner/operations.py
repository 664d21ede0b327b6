"""The operations of a layer: shapes of matrix products, bytes of element-wise passes, collectives.

A list of operations describes the forward pass of a layer on one rank for one microbatch. Its
backward pass and its recomputation follow from the list. The time model reads these lists, and
nothing else, so it also serves models that are not Optimus's.

Dims: T tokens of a microbatch, D hidden, S sequence, H heads on the rank, A head size, F
intermediate, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from optimus.config import ModelConfig
from optimus.planner.collectives import Operation as CollectiveName


class Product(NamedTuple):
    """`repeats` matrix products [rows, inner] x [inner, columns]."""

    modules: tuple[str, ...]
    """Names of the modules that contain the operation. Recomputing one of them repeats it."""
    rows: float
    inner: float
    columns: float
    repeats: float = 1.0
    launches: float = 1.0
    """Number of kernels."""

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.inner * self.columns * self.repeats


class FusedAttention(NamedTuple):
    """Scores, softmax and weighted sum of causal attention in one kernel, which neither computes
    masked scores nor writes scores to memory (FlashAttention, arXiv 2307.08691).

    Forward has 2 products. Backward computes the scores again and has 5.
    """

    modules: tuple[str, ...]
    heads: float
    """Number of heads of all sequences."""
    seq_len: int
    head_size: int
    forward_bytes: float
    """Bytes of queries, keys, values and results that forward reads and writes."""
    backward_bytes: float
    launches: float = 1.0
    backward_launches: float = 2.0

    @property
    def product_flops(self) -> float:
        """FLOPs of one product, of whose scores half are masked."""
        return self.heads * self.seq_len**2 * self.head_size


class Pass(NamedTuple):
    """Element-wise or normalising operations, whose time is that of their memory traffic."""

    modules: tuple[str, ...]
    forward_bytes: float
    """Bytes read and written in forward."""
    backward_bytes: float
    """Bytes read and written in backward."""
    launches: float = 1.0
    backward_launches: float = 1.0


class Exchange(NamedTuple):
    """A collective of the ranks along a mesh axis, which the following operations wait for."""

    modules: tuple[str, ...]
    axis: str
    """Name of a mesh axis, such as tp."""
    name: CollectiveName
    forward_bytes: float
    """Bytes of the full buffer in forward; 0 for none."""
    backward_name: CollectiveName
    backward_bytes: float


Operation = Product | FusedAttention | Pass | Exchange


@dataclass(frozen=True)
class Attention:
    """Attention of a block."""

    heads: int
    kv_heads: int
    head_size: int
    fused: bool = True
    """True if one kernel computes scores, softmax and weighted sum without writing the scores, and
    skips masked scores (FlashAttention, arXiv 2307.08691). False: kernels for each, with
    dropout."""


@dataclass(frozen=True)
class Mlp:
    """Feed-forward network of a block."""

    intermediate: int
    gated: bool = True
    """True for SwiGLU with three weights, False for two weights and a GELU. A SwiGLU outside of
    experts is not fused: torch computes SiLU and product separately."""
    experts: int = 0
    """Number of experts of the layer; 0: a dense network."""
    experts_per_token: int = 1


@dataclass(frozen=True)
class Block:
    """A transformer block in a stack of equal blocks.

    Attributes:
        hidden: D.
        attention, mlp: The submodules.
        residual_bytes: Bytes that a residual addition reads and writes for an element in 2-byte
            training. With dropout and bias as in Megatron-LM, it also writes a mask.
        norm_bytes: Bytes that a norm reads and writes for an element in 2-byte training, in forward
            and in backward. The default is Optimus's: conversion to fp32 (6), norm (8), conversion
            (6), and in backward conversions (12) and the gradient (14). A fused norm has (4, 8).
        rotary_bytes: Bytes for an element of queries, keys and values, for their division and the
            rotary embedding. Without the latter, 4.
    """

    hidden: int
    attention: Attention
    mlp: Mlp
    residual_bytes: int = 6
    norm_bytes: tuple[int, int] = (20, 26)
    rotary_bytes: int = 12

    @property
    def parameters(self) -> tuple[int, int]:
        """Numbers of parameters of the experts and of all other submodules, without biases."""
        attention, mlp = self.attention, self.mlp
        heads = attention.heads + attention.kv_heads
        feed_forward = (3 if mlp.gated else 2) * self.hidden * mlp.intermediate
        others = 2 * self.hidden * heads * attention.head_size + 2 * self.hidden
        if mlp.experts:
            return mlp.experts * feed_forward, others + self.hidden * mlp.experts
        return 0, others + feed_forward


class Split(NamedTuple):
    """Division of a block over ranks."""

    tp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    """True if norms and residuals work on 1/tp of the tokens (arXiv 2205.05198)."""
    gathers_again: bool = False
    """With sequence parallelism, True if backward gathers the inputs of products again, as
    Megatron-LM does to save memory. False if the gathered inputs are kept."""
    dispatch: str = "alltoall"
    """Transport of tokens to experts: alltoall or allgather."""


def block_operations(
    block: Block,
    tokens: int,
    seq_len: int,
    split: Split,
    element_bytes: int,
    grad_bytes: int = 0,
) -> tuple[Operation, ...]:
    """Return the forward operations of a block on one rank for one microbatch.

    Args:
        block: The block.
        tokens: T, tokens of a microbatch on the rank, over the tp ranks together.
        seq_len: S.
        split: Division over ranks. Routing of tokens to experts is uniform.
        element_bytes: Bytes of an element of activations and weights.
        grad_bytes: Bytes of an element of the sums of gradients over microbatches; 0 if the
            products for the gradients of weights add to the sums themselves, as the kernels of
            Megatron-LM do.
    """
    e, t, d = element_bytes, tokens, block.hidden
    tp, sp = split.tp, split.tp if split.sequence_parallel else 1
    scale = e / 2
    norm = Pass(("block", "norm"), *(b * scale * t * d / sp for b in block.norm_bytes))
    residual = block.residual_bytes * scale * t * d / sp
    residuals = Pass(("block",), residual, residual, 1, 2)
    size = t * d * e
    operations: list[Operation] = [norm, *_before("attention", size, split)]
    operations += _attention(block, t, seq_len, tp, e)
    operations += [*_after("attention", size, split), residuals, norm]
    module = "moe" if block.mlp.experts else "mlp"
    operations += _before(module, size, split)
    if block.mlp.experts:
        operations += _experts(block.mlp, d, t, split, e)
    else:
        operations += _dense(block.mlp, d, t, tp, e)
    operations += _after(module, size, split)
    experts, others = block.parameters
    sums = _sums(experts / tp / split.ep + others / tp, e, grad_bytes)
    return (*operations, residuals, *sums)


def _sums(parameters: float, element_bytes: int, grad_bytes: int) -> tuple[Pass, ...]:
    """Return the pass in which backward adds the gradients of a microbatch to their sums: it
    converts them to the dtype of the sums, reads both and writes the sums."""
    if not grad_bytes:
        return ()
    converted = element_bytes + grad_bytes if element_bytes != grad_bytes else 0
    return (Pass(("gradients",), 0, parameters * (converted + 3 * grad_bytes), 0, 4),)


def _before(module: str, size_bytes: float, split: Split) -> tuple[Exchange, ...]:
    """Return the collectives before a module that is divided over tp (arXiv 1909.08053; with
    sequence parallelism, arXiv 2205.05198). `size_bytes` are those of all tokens."""
    names = ("block", module)
    if split.tp == 1:
        return ()
    if not split.sequence_parallel:
        return (Exchange(names, "tp", "all_reduce", 0, "all_reduce", size_bytes),)
    # Every tp rank routes all tokens, so a mixture of experts sums the gradient of its whole input.
    backward: CollectiveName = "all_reduce" if module == "moe" else "reduce_scatter"
    gather = Exchange(names, "tp", "all_gather", size_bytes, backward, size_bytes)
    again = Exchange(names, "tp", "all_gather", 0, "all_gather", size_bytes)
    return (gather, again) if split.gathers_again else (gather,)


def _after(module: str, size_bytes: float, split: Split) -> tuple[Exchange, ...]:
    """Return the collectives after a module that is divided over tp."""
    names = ("block", module)
    if split.tp == 1:
        return ()
    if not split.sequence_parallel:
        return (Exchange(names, "tp", "all_reduce", size_bytes, "all_reduce", 0),)
    return (Exchange(names, "tp", "reduce_scatter", size_bytes, "all_gather", size_bytes),)


def _attention(block: Block, t: int, s: int, tp: int, e: int) -> Iterable[Operation]:
    attention, d = block.attention, block.hidden
    names, core = ("block", "attention"), ("block", "attention", "core")
    heads, size = attention.heads / tp, attention.head_size
    width = (attention.heads + 2 * attention.kv_heads) * size / tp
    inner = heads * size
    yield Product(names, t, d, width)
    arranged = block.rotary_bytes * e / 2 * t * width
    yield Pass(names, arranged, arranged, 3, 3)
    sequences = t / s
    if attention.fused:
        traffic = e * t * (width + inner)
        yield FusedAttention(core, sequences * heads, s, size, traffic, 2 * traffic)
    else:
        yield Product(core, s, size, s, sequences * heads)
        # Masked softmax reads and writes the scores. Dropout also writes a mask of 1 byte.
        elements = sequences * heads * s * s
        yield Pass(core, (4 * e + 1) * elements, (5 * e + 1) * elements, 2, 2)
        yield Product(core, s, s, size, sequences * heads)
    yield Product(names, t, inner, d)


def _dense(mlp: Mlp, d: int, t: int, tp: int, e: int) -> Iterable[Operation]:
    names, f = ("block", "mlp"), mlp.intermediate / tp
    yield Product(names, t, d, 2 * f if mlp.gated else f)
    # SiLU (2) and product (3), and in backward two products (6) and SiLU's gradient (3). A GELU
    # reads F and writes F, and in backward reads 2 F and writes F.
    forward, backward = (5, 9) if mlp.gated else (2, 3)
    yield Pass(names, forward * e * t * f, backward * e * t * f)
    yield Product(names, t, f, d)


def _experts(mlp: Mlp, d: int, t: int, split: Split, e: int) -> Iterable[Operation]:
    """Yield the operations of a mixture of experts (optimus.model.moe) with uniform routing."""
    names, k, ep = ("block", "moe"), mlp.experts_per_token, split.ep
    on_rank = mlp.experts / ep
    rows = t * k
    f = mlp.intermediate / split.tp
    yield Product(("block", "moe"), t, d, mlp.experts)
    yield Pass(names, 4 * 4 * t * mlp.experts, 4 * 4 * t * mlp.experts, 6, 6)
    sent, gathered = t * ranks_of_token(mlp.experts, k, ep) * d * e, t * ep * d * e
    if ep > 1 and split.dispatch == "alltoall":
        yield Exchange(names, "ep", "all_to_all", sent, "all_to_all", sent)
    elif ep > 1:
        yield Exchange(names, "ep", "all_gather", gathered, "reduce_scatter", gathered)
    per_expert = rows * ep / mlp.experts
    yield Pass(names, 2 * e * rows * d, 2 * e * rows * d, 2, 2)
    inner = ("block", "moe", "experts")
    yield Product(inner, per_expert, d, 2 * f, on_rank, launches=1)
    yield Pass(names, 3 * e * rows * f, 5 * e * rows * f)
    yield Product(names, per_expert, f, d, on_rank, launches=1)
    yield Pass(names, 2 * e * rows * d, 2 * e * rows * d, 2, 2)
    if ep > 1 and split.dispatch == "alltoall":
        yield Exchange(names, "ep", "all_to_all", sent, "all_to_all", sent)
    elif ep > 1:
        yield Exchange(names, "ep", "reduce_scatter", gathered, "all_gather", gathered)


def ranks_of_token(experts: int, experts_per_token: int, ep: int) -> float:
    """Return the mean number of ep ranks that have an expert of a token, if each set of experts is
    equally likely. alltoall sends a token once to each of these ranks."""
    others = experts - experts // ep
    if experts_per_token > others:
        return float(ep)
    return ep * (1 - math.comb(others, experts_per_token) / math.comb(experts, experts_per_token))


def embedding_operations(
    hidden: int, vocabulary: int, tokens: int, split: Split, element_bytes: int, grad_bytes: int = 0
) -> tuple[Operation, ...]:
    """Return the forward operations of the embedding. Arguments as for `head_operations`."""
    e, size = element_bytes, element_bytes * tokens * hidden
    # A rank looks up the tokens of its share of the vocabulary. The gradient of the table is
    # summed row by row and then added to its sum over microbatches.
    look_up = Pass(("embedding",), 2 * size, (e + 2 * grad_bytes) * tokens * hidden, 1, 2)
    sums = _sums(hidden * vocabulary / split.tp, e, grad_bytes)
    return (look_up, *_after("embedding", size, split), *sums)


def head_operations(
    hidden: int,
    vocabulary: int,
    tokens: int,
    split: Split,
    element_bytes: int,
    grad_bytes: int = 0,
    loss_bytes: tuple[float, float] = (14, 44),
) -> tuple[Operation, ...]:
    """Return the forward operations of the output head and the cross-entropy.

    Args:
        hidden, vocabulary, tokens: D, V and T.
        split: Division over ranks. The tp ranks divide V.
        element_bytes, grad_bytes: As for `block_operations`.
        loss_bytes: Bytes that the cross-entropy reads and writes for each logit, in forward and in
            backward. The default is Optimus's: conversion to fp32 (6), logsumexp (4), gather (4),
            and in backward conversion (6), subtraction, exponential, scatter and scaling (32),
            conversion (6).
    """
    columns = vocabulary / split.tp
    logits = tokens * columns
    return (
        *_before("head", element_bytes * tokens * hidden, split),
        Product(("head",), tokens, hidden, columns),
        Pass(("head",), loss_bytes[0] * logits, loss_bytes[1] * logits, 3, 6),
        *_sums(hidden * columns, element_bytes, grad_bytes),
    )


MEGATRON_LOSS_BYTES = (38, 22)
"""`loss_bytes` of Megatron-LM: conversion to fp32 (6), maximum (4), subtraction (8), exponential
(8), sum (4), division (8), and in backward copy (8), scaling (8), conversion (6)."""


def gpt_block(hidden: int, heads: int) -> Block:
    """Return the block of GPT-3 in Megatron-LM of 2021 and 2022.

    It has separate attention kernels, a GELU, and dropout in the residual additions, which read
    2 x 2 bytes and write 2 + 1.
    """
    attention = Attention(heads, heads, hidden // heads, fused=False)
    mlp = Mlp(4 * hidden, gated=False)
    return Block(hidden, attention, mlp, 7, norm_bytes=(4, 8), rotary_bytes=4)


def model_block(config: ModelConfig, layer: int, fused: bool = True) -> Block:
    """Return the block with index `layer` of a model.

    Args:
        config: The model.
        layer: Index of the layer, starting at 0.
        fused: As for `Attention`.
    """
    experts = config.experts_by_layer[layer]
    mlp = Mlp(
        config.layer(layer).intermediate_size,
        experts=experts,
        experts_per_token=config.num_experts_per_tok if experts else 1,
    )
    attention = Attention(
        config.num_attention_heads, config.num_kv_heads, config.head_size, fused=fused
    )
    return Block(config.hidden_size, attention, mlp)


def repeated(operations: Iterable[Operation], modules: Collection[str]) -> tuple[Operation, ...]:
    """Return the operations that backward repeats if it recomputes `modules`: those in one of these
    modules. The name `core` is attention without its projections (selective recomputation)."""
    return tuple(op for op in operations if not set(modules).isdisjoint(op.modules))
