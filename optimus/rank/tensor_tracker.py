"""Bytes and operations of torch code, counted from the operations that reach torch's dispatcher."""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from optimus.rank.operations import FusedAttention, Operation, Pass, Product, merged
from optimus_kernels import experts_grouped
from optimus_kernels.experts_operands import Operands, WeightGrads

_aten = torch.ops.aten
_ALLOCATIONS = {
    _aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided,
    _aten.resize_,
}  # fmt: skip
_WRITES_ONLY = {_aten.copy_, _aten.fill_, _aten.zero_}
"""Operations that overwrite their first operand."""
_LOOKUPS = {
    _aten.embedding, _aten.index, _aten.index_select, _aten.gather, torch.ops.optimus.gather,
}  # fmt: skip
_ADDITIONS = {
    _aten.index_add_, _aten.index_add, _aten.scatter_add_, _aten.scatter_add, _aten.index_put_,
    _aten._index_put_impl_, _aten.scatter_, _aten.scatter,
}  # fmt: skip
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}
"""Matrix products, each with the index of its first factor."""


def _product_of(packet: Any, args: Sequence[Any]) -> Product | None:
    """Return the matrix product of an operation of torch; None for other operations."""
    if packet not in _PRODUCTS:
        return None
    a, b = args[_PRODUCTS[packet] :][:2]
    *batch, rows, inner = a.shape
    return Product(rows, inner, b.shape[-1], math.prod(batch))


def _pass_of(
    function: Any, args: Sequence[Any], read: Sequence[Tensor], written: Sequence[Tensor]
) -> Pass | None:
    """Return the `Pass` of an operation that is not a matrix product; None if the operation neither
    reads nor writes memory.

    Args:
        function: The operation.
        args: Positional arguments of the operation.
        read: All tensors in the positional and keyword arguments.
        written: Results of the operation.
    """
    packet = function._overloadpacket
    if packet in _ALLOCATIONS or not written:
        return None
    if packet in _LOOKUPS:
        index = sum(_size(tensor) for tensor in read[1:])
        return Pass(2 * sum(map(_size, written)) + index)
    if packet in _ADDITIONS:
        return Pass(sum(map(_size, read[1:])) + 2 * max(map(_size, read[1:]), default=0))
    if not function._schema.is_mutable and all(_is_view(tensor, read) for tensor in written):
        return None
    sizes = sum(map(_size, read)) + sum(map(_size, written))
    if packet in _WRITES_ONLY or function._schema.overload_name.endswith("out"):
        sizes -= sum(map(_size, written))
    return Pass(sizes)


def _is_view(tensor: Tensor, of: Sequence[Tensor]) -> bool:
    storage = tensor.untyped_storage()._cdata
    return any(operand.untyped_storage()._cdata == storage for operand in of)


