"""Tests of the matrix products of experts: the bf16 kernel is compared with products in fp64."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import pytest
import torch

from optimus_kernels import product as products
from optimus_kernels.product import amx_kernel, fastest_library, onednn, product
from tests.kit.ranks.processes import python

SIZES = [(1, 1, 1), (3, 5, 7), (33, 17, 65), (64, 96, 128), (600, 48, 2048), (40, 700, 1100)]


def operand(rows: int, columns: int, transposed: bool, generator) -> torch.Tensor:
    shape = (columns, rows) if transposed else (rows, columns)
    values = torch.randn(shape, generator=generator).bfloat16()
    return values.t() if transposed else values


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("b_transposed", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_products_equal_those_in_fp64(size, a_transposed, b_transposed, out):
    (m, n, k), generator = size, torch.Generator().manual_seed(0)
    a, b = operand(m, k, a_transposed, generator), operand(k, n, b_transposed, generator)
    before = torch.randn(m, n, generator=generator).to(out)
    exact = a.double() @ b.double()
    for add in (False, True):
        result, expected = before.clone(), exact + before.double() if add else exact
        product(a, b, result, add)
        assert (result.double() - expected).norm() <= 3e-3 * expected.norm()


def test_threads_and_other_rows_change_no_bit():
    generator = torch.Generator().manual_seed(0)
    a, b = operand(700, 96, False, generator), operand(96, 130, True, generator)
    results, before = [], torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        out = torch.empty(700, 130, dtype=torch.bfloat16)
        product(a, b, out)
        results.append(out)
    torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results)
    if amx_kernel(a) is not None:
        some_rows = torch.empty(37, 130, dtype=torch.bfloat16)
        product(a[5:42], b, some_rows)
        assert torch.equal(some_rows, results[0][5:42])


def test_nan_and_infinity_affect_only_their_row():
    a, b = torch.ones(40, 33).bfloat16(), torch.ones(33, 34).bfloat16()
    a[7, 32], a[9, 0] = float("nan"), float("inf")
    out = torch.empty(40, 34, dtype=torch.bfloat16)
    product(a, b, out)
    assert out[7].isnan().all() and out[9].isinf().all()
    assert torch.equal(out[[6, 8, 10, 39]], torch.full((4, 34), 33.0).bfloat16())


def before_forbidden_memory(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of `values` that ends directly before a page without access rights."""
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
def test_memory_after_the_operands_is_not_accessed(a_transposed, b_transposed):
    """The operands and the result end directly before a page without access rights. An access to
    this page kills the child process."""
    generator = torch.Generator().manual_seed(0)
    if amx_kernel(torch.empty(1).bfloat16()) is None:
        pytest.skip("this machine has no AMX")
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


def test_product_over_an_empty_dim_is_zero():
    out = torch.full((3, 4), float("nan")).bfloat16()
    product(torch.zeros(3, 0).bfloat16(), torch.zeros(0, 4).bfloat16(), out)
    assert torch.equal(out, torch.zeros_like(out))


def test_operand_may_have_any_strides():
    value = torch.randn(1, 1, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(5, 6, dtype=torch.bfloat16)
    product(torch.ones(5, 4).bfloat16(), value.expand(4, 6), out)
    assert torch.equal(out, (4 * value).expand(5, 6))


needs_onednn = pytest.mark.skipif(
    not products.onednn_is_exact(),
    reason="oneDNN is not available for fp32 products, or computes them in bf16",
)


@pytest.fixture
def not_of_intel(monkeypatch):
    """Prefer oneDNN for fp32 products, as on a processor that is not from Intel."""
    monkeypatch.setattr(products, "_onednn_is_better", lambda: True)


@needs_onednn
def test_onednn_computes_fp32_products_of_experts_where_it_is_faster():
    """On processors that are not from Intel, oneDNN must compute the fp32 products of the op
    `experts`, and no other products. On Intel processors, oneDNN must compute no products."""
    code = """
import types, torch, optimus_kernels as kernels
from optimus_kernels import product
cpuinfo = types.SimpleNamespace(read_text=lambda: "processor : 0\\n{vendor}\\n")
product.Path = lambda path: cpuinfo
x, weights = torch.randn(64, 32, requires_grad=True), torch.rand(64, 1)
matrices = [torch.randn(1, *shape, requires_grad=True) for shape in ((48, 32), (32, 24))]
rows = kernels.route(torch.zeros(64, 1, dtype=torch.int64), 0, 1)
product.onednn_is_exact()
print("= within", flush=True)
out = kernels.experts(x, weights, *matrices, rows)
out.sum().backward()
print("= after", flush=True)
torch.randn(64, 64) @ torch.randn(64, 64)
"""
    counts = {}
    for vendor in ("vendor_id : AuthenticAMD", "vendor_id\\t: GenuineIntel", "no vendor"):
        # oneDNN reads ONEDNN_VERBOSE when it starts, so this needs a new process.
        result = python("-c", code.format(vendor=vendor), ONEDNN_VERBOSE="1")
        assert result.returncode == 0, result.stderr
        _, _, log = result.stdout.partition("= within\n")
        within, _, after = log.partition("= after\n")
        counts[vendor.split()[-1]] = within.count(",matmul,")
        assert ",matmul," not in after
    # oneDNN computes two products in forward and four in backward. If the vendor is unknown, MKL
    # computes all products, as on Intel.
    assert counts == {"AuthenticAMD": 6, "GenuineIntel": 0, "vendor": 0}


@needs_onednn
def test_default_library_is_restored(not_of_intel):
    like, settings = torch.empty(1), torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    with pytest.raises(ZeroDivisionError), fastest_library(like):
        assert settings.fp32_precision == "bf16"
        raise ZeroDivisionError
    assert settings.fp32_precision == before
    with fastest_library(like.double()), fastest_library(like.bfloat16()):
        assert settings.fp32_precision == before


@needs_onednn
def test_last_of_several_threads_restores_the_library():
    settings, inside, leave = torch.backends.mkldnn.matmul, threading.Event(), threading.Event()
    before = settings.fp32_precision

    def other() -> None:
        with onednn():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with onednn():
        thread.start()
        assert inside.wait(10)
    assert settings.fp32_precision == "bf16"
    leave.set()
    thread.join()
    assert settings.fp32_precision == before
