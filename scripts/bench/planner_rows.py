"""Published step times, and the planned step of each row, for scripts/bench/planner.py."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gpt_operations import Split, gpt_block, gpt_head, gpt_receive, gradient_sums, layers_of

from optimus.planner.machine_rates import UpdateBytes
from optimus.planner.step_time import Overlap, Reduction, Step

VOCABULARY = 51200
"""Padded vocabulary of the GPT models in Megatron-LM."""
FUSED_BYTES = 50
"""Bytes that a rank moves for each parameter outside of forward and backward, with fused sums of
gradients (github.com/NVIDIA/Megatron-LM at cfd2e216, bf16): zeros for the fp32 sum (4), division of
the sum by the number of data ranks (8), norm (4), Adam on fp32 values (28), copy to the parameter
(6). The scaling of gradients whose norm is above the limit (8) is not included, because the sources
do not give the norms."""
SEPARATE_BYTES = 64
"""Bytes that a rank moves for each parameter outside of forward and backward, without fused sums of
gradients (github.com/NVIDIA/Megatron-LM at de7dc40f, fp16): copy of gradients to a buffer, division
in the buffer, and copy back (12), conversion to fp32 (6), division by the loss scale (8), norm (4),
Adam on fp32 values (28), copy to the parameter (6). At cfd2e216, there are 58 bytes and 6 more for
the first microbatch, together the same number."""
TORCH_DDP_BYTES = 60
"""SEPARATE_BYTES with torch's DistributedDataParallel, which divides gradients while it copies them
to the buffer."""
TENSORS = 12
"""Number of parameter tensors in a block: weights and biases of two norms and four layers."""


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
    fused_sums: bool = False
    """True: the products for the gradients of weights add to fp32 sums over microbatches
    (Megatron-LM since February 2022, with bf16). False: separate passes add to sums in fp16."""
    torch_ddp: bool = False
    """True: torch's DistributedDataParallel reduces gradients during the backward of the last
    microbatch. False: Megatron-LM's DistributedDataParallel reduces them after all backward
    passes."""

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
    """Return the planner's description of a step of `row` in Megatron-LM. Values have 2 bytes,
    except fused sums of gradients, which have 4 bytes. A transfer sends 1/tp of the activation and
    is blocking. An all_reduce sums the gradients over data ranks. The first and the last stage also
    sum the gradients of the embedding that they share. The ranks are in the order of Megatron-LM:
    tp is the innermost axis, then dp, then pp."""
    tokens, tp, dp, pp = row.microbatch * row.seq_len, row.tp, row.dp, row.pp
    is_selective = row.recompute == "selective"
    split = Split(tp, sequence_parallel=is_selective)
    block = gpt_block(row.hidden, row.heads, tokens, row.seq_len, split)
    microbatches = row.batch // (dp * row.microbatch)
    of_block, of_embedding = 12 * row.hidden**2 / tp, VOCABULARY * row.hidden / tp
    head = gpt_head(row.hidden, VOCABULARY, tokens, split)
    if not row.fused_sums:
        block += gradient_sums(of_block, TENSORS, microbatches)
        head += gradient_sums(of_embedding, 1, microbatches)
    recompute = ("core",) if is_selective else ("block",)
    stages = pp * row.virtual_stages
    layers = layers_of(block, row.layers / stages, recompute)
    all_stages = [
        (
            layers,
            layers_of(gpt_receive(row.hidden, tokens, split, stage > 0, stage < stages - 1)),
            *([layers_of(head)] if stage == stages - 1 else []),
        )
        for stage in range(stages)
    ]
    parameters = of_block * row.layers / pp + of_embedding
    gradient = 4 if row.fused_sums else 2
    separate = TORCH_DDP_BYTES if row.torch_ddp else SEPARATE_BYTES
    of_parameter = FUSED_BYTES if row.fused_sums else separate
    overlaps: Overlap = "backward" if row.torch_ddp else "nothing"
    # The gradient of the embedding is complete only at the end of backward.
    reductions = [
        Reduction("dp", "all_reduce", gradient * (parameters - of_embedding), overlaps),
        Reduction("dp", "all_reduce", gradient * of_embedding),
    ]
    groups = {
        "tp": [tuple(range(tp))],
        "dp": [tuple(range(0, dp * tp, tp))],
        "pp": [tuple(range(0, row.ranks, dp * tp))],
    }
    if pp > 1:
        groups["embedding"] = [(0, row.ranks - dp * tp)]
        reductions.append(Reduction("embedding", "all_reduce", gradient * of_embedding))
    return Step(
        stages=tuple(all_stages),
        microbatches=microbatches,
        groups=groups,
        schedule="interleaved" if row.virtual_stages > 1 else "1f1b",
        virtual_stages=row.virtual_stages,
        transfer_bytes=2 * tokens * row.hidden / tp,
        transfers_block=True,
        reductions=tuple(reductions),
        update=UpdateBytes(of_parameter * parameters),
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


def table_5(recompute: str, fused_sums: bool = True) -> list[Row]:
    """Return the rows of arXiv 2205.05198, Table 5, for the value "full" or "selective" of
    `recompute`. The paper does not say if the sums of gradients were fused with the products for
    the gradients (`fused_sums`)."""
    rows = []
    for name, h, layers, heads, tp, pp, batch, micro, v, full, selective in _TABLE_5:
        seconds = full if recompute == "full" else selective
        sizes = h, layers, heads, 2048, tp, 1, pp, v, batch, micro
        rows.append(Row(*sizes, recompute, seconds, name, fused_sums))
    return rows


_TABLE_1 = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
)
"""arXiv 2104.04473, Table 1: billions of parameters, heads, h, layers, tp, pp, GPUs, batch,
microbatch, virtual stages, TFLOP/s of a GPU. The microbatches and the numbers of virtual stages are
not in the paper, but in the authors' script for this table (github.com/NVIDIA/Megatron-LM
examples/sc21/run_table_1.sh at de7dc40f)."""


def rank_flops(batch: int, seq_len: int, layers: int, hidden: int, ranks: int) -> float:
    """Return the FLOPs of a GPU in a step with full recomputation, by equation 3 of arXiv
    2104.04473."""
    sizes = 1 + seq_len / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
    return 96 * batch * seq_len * layers * hidden**2 * sizes / ranks


def table_1() -> list[tuple[Row, float]]:
    """Return a pair (configuration, FLOPs of a GPU in a step) for each row of arXiv 2104.04473,
    Table 1. The FLOPs are computed by equation 3 of the paper, and the seconds of the step as FLOPs
    / published FLOP/s. By the authors' script, runs without a pipeline use torch's
    DistributedDataParallel, and all runs use fp16."""
    result = []
    for billions, heads, h, layers, tp, pp, gpus, batch, micro, v, tflops in _TABLE_1:
        s, dp = 2048, gpus // (tp * pp)
        flops = rank_flops(batch, s, layers, h, gpus)
        seconds, name = flops / (tflops * 1e12), f"{billions}B"
        row = Row(h, layers, heads, s, tp, dp, pp, v, batch, micro, "full", seconds, name)
        result.append((row._replace(torch_ddp=pp == 1), flops))
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