def _size(tensor: Tensor) -> int:
    """Return the number of bytes of a tensor. Elements that a stride of 0 repeats count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


class _Work(NamedTuple):
    """Costs of a call of a torch operation: its number of floating-point operations, and its matrix
    product or memory traffic."""

    flops: int
    operation: Product | Pass | None
    """None if the operation moves no bytes. Also None for a grouped product of experts, because its
    size depends on the number of rows of each expert."""


_Shape = tuple[torch.Size, tuple[int, ...], torch.dtype] | None
"""Shape, stride and dtype of a tensor."""


class _Known(NamedTuple):
    """Results and costs of an operation, for arguments of given shapes and dtypes."""

    results: tuple[_Shape, ...] | None
    """Shapes of the new tensors; None if the result is the first operand."""
    sequence: type | None
    """Type of the sequence of several results; None for a single result."""
    work: _Work

    def make(self, args: Sequence[Any]) -> Any:
        """Return the results of a call."""
        if self.results is None:
            return args[0]
        made = [
            shape and torch.empty_strided(shape[0], shape[1], dtype=shape[2], device="meta")
            for shape in self.results
        ]
        return made[0] if self.sequence is None else self.sequence(made)


_known: dict[Any, _Known] = {}
"""Cache of operations on meta tensors, by function and arguments. The cache saves time, because
torch computes the shapes of most results in Python, and because the operations of a profile occur
again in other layers and in other profiles."""
_MOST_KNOWN = 1 << 13
"""Number of cached operations at which `_known` is cleared. Successive profiles of a search have
about a hundred different operations."""


def _run(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], read: Sequence[Tensor]
) -> tuple[Any, _Work]:
    """Run an operation that returns no views. Return its results and its costs.

    Args:
        function: The operation.
        args, kwargs: Positional and keyword arguments of the operation.
        read: All tensors in these arguments.
    """
    key = None
    if all(tensor.is_meta for tensor in read):
        named = tuple((name, _described(value)) for name, value in kwargs.items())
        key = function, _described(args), named
        if (known := _known.get(key)) is not None:
            return known.make(args), known.work
    out = function(*args, **kwargs)
    packet, flops = function._overloadpacket, 0
    operation: Product | Pass | None = None
    if packet not in _GROUPED_PRODUCTS:
        if packet in flop_registry:
            flops = flop_registry[packet](*args, **kwargs, out_val=out)
        written = [*_tensors_in((out,))]
        operation = _product_of(packet, args) or _pass_of(function, args, read, written)
    work = _Work(flops, operation)
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    if key is not None:
        if function._schema.is_mutable:
            if out is args[0] and packet not in _ALLOCATIONS:
                _known[key] = _Known(None, None, work)
        elif (results := _new_results(out, read)) is not None:
            sequence = type(out) if isinstance(out, (tuple, list)) else None
            _known[key] = _Known(results, sequence, work)
    return out, work


def _described(value: Any) -> Any:
    """Return a hashable description of an argument of an operation. Operations whose arguments have
    equal descriptions have equal results."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.untyped_storage().nbytes()
    if isinstance(value, (tuple, list)):
        return tuple(map(_described, value))
    return type(value), value  # 1, 1.0 and True are equal


def _new_results(out: Any, read: Sequence[Tensor]) -> tuple[_Shape, ...] | None:
    """Return the shapes of the results of an operation. Return None if `torch.empty_strided` cannot
    create equal tensors, for example because results share memory with each other or with
    operands."""
    shapes: list[_Shape] = []
    others = [*read]
    for tensor in out if isinstance(out, (tuple, list)) else (out,):
        if tensor is None:
            shapes.append(None)
            continue
        if not isinstance(tensor, Tensor) or not tensor.is_meta or _is_view(tensor, others):
            return None
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if made.untyped_storage().nbytes() != tensor.untyped_storage().nbytes():
            return None
        others.append(tensor)
        shapes.append((tensor.shape, tensor.stride(), tensor.dtype))
    return tuple(shapes)


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors in arguments or results of an operation."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_in(value)


class _ExpertRows(NamedTuple):
    """Factors for the operations on rows of experts in a layer. The kernel launches and the bytes
    of these operations are multiplied by the factors."""

    launches: int
    """Number of kernel launches of each operation: on a CPU, one for each expert."""
    share: float
    """Fraction of the rows of an operand that belong to experts of this rank. On accelerators, an
    operand also contains the rows of experts on other ranks, which this rank does not compute."""


class _Storage(NamedTuple):
    reference: weakref.ref
    """Weak reference to the storage. Its callback removes the entry when the storage is freed."""
    num_bytes: int
    """Counted bytes. Storages that existed before the first operation count as 0 bytes."""
    rows: _ExpertRows | None
    """Factors for operations that read this storage, if these are operations of experts; otherwise
    None. The storage belongs to operations of experts if it has row indices or the result of a
    grouped product, because no other operations read such tensors. The ops in `_EXPERTS` do not
    identify all operations of experts: a divided backward computes the gradients of experts without
    these ops."""


