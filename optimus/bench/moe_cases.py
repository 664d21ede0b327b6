"""Which MoE blocks are measured: the shapes of the Mula models, and one for quick looks."""

from __future__ import annotations

from dataclasses import dataclass

from optimus.errors import ConfigError

# hidden, intermediate of an expert, experts, experts per token: as configs/model has them.
SHAPES = {
    "small": (512, 256, 64, 8),
    "mula-7b-a1b": (2048, 1024, 64, 8),
    "mula-20b-a2b": (2048, 1024, 96, 8),
    "mula-100b-a7b": (3072, 1536, 144, 8),
    "mula-220b-a10b": (3072, 1536, 240, 8),
}
CPU_CASES = ("small-fp32", "mula-7b-a1b-fp32", "small-bf16", "mula-7b-a1b-bf16")
GPU_CASES = tuple(f"{shape}-bf16" for shape in SHAPES if shape != "small")
_CPU_TOKENS = {"small": 2048}
_GPU_TOKENS = 16384


@dataclass(frozen=True)
class Case:
    """One block and one batch."""

    name: str
    dtype: str
    hidden: int
    inner: int
    experts: int
    top_k: int
    tokens: int

    @property
    def forward_flops(self) -> float:
        """Two a multiply-add: three products of D x F a slot, and the router."""
        slots = self.tokens * self.top_k
        return 2.0 * (
            3 * slots * self.hidden * self.inner + self.tokens * self.hidden * self.experts
        )

    @property
    def bytes_needed(self) -> int:
        """Of the weights, two sets of their gradients, and what a batch takes at its worst."""
        size = 4 if self.dtype == "fp32" else 2
        weights = 3 * self.experts * self.hidden * self.inner
        slots = self.tokens * self.top_k * (4 * self.hidden + 6 * self.inner)
        return size * (3 * weights + 2 * slots)


def make_case(name: str, tokens: int, on_cpu: bool) -> Case:
    """`SHAPE-DTYPE`; `tokens` 0: 1024 on a CPU (small: 2048), 16384 on an accelerator."""
    shape, _, dtype = name.rpartition("-")
    if shape not in SHAPES or dtype not in ("fp32", "bf16"):
        raise ConfigError(
            f"--case {name} must be SHAPE-fp32 or SHAPE-bf16 with SHAPE one of {', '.join(SHAPES)}"
        )
    if tokens < 0:
        raise ConfigError(f"--tokens {tokens} must be at least 1")
    standard = _CPU_TOKENS.get(shape, 1024) if on_cpu else _GPU_TOKENS
    return Case(name, dtype, *SHAPES[shape], tokens or standard)
