"""Published step times, and the planned step of each row, for scripts/bench/planner.py."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpt_operations import Split, gpt_block, gpt_head, gpt_receive, layers_of

from optimus.planner.machine_rates import UpdateBytes
from optimus.planner.step_time import Reduction, Step

VOCABULARY = 51200
"""Padded vocabulary of the GPT models in Megatron-LM."""
OPTIMIZER_BYTES = 34
"""Bytes that Adam with fp32 master weights reads and writes for each parameter: gradient in 2
bytes, for the norm and for the update (4); master weight and moments (24); parameter in 2 bytes
(2); zeros for the gradient and for its fp32 copy (4)."""


class Row(NamedTuple):
    """A published step time of a GPT model, and the configuration of the run."""

    hidden: int
    layers: int
    heads: int
    seq_len: int
    tp: int
    dp: int
    pp: int
    virtual_stages: int
    batch: int
    """Number of sequences in a step, on all ranks together."""
    microbatch: int
    """Number of sequences in a microbatch."""
    recompute: str
    """With "full", backward recomputes whole blocks. With "selective", it recomputes only attention
    without its projections, and the run uses sequence parallelism."""
    seconds: float
    """Published time of a step in seconds."""
    name: str = ""

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * self.pp

    @property
    def label(self) -> str:
        return self.name or (
            f"{self.ranks} GPUs, h {self.hidden}, L {self.layers}, t {self.tp} d {self.dp} "
            f"p {self.pp}, b {self.microbatch}, batch {self.batch}"
        )


def gpt_step(row: Row) -> Step:
    """Return the planner's description of a step of `row` in Megatron-LM: with values of 2 bytes,
    blocking transfers of 1/tp of the activation, and an all_reduce of gradients after backward. The
    ranks are in the order of Megatron-LM: tp is the innermost axis, then dp, then pp."""
    tokens, tp, dp, pp = row.microbatch * row.seq_len, row.tp, row.dp, row.pp
    is_selective = row.recompute == "selective"
    split = Split(tp, sequence_parallel=is_selective)
    block = gpt_block(row.hidden, row.heads, tokens, row.seq_len, split)
    recompute = ("core",) if is_selective else ("block",)
    stages = pp * row.virtual_stages
    layers = layers_of(block, row.layers / stages, recompute)
    head = layers_of(gpt_head(row.hidden, VOCABULARY, tokens, split))
    all_stages = [
        (
            layers,
            layers_of(gpt_receive(row.hidden, tokens, split, stage > 0, stage < stages - 1)),
            *([head] if stage == stages - 1 else []),
        )
        for stage in range(stages)
    ]
    parameters = 12 * row.hidden**2 * row.layers / pp / tp + VOCABULARY * row.hidden / tp
    return Step(
        stages=tuple(all_stages),
        microbatches=row.batch // (dp * row.microbatch),
        groups={
            "tp": [tuple(range(tp))],
            "dp": [tuple(range(0, dp * tp, tp))],
            "pp": [tuple(range(0, row.ranks, dp * tp))],
        },
        schedule="interleaved" if row.virtual_stages > 1 else "1f1b",
        virtual_stages=row.virtual_stages,
        transfer_bytes=2 * tokens * row.hidden / tp,
        transfers_block=True,
        reductions=(Reduction("dp", "all_reduce", 2 * parameters),),
        update=UpdateBytes(OPTIMIZER_BYTES * parameters),
    )


_TABLE_5 = (
    ("22B", 6144, 48, 64, 8, 1, 4, 4, 1, 1.42, 1.10),
    ("175B", 12288, 96, 96, 8, 8, 64, 1, 3, 18.13, 13.75),
    ("530B", 20480, 105, 128, 8, 35, 280, 1, 3, 49.05, 37.83),
    ("1T", 25600, 128, 160, 8, 64, 512, 1, 1, 94.42, 71.49),
)
"""arXiv 2205.05198, tables 3 and 5: name, h, layers, heads, tp, pp, batch, microbatch, virtual
stages, seconds with full recomputation, seconds with sequence parallelism and selective
recomputation."""


def table_5(recompute: str) -> list[Row]:
    """Return the rows of arXiv 2205.05198, Table 5, for the value "full" or "selective" of
    `recompute`."""
    rows = []
    for name, h, layers, heads, tp, pp, batch, micro, v, full, selective in _TABLE_5:
        seconds = full if recompute == "full" else selective
        rows.append(
            Row(h, layers, heads, 2048, tp, 1, pp, v, batch, micro, recompute, seconds, name)
        )
    return rows


_TABLE_1 = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)
"""arXiv 2104.04473, Table 1: billions of parameters, heads, h, layers, tp, pp, GPUs, batch, TFLOP/s
of a GPU. The paper does not give the microbatch sizes."""


def rank_flops(batch: int, seq_len: int, layers: int, hidden: int, ranks: int) -> float:
    """Return the FLOPs of a GPU in a step with full recomputation, by equation 3 of arXiv
    2104.04473."""
    sizes = 1 + seq_len / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    return 96 * batch * seq_len * layers * hidden**2 * sizes / ranks


def table_1() -> list[tuple[list[Row], float]]:
    """Return a pair (configurations that agree with the paper, FLOPs of a GPU in a step) for each
    row of arXiv 2104.04473, Table 1. The FLOPs are computed by equation 3 of the paper. The seconds
    of a step in the configurations are computed as FLOPs / published FLOP/s.

    Section 5.1 says that the table has the interleaved schedule. The paper gives neither the
    microbatch nor the number v of virtual stages. The configurations have all values for which v >=
    2 divides the layers of a pipeline rank, and the number of microbatches is a multiple of p.
    Without a pipeline, v = 1.
    """
    result = []
    for billions, heads, h, layers, tp, pp, gpus, batch, tflops in _TABLE_1:
        s, dp = 2048, gpus // (tp * pp)
        flops = rank_flops(batch, s, layers, h, gpus)
        seconds = flops / (tflops * 1e12)
        of_rank = layers // pp
        virtual_stages = [v for v in range(2, of_rank + 1) if of_rank % v == 0] if pp > 1 else [1]
        rows = [
            Row(h, layers, heads, s, tp, dp, pp, v, batch, b, "full", seconds, f"{billions}B")
            for v in virtual_stages
            for b in (1, 2, 4, 8, 16)
            if batch % (dp * b * pp) == 0
        ]
        result.append((rows, flops))
    return result


def vtrain_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of one of vTrain's CSV files, vtrain_single.csv or vtrain_multi.csv."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        for fields in csv.DictReader(file):
            value = {key: float(text) for key, text in fields.items()}
            yield Row(
                hidden=int(value["hidden size"]),
                layers=int(value["# layers"]),
                heads=int(value["attention heads"]),
                seq_len=int(value["sequence length"]),
                tp=int(value["tensor parallelism"]),
                dp=int(value["data parallelism"]),
                pp=int(value["pipeline parallelism"]),
                virtual_stages=1,
                batch=int(value["global batch"]),
                microbatch=int(value["micro batch"]),
                recompute="full",
                seconds=value["iteration time (ms)"] / 1e3,
            )