class TensorTracker(TorchDispatchMode):
    """Counts the bytes of the storages that operations create, until the storages are freed, and
    records the operations.

    Attributes:
        live: Counted bytes of the storages that are not freed.
        peak: Largest value of `live` since the last call of `take`.
        flops: FLOPs since the last call of `take`.
    """

    def __init__(self, on_cpu: bool = False) -> None:
        super().__init__()
        # torch imports this module in the first operation under a mode. In a profile, the import
        # would delay the release of tensors, which would then be counted for too long.
        importlib.import_module("torch._dynamo")
        self._on_cpu = on_cpu
        self.live = self.peak = self.flops = 0
        self._operations: list[Operation] = []
        self._expert_rows = 0
        """Number of rows that the experts of a layer on this rank compute for a microbatch; 0 if
        each row of the operands belongs to an expert of this rank. On a CPU, only rows of experts
        of this rank are in memory."""
        self._known: dict[int, _Storage] = {}
        """The storages, by address."""

    def take(self) -> tuple[int, int, int, tuple[Operation, ...]]:
        """Return `live`, `peak`, `flops` and the operations since the last call, combined by
        `merged`."""
        figures = self.live, self.peak, self.flops, merged(self._operations)
        self.peak, self.flops = self.live, 0
        self._operations.clear()
        return figures

    def count_attention(self, operation: FusedAttention) -> None:
        """Count an attention operation. The counted FLOPs include masked scores, as in
        `flops_per_token`."""
        self.flops += round(2 * operation.flops)
        self._operations.append(operation)

    def count_expert_rows(self, rows: int) -> None:
        """Set the number of rows, as for `UseTracker.count_expert_rows`."""
        self._expert_rows = rows

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        read = [*_tensors_in(args), *_tensors_in(kwargs.values())]
        for tensor in read:
            self._add(tensor, is_new=False)
        known = (self._known[tensor.untyped_storage()._cdata].rows for tensor in read)
        rows = next((rows for rows in known if rows is not None), None)
        packet = function._overloadpacket
        if packet is torch.ops.aten._local_scalar_dense and args[0].is_meta:
            # Meta tensors have no values. Code that reads a value, such as a test for padding, gets
            # True or 1.
            return True if args[0].dtype is torch.bool else 1
        work = None
        if (experts := _EXPERTS.get(packet)) is not None:
            with self:  # count the temporary tensors and the operations of the implementation
                out = experts(*args)
        elif function.is_view:
            out = function(*args, **kwargs)
        else:
            out, work = _run(function, args, kwargs, read)
        if packet is torch.ops.optimus.route and self._on_cpu and self._expert_rows:
            offsets, *of_rows, row = out
            out = offsets, *(index.new_empty(self._expert_rows) for index in of_rows), row
        for tensor in _tensors_in((out,)):
            self._add(tensor, True, self._rows_of_results(packet, out, rows))
        self.peak = max(self.peak, self.live)
        if work is not None:
            self._count(packet, args, work, rows)
        return out

    def _rows_of_results(
        self, packet: Any, out: Any, rows: _ExpertRows | None
    ) -> _ExpertRows | None:
        """Return `_Storage.rows` for the results `out` of an operation on operands with `rows`."""
        if packet is torch.ops.optimus.route:
            offsets, token, *_ = out
            size = token.shape[0]
            share = min(1.0, self._expert_rows / size) if self._expert_rows and size else 1.0
            return _ExpertRows(offsets.shape[0] - 1 if self._on_cpu else 1, share)
        if packet is torch.ops.optimus.grouped_mm_weight and rows is not None:
            return rows._replace(share=1.0)  # gradients of weights have the size of the weights
        return rows if packet in _GROUPED_PRODUCTS else None

    def _count(
        self, packet: Any, args: Sequence[Any], work: _Work, rows: _ExpertRows | None
    ) -> None:
        launches, share = rows or (1, 1.0)
        self.flops += work.flops
        if packet in _GROUPED_PRODUCTS:
            a, b, offsets = args
            experts = offsets.shape[0] - 1
            expert_rows = (self._expert_rows or a.shape[0]) / experts
            if packet is torch.ops.optimus.grouped_mm:
                sizes = expert_rows, a.shape[1], b.shape[2]
            else:
                sizes = a.shape[1], expert_rows, b.shape[1]
            product = Product(*sizes, experts, launches)
            self.flops += round(product.flops)
            self._operations.append(product)
        elif isinstance(work.operation, Product):
            self._operations.append(work.operation)
        elif work.operation is not None:
            size = share * work.operation.num_bytes
            self._operations.append(Pass(size, launches * work.operation.launches))

    def _add(self, tensor: Tensor, is_new: bool, rows: _ExpertRows | None = None) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes() if is_new else 0

        def remove(_: Any) -> None:
            self.live -= self._known.pop(key).num_bytes

        self._known[key] = _Storage(weakref.ref(storage, remove), size, rows)
        self.live += size


