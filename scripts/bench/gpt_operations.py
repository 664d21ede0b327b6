"""The operations of a GPT-3 block in Megatron-LM of 2021 and 2022, for scripts/bench/planner.py.

The published step times were measured with Megatron-LM, whose kernels and collectives differ from
the kernels and collectives of Optimus. The operations of Optimus's models come from
`optimus.rank.profile`.

Dims: T tokens of a microbatch, D hidden, S sequence, H heads on the rank, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from optimus.planner.step_time import Layers
from optimus.rank.operations import Exchange, Operation, Pass, Product

_BYTES = 2
"""Bytes of an element."""


class Work(NamedTuple):
    """Operations in forward and in backward of one component of a block, or of the head."""

    modules: tuple[str, ...]
    """Names of the modules that contain the operations. If backward recomputes one of these
    modules, it repeats the operations in `forward`."""
    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]


class Split(NamedTuple):
    """Division of a block over ranks."""

    tp: int = 1
    sequence_parallel: bool = False
    """True: norms and residual additions process 1/tp of the tokens on each rank (arXiv
    2205.05198), and backward gathers the inputs of matrix products again, to save memory."""


def layers_of(work: Iterable[Work], number: float = 1.0, recompute: Collection[str] = ()) -> Layers:
    """Return `number` layers of a stage. Each layer has the operations `work`. Backward repeats the
    forward of the modules in `recompute`. The module `core` is attention without its projections
    (selective recomputation)."""
    work = tuple(work)
    forward = tuple(op for entry in work for op in entry.forward)
    backward = tuple(op for entry in work for op in entry.backward)
    again = tuple(
        op for entry in work if set(recompute) & set(entry.modules) for op in entry.forward
    )
    return Layers(forward, backward + again, number)


def _product(
    modules: tuple[str, ...], rows: float, inner: float, columns: float, repeats: float = 1.0
) -> Work:
    backward = (
        Product(rows, columns, inner, repeats),
        Product(inner, rows, columns, repeats),
    )
    return Work(modules, (Product(rows, inner, columns, repeats),), backward)


def _pass(
    modules: tuple[str, ...],
    forward: float,
    backward: float,
    launches: float = 1.0,
    more: float = 1,
) -> Work:
    """Return an element-wise operation. In forward, it moves `forward` bytes with `launches` kernel
    launches; in backward, it moves `backward` bytes with `more` kernel launches."""
    return Work(modules, (Pass(forward, launches),), (Pass(backward, more),))


def _exchange(
    modules: tuple[str, ...], forward: tuple[str, ...], backward: tuple[str, ...], size: float
) -> Work:
    """Return the collectives over tp whose names are listed in `forward` and in `backward`. The
    buffer of each collective has `size` bytes."""
    lists = ([Exchange("tp", name, size) for name in names] for names in (forward, backward))
    return Work(modules, *map(tuple, lists))


def gpt_block(hidden: int, heads: int, tokens: int, seq_len: int, split: Split) -> tuple[Work, ...]:
    """Return the operations of a block on one rank for one microbatch of T `tokens`.

    The block has separate attention kernels, a GELU, and dropout in the residual additions. For
    each element, a residual addition reads two values (4 bytes), and writes a value and the mask (3
    bytes). `gradient_sums` adds the gradients of weights to their sums.
    """
    t, d, s, tp = tokens, hidden, seq_len, split.tp
    sp = tp if split.sequence_parallel else 1
    norm = _pass(("block", "norm"), 4 * t * d / sp, 8 * t * d / sp)
    residuals = _pass(("block",), 7 * t * d / sp, 7 * t * d / sp, 1, 2)
    size = t * d * _BYTES
    names, core = ("block", "attention"), ("block", "attention", "core")
    width, inner, of_rank = 3 * d / tp, d / tp, t / s * heads / tp
    head = d // heads
    # Masked softmax reads and writes the scores. Dropout also writes a mask of 1 byte.
    scores = of_rank * s * s
    attention = (
        _product(names, t, d, width),
        _pass(names, 4 * t * width, 4 * t * width, 3, 3),
        _product(core, s, head, s, of_rank),
        _pass(core, (4 * _BYTES + 1) * scores, (5 * _BYTES + 1) * scores, 2, 2),
        _product(core, s, s, head, of_rank),
        _product(names, t, inner, d),
    )
    f = 4 * d / tp
    # A GELU reads F and writes F, and in backward reads 2 F and writes F.
    mlp = (
        _product(("block", "mlp"), t, d, f),
        _pass(("block", "mlp"), 2 * _BYTES * t * f, 3 * _BYTES * t * f),
        _product(("block", "mlp"), t, f, d),
    )
    return (
        norm,
        *_before("attention", size, split),
        *attention,
        *_after("attention", size, split),
        residuals,
        norm,
        *_before("mlp", size, split),
        *mlp,
        *_after("mlp", size, split),
        residuals,
    )


def _before(module: str, size: float, split: Split) -> tuple[Work, ...]:
    """Return the collectives before a module that is divided over tp (arXiv 1909.08053; with
    sequence parallelism, arXiv 2205.05198). `size` is the number of bytes of the activations of all
    tokens."""
    names = ("block", module)
    if split.tp == 1:
        return ()
    if not split.sequence_parallel:
        return (_exchange(names, (), ("all_reduce",), size),)
    return (_exchange(names, ("all_gather",), ("reduce_scatter", "all_gather"), size),)


def _after(module: str, size: float, split: Split) -> tuple[Work, ...]:
    """Return the collectives after a module that is divided over tp."""
    names = ("block", module)
    if split.tp == 1:
        return ()
    if not split.sequence_parallel:
        return (_exchange(names, ("all_reduce",), (), size),)
    return (_exchange(names, ("reduce_scatter",), ("all_gather",), size),)


def gpt_receive(
    hidden: int, tokens: int, split: Split, forward: bool, backward: bool
) -> tuple[Work, ...]:
    """Return the collectives of a stage that receives activations in forward, or gradients in
    backward. Each tp rank receives 1/tp of the values and gathers the others (arXiv 2104.04473,
    section 4.1). With sequence parallelism, a rank needs only its 1/tp of the tokens, so nothing is
    gathered."""
    if split.tp == 1 or split.sequence_parallel:
        return ()
    gather = ("all_gather",)
    size = _BYTES * tokens * hidden
    return (_exchange(("receive",), gather * forward, gather * backward, size),)


def gradient_sums(parameters: float, tensors: float, microbatches: int) -> tuple[Work, ...]:
    """Return the passes that sum gradients over microbatches, for a layer with `parameters`
    parameters in `tensors` tensors. A pass reads a gradient and its sum, and writes the sum. The
    first microbatch of a step needs no passes, because it stores its gradients as the first values
    of the sums. The bytes and launches are means over the microbatches."""
    repeated = (microbatches - 1) / microbatches
    bytes_moved = 3 * _BYTES * parameters * repeated
    return (_pass(("sums",), 0.0, bytes_moved, 0.0, tensors * repeated),)


def gpt_head(hidden: int, vocabulary: int, tokens: int, split: Split) -> tuple[Work, ...]:
    """Return the operations of the output head and the cross-entropy. The vocabulary is divided
    over the tp ranks.

    Bytes that the cross-entropy moves for each logit: conversion to fp32 (6), maximum (4),
    subtraction (8), exponential (8), sum (4), division (8); in backward copy (8), scaling (8),
    conversion (6).
    """
    columns = vocabulary / split.tp
    logits = tokens * columns
    return (
        *_before("head", _BYTES * tokens * hidden, split),
        _product(("head",), tokens, hidden, columns),
        _pass(("head",), 38 * logits, 22 * logits, 3, 6),
    )
