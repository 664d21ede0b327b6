"""Tests of the op adamw_. The results of the op must equal the results of torch's fused AdamW. An
update of a tensor in slices must be bitwise equal to an update of the whole tensor."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import optimus_kernels.adamw as module
from optimus_kernels import adamw_, adamw_into, build, library
from optimus_kernels.library import Native
from tests.kernels.on_cpu import CudaOnCpu

VECTOR = 16
SIZE = 4096
NUMBERS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def native(cpu_library) -> Native:
    """Return the CPU kernels of one instruction set."""
    return Native(cpu_library, "cpu")


@pytest.fixture
def compiled(native, monkeypatch) -> None:
    monkeypatch.setattr(library, "native", lambda tensor, **_: native)


@pytest.fixture
def reference(monkeypatch) -> Callable[..., None]:
    """Return a function that runs adamw_ in plain torch, without a compiled kernel."""

    def run(*tensors, **numbers) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(library, "native", lambda tensor, **_: None)
            adamw_(*tensors, **numbers)

    return run


def make_states(size: int, grad_dtype=torch.float32, seed: int = 0) -> list[Tensor]:
    """Return random master, exp_avg, exp_avg_sq and grad, each [size]. The gradients span many
    orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    normal, exponent, m, v = torch.randn(4, size, generator=generator)
    return [normal, m * 0.1, v.square() * 0.1, (m * 10**exponent).to(grad_dtype)]


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Assert that the tensors are bitwise equal. Elements that are NaN can differ in their bits."""
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num())
        assert torch.equal(a.signbit()[~a.isnan()], b.signbit()[~b.isnan()])


def step_of_torch(states: list[Tensor], step: int, **numbers) -> None:
    master, exp_avg, exp_avg_sq, grad = states
    torch._fused_adamw_(
        [master], [grad.float()], [exp_avg], [exp_avg_sq], [], [torch.tensor(float(step))],
        lr=numbers["lr"], beta1=numbers["beta1"], beta2=numbers["beta2"],
        weight_decay=numbers["weight_decay"], eps=numbers["eps"], amsgrad=False, maximize=False,
    )  # fmt: skip


torch_fuses = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's kernel fuses products and sums only on AVX2 and AVX-512",
)


@torch_fuses
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("change", [{}, {"weight_decay": 0.0}, {"beta1": 0.5}, {"beta1": 0.3}])
def test_three_steps_equal_torch_to_the_bit(change):
    numbers = {**NUMBERS, **change}
    size = 5 * SIZE + 3 * VECTOR
    ours = make_states(size)
    parameter = torch.nn.Parameter(ours[0].clone())
    optimizer = torch.optim.AdamW(
        [parameter], lr=numbers["lr"], betas=(numbers["beta1"], numbers["beta2"]),
        eps=numbers["eps"], weight_decay=numbers["weight_decay"], fused=True,
    )  # fmt: skip
    ours[1].zero_(), ours[2].zero_()
    for step in (1, 2, 3):
        grad = make_states(size, seed=step)[3]
        parameter.grad = grad.clone()
        optimizer.step()
        adamw_(*ours[:3], grad, None, step=step, **numbers)
    state = optimizer.state[parameter]
    assert_same(ours[:3], [parameter.detach(), state["exp_avg"], state["exp_avg_sq"]])


@torch_fuses
@pytest.mark.usefixtures("compiled")
def test_non_finite_values_pass_through_as_in_torch():
    inf, nan = math.inf, math.nan
    odd = torch.tensor([inf, -inf, nan, 0.0, -0.0, 1e-42, 3e38, -3e38, 1e-20, 1.0])
    combinations = torch.cartesian_prod(*[torch.arange(len(odd))] * 4)
    assert len(combinations) % VECTOR == 0
    ours = [odd[combinations[:, i]].contiguous() for i in range(4)]
    ours[2].abs_()
    theirs = copies(ours)
    adamw_(*ours, None, step=7, **NUMBERS)
    step_of_torch(theirs, 7, **NUMBERS)
    assert_same(ours[:3], theirs[:3])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("grad_dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("size", [0, 1, 15, SIZE + 13])
def test_reference_gives_the_same_bits(reference, size, grad_dtype):
    for out_dtype in (None, *HALVES):
        ours, theirs = (make_states(size, grad_dtype) for _ in range(2))
        outs = [out_dtype and torch.zeros(size, dtype=out_dtype) for _ in range(2)]
        adamw_(*ours, outs[0], step=5, grad_scale=0.37, **NUMBERS)
        reference(*theirs, outs[1], step=5, grad_scale=0.37, **NUMBERS)
        assert_same(ours, theirs)
        if out_dtype:
            assert_same(outs[:1], outs[1:])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_any_nan_is_rounded_to_a_nan(dtype):
    # Rounded as finite numbers, the first NaN would become zero, and the second infinity.
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32)
    master = bits.repeat(VECTOR).view(torch.float32)[1:].clone()
    states = [master, *(torch.zeros_like(master) for _ in range(3))]
    out = torch.zeros(len(master), dtype=dtype)
    adamw_(*states, out, step=1, **{**NUMBERS, "weight_decay": 0.0})
    assert master.isnan().all() and out.isnan().all()


@pytest.mark.usefixtures("compiled")
def test_slices_alignment_and_threads_change_no_bit():
    size = 3 * 32768 + 29
    whole, sliced = make_states(size, torch.bfloat16), make_states(size, torch.bfloat16)
    outs = [torch.zeros(size, dtype=torch.bfloat16) for _ in range(2)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        adamw_(*whole, outs[0], step=3, **NUMBERS)
        torch.set_num_threads(1)
        bounds = [0, 1, 2, 5, 37, 38, 1000, 32768, 32775, 65536, 70001, size - 1, size]
        for begin, end in itertools.pairwise(bounds):
            slices = [tensor[begin:end] for tensor in (*sliced, outs[1])]
            adamw_(*slices, step=3, **NUMBERS)
    finally:
        torch.set_num_threads(threads)
    assert_same(whole, sliced)
    assert_same(outs[:1], outs[1:])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_parameter_is_the_rounded_master(dtype):
    """A learning rate of 0 keeps the masters, so each parameter must be its rounded master."""
    # All values of the upper 16 bits. The lower 16 bits are 0, the midpoint of rounding to bf16, or
    # a neighbour of this midpoint.
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    master = torch.cat([(upper | low).view(torch.float32) for low in (0, 0x7FFF, 0x8000, 0x8001)])
    zero, out = torch.zeros_like(master), torch.zeros(len(master), dtype=dtype)
    before = master.clone()
    adamw_(master, zero, zero.clone(), zero.clone(), out, **{**NUMBERS, "lr": 0.0}, step=1)
    assert_same([master], [before])
    assert_same([out], [before.to(dtype)])


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grad_scale_equals_scaling_before_the_update(grad_dtype):
    ours, theirs = (make_states(SIZE + 5, grad_dtype) for _ in range(2))
    adamw_(*ours, None, step=2, grad_scale=1 / 3, **NUMBERS)
    adamw_(*theirs[:3], theirs[3].float().mul_(1 / 3), None, step=2, **NUMBERS)
    assert_same(ours[:3], theirs[:3])


def test_fused_rounds_once():
    """`_fused` must round a * b + c only once. Exact fractions give the expected result."""
    from fractions import Fraction

    a, b, c = torch.randn(3, 2000, generator=torch.Generator().manual_seed(1))
    c = torch.cat([c[:1000], c[1000:] * 2.0**-30])
    a, b = torch.cat([a, torch.tensor([1 + 2.0**-23])]), torch.cat([b, torch.tensor([1.0])])
    # The exact sum is just above the midpoint of two fp32 numbers. Rounded to fp64 first, the sum
    # would be the midpoint, which rounds down (to even).
    a[-1], b[-1] = 1 + 2.0**-12, 1 + 2.0**-12  # product: 1 + 2^-11 + 2^-24, a midpoint
    c = torch.cat([c, torch.tensor([2.0**-70])])
    ours = module._fused(a, b, c)
    for x, y, z, rounded in zip(a.tolist(), b.tolist(), c.tolist(), ours.tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        near = torch.tensor(rounded)
        below, above = (torch.nextafter(near, torch.tensor(s * math.inf)).item() for s in (-1, 1))
        error = abs(exact - Fraction(rounded))
        assert error <= abs(exact - Fraction(below)) and error <= abs(exact - Fraction(above))
    assert ours[-1].item() == 1 + 2.0**-11 + 2.0**-23


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
def test_gpu_kernel_gives_the_same_bits(monkeypatch, reference, tmp_path):
    """Emulate the CUDA kernel on a CPU, and compare its results with the reference. Some tensors
    have sizes or addresses that vector loads do not support."""
    emulated = CudaOnCpu(build.csrc() / "cuda/kernels.cu", tmp_path)
    for size, shift in ((0, 0), (3, 0), (1027, 0), (1024, 1)):
        tensors = [*make_states(size + shift, torch.bfloat16), torch.zeros(size + shift).bfloat16()]
        # If `shift` is 1, the addresses of the slices are not multiples of 16 bytes.
        ours = [tensor[shift:] for tensor in copies(tensors)]
        theirs = [tensor[shift:] for tensor in tensors]
        with monkeypatch.context() as patch:
            patch.setattr(library, "native", lambda tensor, **_: emulated)
            adamw_(*ours, step=4, grad_scale=0.7, **NUMBERS)
        reference(*theirs, step=4, grad_scale=0.7, **NUMBERS)
        assert_same(ours, theirs)


@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16], ids=str)
def test_op_passes_opcheck(out_dtype):
    states = make_states(33, torch.bfloat16)
    out = out_dtype and torch.zeros(33, dtype=out_dtype)
    numbers = (1e-3, 0.9, 0.95, 1e-8, 0.1, 1, 1.0)
    torch.library.opcheck(torch.ops.optimus.adamw_.default, (*states, out, *numbers))


@pytest.mark.parametrize(
    ("index", "wrong", "error", "message"),
    [
        (0, torch.zeros(8, dtype=torch.bfloat16), TypeError, "master is torch.bfloat16"),
        (1, torch.zeros(7), ValueError, r"exp_avg \[7\]"),
        (3, torch.zeros(8, dtype=torch.float64), TypeError, "grad is torch.float64"),
        (3, torch.zeros(16)[::2], ValueError, "grad .* contiguous"),
        (4, torch.zeros(8), TypeError, "param_out is torch.float32"),
    ],
)
def test_invalid_tensor_is_refused_by_name(index, wrong, error, message):
    tensors: list[Tensor | None] = [*make_states(8), None]
    tensors[index] = wrong
    with pytest.raises(error, match=message):
        adamw_(*tensors, step=1, **NUMBERS)


@pytest.mark.parametrize("change", [{"step": 0}, {"beta1": 1.0}, {"beta2": -0.1}])
def test_settings_that_divide_by_zero_are_refused(change):
    with pytest.raises(ValueError, match="adamw_: step"):
        adamw_(*make_states(8), None, **{**NUMBERS, "step": 1, **change})


@pytest.mark.parametrize("kind", ["native", "reference"])
@pytest.mark.parametrize("grad_dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("param_dtype", [None, *HALVES])
@pytest.mark.parametrize(("size", "offset"), [(SIZE, 0), (70_001, 0), (1000, 3), (1, 0), (0, 0)])
def test_adamw_into_has_the_bits_of_adamw(
    native, monkeypatch, kind, grad_dtype, param_dtype, size, offset
):
    """The outputs begin `offset` elements after an address that is a multiple of 64. The inputs do
    not change."""
    monkeypatch.setattr(library, "native", lambda *_, **__: native if kind == "native" else None)
    states = make_states(size, grad_dtype)
    expected, before = copies(states), copies(states)
    into = tuple(torch.full((size + offset,), math.nan)[offset:] for _ in range(3))
    params = [None, None]
    if param_dtype is not None:
        params = [torch.full((size + offset,), math.nan).to(param_dtype)[offset:] for _ in range(2)]
    adamw_into(into, *states, params[0], **NUMBERS, step=3, grad_scale=0.3)
    adamw_(*expected, params[1], **NUMBERS, step=3, grad_scale=0.3)
    assert_same(list(into), expected[:3])
    assert_same(states, before)
    if param_dtype is not None:
        assert_same(params[:1], params[1:])


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_adamw_into_refuses_outputs_of_another_shape(bad):
    states = make_states(64)
    into = [torch.zeros(64) for _ in range(3)]
    into[bad] = torch.zeros(63)
    with pytest.raises(ValueError, match=r"adamw_: .* must be contiguous and have the shape"):
        adamw_into(tuple(into), *states, None, **NUMBERS, step=1)
