"""What hiding expert parallelism's communication would gain: one MoE layer, forward and backward of
two microbatches, in three ways that take turns.

`serial`: as Optimus does. `early`: the all-gather of x is under way while the router computes, and
the reduce-scatter of its gradient while the router's backward does. `threads`: the two microbatches
in two threads with process groups of their own, so that one communicates while the other computes.

    python scripts/bench/expert_overlap.py --ranks 2 --tokens 2048 --rounds 9
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time

import torch
import torch.distributed as distributed
import torch.multiprocessing as multiprocessing
from torch import Tensor

from optimus.config import ModelConfig
from optimus.dist.collectives import Group, group_of
from optimus.model.moe import FastSparseMoE
from optimus.parallel.exchange import gather_then_scatter_sum, scatter_sum_then_gather
from optimus.parallel.expert import wire_expert_parallel

WAYS = ("serial", "early", "threads")


class _Begin(torch.autograd.Function):
    """Begins to gather x; its backward waits for the gradient that `_End`'s began to scatter."""

    @staticmethod
    def forward(ctx, x: Tensor, group: Group, under_way: dict) -> Tensor:
        ctx.under_way = under_way
        out = x.new_empty(group.size * len(x), x.shape[1])
        work = distributed.all_gather_into_tensor(out, x, group.handle(), async_op=True)
        under_way["gather"] = work
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.under_way.pop("scatter").wait()
        return ctx.under_way.pop("own"), None, None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx, every: Tensor, group: Group, under_way: dict) -> Tensor:
        ctx.group, ctx.under_way = group, under_way
        under_way.pop("gather").wait()
        return every.view_as(every)

    @staticmethod
    def backward(ctx, grad: Tensor):
        own = grad.new_empty(len(grad) // ctx.group.size, grad.shape[1])
        ctx.under_way["own"], ctx.under_way["scatter"] = (
            own,
            distributed.reduce_scatter_tensor(
                own, grad.contiguous(), group=ctx.group.handle(), async_op=True
            ),
        )
        return grad, None, None


def early(moe: FastSparseMoE, compute, group: Group, x: Tensor) -> Tensor:
    """The layer with x on its way while the router computes."""
    under_way: dict = {}
    every_x = _Begin.apply(x, group, under_way)
    weights, chosen, _ = moe.router(x)
    every_weight = gather_then_scatter_sum(weights, group)
    with torch.no_grad():
        every_choice = gather_then_scatter_sum(chosen, group)
    every_x = _End.apply(every_x, group, under_way)
    return scatter_sum_then_gather(compute(every_x, every_weight, every_choice), group)


def make_layer(options: argparse.Namespace, group: Group) -> tuple[FastSparseMoE, object]:
    """This rank's part of the layer, wired, and its experts' own forward."""
    config = ModelConfig(
        architecture="olmoe",
        num_layers=1,
        hidden_size=options.hidden,
        num_attention_heads=1,
        intermediate_size=options.inner,
        num_experts=options.experts,
        num_experts_per_tok=options.top_k,
        vocab_size=2,
    )
    moe = FastSparseMoE(config)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    held = options.experts // group.size
    for parameter in moe.experts.parameters():
        parameter.data = parameter.data[:held].clone()
    moe.experts.first_expert = group.rank * held
    compute = moe.experts.forward
    wire_expert_parallel(moe, group, options.dispatch)
    return moe, compute


def work(rank: int, options: argparse.Namespace, file: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=options.ranks
    )
    groups = [group_of(distributed.new_group(list(range(options.ranks)))) for _ in range(2)]
    torch.manual_seed(0)
    layers = [make_layer(options, group) for group in groups]
    torch.manual_seed(rank)
    xs = [torch.randn(options.tokens, options.hidden, requires_grad=True) for _ in range(2)]

    def one(number: int, way: str) -> None:
        (moe, compute), x = layers[number], xs[number]
        out = early(moe, compute, groups[number], x) if way == "early" else moe(x)[0]
        out.backward(torch.ones_like(out))

    def both(way: str) -> None:
        if way != "threads":
            one(0, way)
            one(1, way)
            return
        threads = [threading.Thread(target=one, args=(number, way)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.rounds + 1):
        for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
            distributed.barrier()
            start = time.perf_counter()
            both(way)
            distributed.barrier()
            if turn:
                taken[way].append(time.perf_counter() - start)
    if rank == 0:
        print(f"serial {statistics.median(taken['serial']) * 1e3:.1f} ms, median of rounds")
        for way in WAYS[1:]:
            ratios = sorted(s / w for s, w in zip(taken["serial"], taken[way], strict=True))
            print(
                f"serial / {way}: {statistics.median(ratios):.3f} "
                f"({ratios[0]:.3f} to {ratios[-1]:.3f})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--inner", type=int, default=128)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--dispatch", choices=("allgather", "alltoall"), default="allgather")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile() as file:
        multiprocessing.spawn(work, (options, file.name + ".store"), options.ranks)


if __name__ == "__main__":
    main()
