"""Operations of a model's forward and backward, with the shapes, bytes and kernel launches that
determine their time.

An operation here is the complete computation of one kernel. Each fused kernel of torch and each
kernel of `optimus_kernels` counts as a single operation; no other operations are fused. These rules
define the FLOPs and bytes of an operation:

- A matrix product has the FLOPs of its shape. A grouped product of experts counts as one product
  for each expert, with the mean number of rows of an expert.
- Any other operation moves the bytes that it reads and writes: each operand and each result once.
  Repeated elements of a broadcast operand count once. An operand that the operation reads and
  changes in place counts twice; an operand that the operation only overwrites counts once.
- A look-up of rows or elements reads as many bytes as it writes, and also its indices. An addition
  to rows or elements reads and writes as many bytes as it adds.
- Views and allocations move no bytes and do not count as operations.
- Operations on scalars and other small tensors count, because each launches a kernel.

This module imports no torch. `optimus.rank.tensor_tracker` applies the rules to torch's operations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple


class Product(NamedTuple):
    """`repeats` matrix products [rows, inner] x [inner, columns]."""

    rows: float
    inner: float
    columns: float
    repeats: float = 1.0
    launches: float = 1.0
    """Number of kernels that compute all repeats."""

    @property
    def flops(self) -> float:
        """FLOPs of all repeats."""
        return 2.0 * self.rows * self.inner * self.columns * self.repeats


class FusedAttention(NamedTuple):
    """Scores, softmax and weighted sum of causal attention in one kernel. The kernel skips masked
    scores, and keeps all scores out of memory (FlashAttention, arXiv 2307.08691)."""

    heads: float
    """Number of heads, times the number of sequences."""
    seq_len: float
    head_size: float
    products: float
    """Number of products: 2 in forward; 5 in backward, which computes the scores again."""
    num_bytes: float
    """Bytes of queries, keys, values, results and gradients that are read and written."""
    launches: float = 1.0

    @property
    def flops(self) -> float:
        """FLOPs without masked scores, which are half of all scores."""
        return self.products * self.heads * self.seq_len**2 * self.head_size


class Pass(NamedTuple):
    """Operations whose time depends on their memory traffic, such as element-wise operations."""

    num_bytes: float
    """Bytes read and written by all operations together."""
    launches: float = 1.0
    """Number of operations."""


class Exchange(NamedTuple):
    """A collective of the ranks along mesh axes. The next operation begins when the collective has
    ended."""

    axis: str
    """Mesh axes of the process group, such as tp."""
    name: str
    """Operation, such as all_gather."""
    num_bytes: float
    """Payload in bytes, as for `optimus.observe.events.Recorder.collective`."""


Operation = Product | FusedAttention | Pass | Exchange


class SegmentWork(NamedTuple):
    """Operations of a segment of the model for one microbatch, including collectives."""

    forward: tuple[Operation, ...]
    backward: tuple[Operation, ...]
    """Operations of the backward, including operations of the forward that the backward repeats
    (recomputation)."""
    input_backward: tuple[Operation, ...] | None = None
    """Operations of the pipeline action I, which computes only the gradients of activations; None
    if the schedule does not divide the backward."""


class ModelWork(NamedTuple):
    """Operations of all segments of a model on one rank."""

    embedding: SegmentWork
    blocks: tuple[SegmentWork, ...]
    """The operations of each layer. Equal layers share an object."""
    head: SegmentWork


def merged(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Return fewer operations that take the same time in total. Products of equal shapes, attention
    of equal shapes, and passes of similar sizes (within a factor of 2) are combined. Exchanges are
    not combined; they come last, in their original order."""
    products: dict[tuple, list[float]] = {}
    attention: dict[tuple, list[float]] = {}
    passes: dict[int, list[float]] = {}
    exchanges = []
    for op in operations:
        if isinstance(op, Product):
            total = products.setdefault(op[:3], [0.0, 0.0])
            figures: tuple[float, ...] = op[3:]
        elif isinstance(op, FusedAttention):
            total = attention.setdefault(op[1:4], [0.0, 0.0, 0.0])
            figures = (op.heads, *op[4:])
        elif isinstance(op, Pass):
            size = op.num_bytes / op.launches if op.launches else 0.0
            total = passes.setdefault(math.frexp(size)[1], [0.0, 0.0])
            figures = op
        else:
            exchanges.append(op)
            continue
        for index, figure in enumerate(figures):
            total[index] += figure
    return (
        *(Product(*shape, *total) for shape, total in products.items()),
        *(FusedAttention(heads, *shape, *rest) for shape, (heads, *rest) in attention.items()),
        *(Pass(*total) for _, total in sorted(passes.items())),
        *exchanges,
    )
