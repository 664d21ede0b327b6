"""Which form of grouped products is the faster one, by a stopwatch."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from optimus import platform
from optimus.config import Config, ModelConfig
from optimus.errors import counted, one_line
from optimus.model.moe import Experts
from optimus.parallel.placement import share
from optimus_kernels.grouped_mm import set_form

logger = logging.getLogger(__name__)

_TIMED = 3
_MEASURED_TOKENS = 4096
"""Enough to fill a device; more would only take longer."""


def inner_sizes(config: Config) -> list[int]:
    """The widths that tensor-parallel ranks have of an expert's intermediate size, each once."""
    size, tp = config.model.intermediate_size, config.parallel.tp
    ranges = (share(size, index, tp) for index in range(tp))
    return sorted({stop - start for start, stop in ranges})


def measure_grouped_gemm(config: Config, device: torch.device) -> str:
    """The faster form for the widest layer of this model, as a tensor-parallel rank has it, forward
    and backward, on balanced routes.

    Threads are set before. A form that this device or dtype does not have is out of the race.
    """
    model, train = config.model, config.train
    layer = model.layer(model.experts_by_layer.index(max(model.experts_by_layer)))
    layer = layer.model_copy(update={"intermediate_size": inner_sizes(config)[-1]})
    tokens = min(train.microbatch_size * train.seq_len, _MEASURED_TOKENS)
    run = _experts_pass(layer, tokens, platform.dtype_of(train.dtype), device)
    seconds = {}
    try:
        for form in ("torch", "loop"):
            set_form(form)
            try:
                run()  # may compile or tune
                seconds[form] = platform.best_of(_TIMED, run, device)
            except ValueError as error:
                logger.info(one_line(error))
    finally:
        set_form("auto")
    times = ", ".join(f"{form} {1e3 * value:.2f} ms" for form, value in seconds.items())
    logger.info(
        "grouped products of %s, %s: %s",
        counted(layer.experts, "expert"),
        counted(tokens, "token"),
        times,
    )
    return min(seconds, key=seconds.__getitem__)


def _experts_pass(
    layer: ModelConfig, tokens: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], None]:
    """Forward and backward of one layer's experts, every expert with as many rows."""
    with device:
        experts = Experts(layer).to(dtype)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        x = torch.randn(tokens, layer.hidden_size).to(dtype).requires_grad_()
        top_k = layer.num_experts_per_tok
        weights = torch.full((tokens, top_k), 1 / top_k).to(dtype).requires_grad_()
        slots = torch.arange(tokens * top_k).view(tokens, top_k)
    leaves = [x, weights, *experts.parameters()]

    def run() -> None:
        out = experts(x, weights, slots % layer.experts)
        # Of a scalar: given a gradient, autograd imports sympy (0.3 s) to compare two shapes.
        torch.autograd.grad(out.square().sum(), leaves)

    return run
