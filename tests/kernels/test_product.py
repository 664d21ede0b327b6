"""Products of experts' matrices: our own bf16 kernel against fp64, whatever the sizes."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest
import torch

from optimus_kernels.product import own, product

SIZES = [(1, 1, 1), (3, 5, 7), (33, 17, 65), (64, 96, 128), (600, 48, 2048), (40, 700, 1100)]


def operand(rows: int, columns: int, transposed: bool, generator) -> torch.Tensor:
    shape = (columns, rows) if transposed else (rows, columns)
    values = torch.randn(shape, generator=generator).bfloat16()
    return values.t() if transposed else values


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_products_are_those_of_fp64(size, a_transposed, b_transposed, out):
    (m, n, k), generator = size, torch.Generator().manual_seed(0)
    a, b = operand(m, k, a_transposed, generator), operand(k, n, b_transposed, generator)
    before = torch.randn(m, n, generator=generator).to(out)
    exact = a.double() @ b.double()
    for add in (False, True):
        found, expected = before.clone(), exact + before.double() if add else exact
        product(a, b, found, add)
        assert (found.double() - expected).norm() <= 3e-3 * expected.norm()


def test_threads_and_other_rows_change_nothing():
    generator = torch.Generator().manual_seed(0)
    a, b = operand(700, 96, False, generator), operand(96, 130, True, generator)
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = torch.empty(700, 130, dtype=torch.bfloat16)
        product(a, b, out)
        results.append(out)
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], one) for one in results)
    if own(a) is not None:
        part = torch.empty(37, 130, dtype=torch.bfloat16)
        product(a[5:42], b, part)
        assert torch.equal(part, results[0][5:42])


def test_nan_stays_in_its_row_and_infinity_is_kept():
    a, b = torch.ones(40, 33).bfloat16(), torch.ones(33, 34).bfloat16()
    a[7, 32], a[9, 0] = float("nan"), float("inf")
    out = torch.empty(40, 34, dtype=torch.bfloat16)
    product(a, b, out)
    assert out[7].isnan().all() and out[9].isinf().all()
    assert torch.equal(out[[6, 8, 10, 39]], torch.full((4, 34), 33.0).bfloat16())


def before_forbidden_memory(values: torch.Tensor) -> torch.Tensor:
    """A copy whose last byte is the last that this process may touch there."""
    pages = -(-values.nbytes // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    ours = torch.frombuffer(memory, dtype=torch.uint8)
    libc, none = ctypes.CDLL(None), 0
    end = ours.data_ptr() + pages * mmap.PAGESIZE
    assert libc.mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, none) == 0
    start = pages * mmap.PAGESIZE - values.nbytes
    copy = torch.frombuffer(memory, dtype=values.dtype, count=values.numel(), offset=start)
    return copy.view(values.shape).copy_(values)


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
def test_nothing_beyond_the_operands_is_touched(a_transposed, b_transposed):
    """In a process of its own, which the system ends if something is."""
    generator = torch.Generator().manual_seed(0)
    if own(torch.empty(1).bfloat16()) is None:
        pytest.skip("no AMX here")
    for m, n, k in ((1, 1, 1), (3, 5, 7), (33, 17, 65), (16, 31, 32), (17, 33, 33)):
        a = before_forbidden_memory(operand(m, k, False, generator).contiguous())
        b = before_forbidden_memory(operand(k, n, False, generator).contiguous())
        a, b = (a.view(k, m).t() if a_transposed else a, b.view(n, k).t() if b_transposed else b)
        outs = [
            before_forbidden_memory(torch.zeros(m, n, dtype=kind))
            for kind in (torch.bfloat16, torch.float32)
        ]
        child = os.fork()
        if child == 0:
            for out in outs:
                for add in (False, True):
                    product(a, b, out, add)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, (m, n, k)


def test_no_depth_gives_zeros():
    out = torch.full((3, 4), float("nan")).bfloat16()
    product(torch.zeros(3, 0).bfloat16(), torch.zeros(0, 4).bfloat16(), out)
    assert torch.equal(out, torch.zeros_like(out))


def test_an_operand_of_any_strides_is_taken():
    one = torch.randn(1, 1, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(5, 6, dtype=torch.bfloat16)
    product(torch.ones(5, 4).bfloat16(), one.expand(4, 6), out)
    assert torch.equal(out, (4 * one).expand(5, 6))
