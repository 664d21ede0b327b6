"""Measure the speed-up of training with our MoE experts over the experts of other libraries.

    python scripts/bench/moe_step.py --model configs/model/mula-7b-a1b.toml --layers 1

Our experts and the experts of each other library (peer) run in turn in the same model. A pass is
forward, loss and backward of one microbatch. The script also predicts the speed-up of a pass. The
prediction is computed from the times of single MoE blocks with our experts and with the experts of
the peer.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import torch
from moe_peers import PEERS
from torch import Tensor, nn

from optimus import platform
from optimus.bench.meters import clear_gradients, clocked
from optimus.config import ModelConfig, make_config
from optimus.errors import counted
from optimus.model.flops import flops_per_token
from optimus.model.init import initialise_
from optimus.model.moe import FastSparseMoE
from optimus.model.transformer import Transformer

_CLOCKS = ("wall", "cpu")


class PeerExperts(nn.Module):
    """Wrapper of the experts of another library. Its `forward` has the same arguments as the
    `forward` of our experts."""

    def __init__(self, peer: nn.Module) -> None:
        super().__init__()
        self.peer = peer

    def forward(
        self, x: Tensor, weights: Tensor, chosen: Tensor, save_input_only: bool = False
    ) -> Tensor:
        return self.peer(x, weights, chosen)


class Contest:
    """Transformer whose MoE layers can use our experts or, with the same weights, the experts of
    another library."""

    def __init__(
        self, config: ModelConfig, names: list[str], device: torch.device, dtype: torch.dtype
    ) -> None:
        with device:
            self.model = Transformer(config)
        initialise_(self.model, 0)
        self.model.to(dtype)
        self.config, self.absent = config, {}
        self._layers = [m for m in self.model.modules() if isinstance(m, FastSparseMoE)]
        self._experts: dict[str, list[Any]] = {"ours": [layer.experts for layer in self._layers]}
        top_k = config.num_experts_per_tok
        for name in names:
            try:
                self._experts[name] = [
                    PeerExperts(PEERS[name](experts.gate_up, experts.down, top_k))
                    for experts in self._experts["ours"]
                ]
            except common.Absent as reason:
                self.absent[name] = str(reason)

    @property
    def names(self) -> list[str]:
        return list(self._experts)

    def use(self, name: str) -> None:
        for layer, experts in zip(self._layers, self._experts[name], strict=True):
            layer.experts = experts

    def loss(self, tokens: Tensor) -> Tensor:
        terms = self.model.losses(tokens)
        return terms.ce_sum / terms.num_targets + self.config.aux_loss_coef * terms.aux

    def block(self, x: Tensor) -> Tensor:
        """Run only the first MoE block, and return its output."""
        return self._layers[0](x)[0]


def measure(contest: Contest, batch: tuple[int, int], rounds: int) -> dict[str, dict[str, list]]:
    """In each round, measure the time of a pass of the whole model and of a pass of a single MoE
    block, with the experts of each library in turn.

    Returns:
        A dict `times`. `times[name][span]` is a list of pairs (wall-clock seconds, CPU seconds),
        one for each round. `name` is a library, and `span` is "pass" or "block".
    """
    config, device = contest.config, next(contest.model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    dtype = next(contest.model.parameters()).dtype
    x = torch.randn(*batch, config.hidden_size, device=device).to(dtype).requires_grad_()
    times: dict[str, dict[str, list]] = {name: {"pass": [], "block": []} for name in contest.names}
    unit_grad = torch.ones((), device=device)
    losses: dict[str, float] = {}
    for number in range(rounds + 1):
        # Each timed pass has new tokens and follows an untimed pass with other tokens. The reason
        # is oneDNN's cache of compiled products; see moe.py.
        before, tokens = (
            torch.randint(config.vocab_size, batch, generator=generator).to(device)
            for _ in range(2)
        )
        turn = number % len(times)
        for name in (*contest.names[turn:], *contest.names[:turn]):
            contest.use(name)
            if not number:  # the first round warms up
                losses[name] = float(contest.loss(tokens).detach())
            contest.loss(before).backward()
            clear_gradients(contest.model, x)
            _, whole = clocked(functools.partial(contest.loss, tokens), device, unit_grad)
            _, block = clocked(functools.partial(contest.block, x), device, torch.ones_like(x))
            clear_gradients(contest.model, x)
            if number:
                times[name]["pass"].append(whole)
                times[name]["block"].append(block)
    spread = max(losses.values()) - min(losses.values())
    assert spread < 1e-2 * abs(losses["ours"]), f"blocks disagree on the loss: {losses}"
    return times


def summary(
    contest: Contest, times: dict[str, dict[str, list]], clock: int, seq_len: int
) -> dict[str, Any]:
    """Return a dict for JSON. The key `blocks` maps each library to its median times, and to two
    values of the speed-up of a pass by our experts: (time with the library's experts) / (time with
    our experts). The value `speed_up` is measured. The value `predicted` is computed from the
    median times of a pass and of a single MoE block."""
    config = contest.config
    slots = config.num_experts_per_tok * 3 * config.hidden_size * config.intermediate_size
    share = config.num_layers * 6.0 * slots / flops_per_token(config, seq_len)
    middle = {
        name: {
            span: statistics.median(seconds[clock] for seconds in rounds)
            for span, rounds in spans.items()
        }
        for name, spans in times.items()
    }
    ours, rows = middle["ours"], {}
    for name, spans in middle.items():
        pairs = zip(times[name]["pass"], times["ours"]["pass"], strict=True)
        ratios = sorted(theirs[clock] / mine[clock] for theirs, mine in pairs)
        saved = config.num_layers * (spans["block"] - ours["block"])
        rows[name] = {
            "pass_s": spans["pass"],
            "block_s": spans["block"],
            "block_ratio": spans["block"] / ours["block"],
            "speed_up": statistics.median(ratios),
            "speed_up_range": [ratios[0], ratios[-1]],
            "predicted": spans["pass"] / (spans["pass"] - saved),
        }
    return {"clock": _CLOCKS[clock], "flop_share_of_experts": share, "blocks": rows}


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['model']}, {counted(result['layers'], 'layer')}, {result['dtype']}, "
        f"{result['batch'][0]} x {result['batch'][1]} tokens, {result['device']}, "
        f"{counted(result['threads'], 'thread')}, {result['clock']} clock, "
        f"{', '.join(f'{k} {v}' for k, v in result['versions'].items())}, {result['date']}; "
        f"experts are {result['flop_share_of_experts']:.0%} of the FLOPs",
        "",
        "| experts | pass s | block s | block: ours is faster | pass: ours is faster | predicted |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in result["blocks"].items():
        low, high = row["speed_up_range"]
        lines.append(
            f"| {name} | {row['pass_s']:.4f} | {row['block_s']:.4f} | {row['block_ratio']:.2f} "
            f"| {row['speed_up']:.2f} ({low:.2f} to {high:.2f}) | {row['predicted']:.2f} |"
        )
    lines += [f"\n{name}: {reason}" for name, reason in result["absent"].items()]
    return "\n".join(lines)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="configs/model/demo.toml")
    parser.add_argument("--layers", type=int, default=0, help="number of layers; 0: all layers")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--dtype", default="bf16", choices=("fp32", "bf16"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="number of threads on a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default="hf-grouped,loop,three-grouped,liger,scattermoe")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = make_parser().parse_args(argv)
    device = platform.pick_device(0, args.device)
    if device.type == "cpu":
        torch.set_num_threads(args.threads)
    tree = tomllib.loads(Path(args.model).read_text())
    tree["model"]["num_layers"] = args.layers or tree["model"]["num_layers"]
    config = make_config(tree).model
    contest = Contest(config, args.peers.split(","), device, platform.dtype_of(args.dtype))
    batch = (args.batch, args.seq_len)
    times = measure(contest, batch, args.rounds)
    clock = int(device.type == "cpu" and args.threads == 1)
    result = {
        "model": Path(args.model).stem,
        "layers": config.num_layers,
        "dtype": args.dtype,
        "batch": batch,
        "device": platform.device_name(device),
        "threads": args.threads,
        "versions": common.versions(),
        "date": time.strftime("%Y-%m-%d"),
        "absent": contest.absent,
        **summary(contest, times, clock, args.seq_len),
    }
    print(json.dumps(result) if args.json else table(result))


if __name__ == "__main__":
    sys.exit(common.run_script(main))