class _Attention(torch.autograd.Function):
    """Attention of query [..., H, S, C], with the memory and the FLOPs of a fused kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        tensors: TensorTracker,
    ) -> Tensor:
        # Fused kernels store the heads of a token in adjacent memory.
        heads_last = query.transpose(-3, -2).shape[:-1]
        out = query.new_empty(*heads_last, value.shape[-1]).transpose(-3, -2)
        lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, lse)
        size = sum(tensor.nbytes for tensor in (query, key, value, out))
        heads = query.numel() // (query.shape[-1] * query.shape[-2])
        shape = heads, key.shape[-2], (query.shape[-1] + value.shape[-1]) // 2
        ctx.attention = FusedAttention(*shape, 2, size)
        ctx.tensors = tensors
        tensors.count_attention(ctx.attention)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        forward = ctx.attention  # backward has 3 more products, and also moves gradients
        size = 2 * forward.num_bytes
        ctx.tensors.count_attention(forward._replace(products=5, num_bytes=size, launches=2))
        grads = (torch.empty_like(tensor) for tensor in (query, key, value))
        return *grads, None, None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, tensors: TensorTracker
) -> Tensor:
    """Return the result of attention for query [..., H, S, C], a meta tensor without values.
    `tensors` counts the memory and the operations of a fused kernel."""
    return _Attention.apply(query, key, value, mask, tensors)


def _experts(*arguments: Any) -> tuple[Tensor, Tensor]:
    return experts_grouped.forward(Operands(*arguments[:8]), arguments[8])


def _experts_backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    operands, (h, with_weights) = Operands(*arguments[:8]), arguments[8:]
    into = None
    if with_weights:
        gate_up, down = torch.empty_like(operands.gate_up), torch.empty_like(operands.down)
        into = WeightGrads(gate_up, down, add=False)
    dx, dw, _ = experts_grouped.backward(grad, operands, h, into)
    empty = operands.x.new_empty(0)
    return dx, dw.to(operands.weights.dtype), *(into[:2] if into else (empty, empty))


def _experts_backward_into(grad: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    operands, into = Operands(*arguments[:8]), WeightGrads(*arguments[9:])
    dx, dw, _ = experts_grouped.backward(grad, operands, arguments[8], into)
    return dx, dw.to(operands.weights.dtype)


_EXPERTS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.optimus.experts: _experts,
    torch.ops.optimus.experts_backward: _experts_backward,
    torch.ops.optimus.experts_backward_into: _experts_backward_into,
}
"""Implementations of the ops of the experts that run on accelerators, by op."""
_GROUPED_PRODUCTS = {torch.ops.optimus.grouped_mm, torch.ops.optimus.grouped_mm_weight}
"""Matrix products of the experts, for R rows of all experts together: [R, A] times [E, A, B], or
transposed [R, A] times [R, B]."""
