"""The matrix of layouts: which there are, a sample that pairs every two choices, and the promises
that deterministic mode makes for each.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed
from torch import Tensor

from optimus.chunks.engine import ChunkEngine
from optimus.config import ModelConfig
from optimus.distributed.world import World, start_world
from optimus.model.router import Router
from optimus.rank.model import RankModel
from tests.kit.layouts.whole import WholeModel
from tests.kit.runs.tiny import CONTEXT, DENSE, tiny_tree
from tests.kit.runs.training import make_updater, own_batch

STEPS = 5
NEAR_TIE = 1e-6
"""Two probabilities nearer than this may change places under another rounding."""
TOLERANCE = 1e-5

MODELS: dict[str, dict[str, Any]] = {
    "moe": {},
    "moe-tied": {"model__tie_embeddings": True},
    "moe-grouped-bias": {
        "model__num_key_value_heads": 4,
        "model__attention_bias": True,
        "model__norm_topk_prob": True,
    },
    "dense": DENSE | {"model__num_key_value_heads": 4},
    "dense-tied-bias": DENSE | {"model__tie_embeddings": True, "model__attention_bias": True},
}
# Eight of everything that a layout of eight ranks may divide.
WIDE = {
    "model__num_attention_heads": 8,
    "model__num_experts": 8,
    "model__hidden_size": 64,
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
BATCHES = (4, 8)
"""Microbatches of an update over all data ranks: with 4 there are fewer than stages on some."""


class Case(NamedTuple):
    """One layout of one model."""

    pp: int
    dp: int
    ep: int
    tp: int
    schedule: str
    sequence_parallel: bool
    model: str
    dtype: str
    batch: int

    @property
    def size(self) -> int:
        return self.pp * self.dp * self.ep * self.tp

    @property
    def virtual_stages(self) -> int:
        return 2 if self.schedule == "interleaved" and self.pp <= 4 else 1

    @property
    def is_exact(self) -> bool:
        """Whether the bits of one process are promised."""
        return self.ep == self.tp == 1

    def __str__(self) -> str:
        sequence = "-sequence" if self.sequence_parallel else ""
        return (
            f"pp{self.pp}-dp{self.dp}-ep{self.ep}-tp{self.tp}{sequence}-{self.schedule}-"
            f"{self.model}-{self.dtype}-m{self.batch}"
        )

    def tree(self) -> dict[str, Any]:
        """The configuration of the run."""
        return self.one_process() | {
            "parallel": {
                "pp": self.pp,
                "dp": self.dp,
                "ep": self.ep,
                "tp": self.tp,
                "schedule": self.schedule,
                "virtual_stages": self.virtual_stages,
                "sequence_parallel": self.sequence_parallel,
            }
        }

    def one_process(self) -> dict[str, Any]:
        """The same on one process."""
        layers = 8 if self.pp * self.virtual_stages == 8 else 4
        model = WIDE | {"model__num_layers": layers} | MODELS[self.model]
        batch = {"train__global_batch_tokens": self.batch * CONTEXT, "train__dtype": self.dtype}
        return tiny_tree("d", "r", **model, **batch)


def gently(tree: dict[str, Any]) -> dict[str, Any]:
    """The run with an AdamW that makes no whole steps of rounding.

    What a case is held to where a token turned at a gap above NEAR_TIE after an update (`agree`).
    Why: AdamW divides by sqrt(v) + eps, so that where a gradient is near eps = 1e-8 its rounding
    moves a parameter by up to lr. Which layouts that happens to depends on the machine's rounding:
    pp1-dp1-ep1-tp4-1f1b-moe-fp32-m8 on an Intel CPU turned one token at a gap of 2.2e-6, its losses
    then off by 1.2e-5; on an AMD CPU it was two tokens of tp8 at 7.0e-5, off by 2.8e-5, and one of
    ep4 and ep8 at 1.6e-6. Their first gradients are within 1.2e-6, and with eps = 1e-5 and nothing
    else changed the same layouts turn no token and their losses are within 3.1e-7 in all five
    steps: no fault of the layout.
    """
    return tree | {"optim": tree["optim"] | {"eps": 1e-5}}


def all_cases() -> list[Case]:
    """Every legal case: all factorisations of 1, 2, 4 and 8 ranks and every choice beside."""
    shapes = [
        sizes
        for sizes in itertools.product((1, 2, 4, 8), repeat=4)
        if sizes != (1, 1, 1, 1) and sizes[0] * sizes[1] * sizes[2] * sizes[3] <= 8
    ]
    choices = (SCHEDULES, (False, True), MODELS, ("fp32", "bf16"), BATCHES)
    cases = (Case(*sizes, *rest) for sizes in shapes for rest in itertools.product(*choices))
    return [case for case in cases if _is_legal(case)]


def _is_legal(case: Case) -> bool:
    """Neither refused nor a repetition of another case under another name."""
    dense = MODELS[case.model].get("model__num_experts") == 0
    grouped = "model__num_key_value_heads" in MODELS[case.model]
    return not (
        (case.pp == 1 and case.schedule != "1f1b")
        or (case.tp == 1 and case.sequence_parallel)
        or (dense and case.ep > 1)
        or (grouped and case.tp == 8)
        or (case.dtype == "bf16" and not case.is_exact)  # nothing is promised there
        or case.batch % (case.dp * case.ep)
    )


def pairwise(cases: Sequence[Case], seed: int = 0) -> list[Case]:
    """Few cases such that every two choices that stand together in any stand together in one.

    Greedy: the case that adds most new pairs comes next; sizes of the mesh count as one choice too,
    so every factorisation is there.
    """
    order = list(cases)
    random.Random(seed).shuffle(order)
    pairs = {case: set(_pairs(case)) for case in order}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(order, key=lambda case: len(pairs[case] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen, key=lambda case: case[:4])


def _pairs(case: Case) -> Iterator[tuple]:
    fields = [("mesh", case[:4]), *zip(Case._fields[4:], case[4:], strict=True)]
    # Of the mesh and a choice beside, what matters is which axes there are, not how long they are.
    axes = ("axes", tuple(size > 1 for size in case[:4]))
    yield fields[0]
    yield from itertools.combinations([axes, *fields[1:]], 2)


class Outcome(NamedTuple):
    """What a run was, over all ranks."""

    metrics: list[tuple[float, ...]]
    """By step: loss, auxiliary loss, z-loss, gradient norm."""
    initial: dict[str, str]
    """Digests of the whole initial parameters, by name."""
    final: dict[str, str]
    gradients: dict[str, Tensor]
    """Whole, before the first update, unclipped."""
    routes: dict[tuple[int, int, int], tuple[Tensor, Tensor]]
    """By step, layer and number of the step's microbatch: int64 [T, K] experts in ascending order,
    and fp32 [T] the gap between the last chosen probability and the next."""


def run_case(tree: dict[str, Any]) -> Outcome | None:
    """A run of STEPS updates on tokens made from their numbers; the first rank tells of it."""
    return run_in(start_world(device="cpu"), tree)


def run_several(trees: Sequence[dict[str, Any]], poison: Sequence[bool]) -> list[Outcome | None]:
    """The same of several runs on the same ranks, one after the other."""
    world = start_world(device="cpu")
    return [run_in(world, tree, mode) for tree, mode in zip(trees, poison, strict=True)]


def run_in(world: World, tree: dict[str, Any], poison: bool = False) -> Outcome | None:
    """`poison`: what is freed of chunks becomes NaN instead."""
    config, _, groups, plan, shard, states, updater = make_updater(tree, world, poison)
    routes = _Routes(shard, groups.data.rank, groups.data.size)
    whole = WholeModel(config, shard.layout, groups)
    initial = _digests(whole.gather(states, "master"))
    gradients, metrics = _before_clipping(states, whole), []
    for step in range(1, STEPS + 1):
        count = plan.num_microbatches
        own = own_batch(groups, count, step * count, config.train.seq_len)
        routes.step = step
        result = updater.run(step, own)
        metrics.append((result.loss, result.aux_loss, result.z_loss, result.grad_norm))
    final = _digests(whole.gather(states, "master"))
    shared: list[Any] = [{}] * world.size
    mine = routes.found if groups.coordinate.tp == 0 else {}
    if world.size > 1:
        distributed.all_gather_object(shared, mine)
    else:
        shared = [mine]
    found = {place: route for part in shared for place, route in part.items()}
    return Outcome(metrics, initial, final, gradients, found)


def _digests(whole: dict[str, Tensor]) -> dict[str, str]:
    return {
        n: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for n, t in whole.items()
    }


def _before_clipping(states: ChunkEngine, whole: WholeModel) -> dict[str, Tensor]:
    """Will hold the whole gradients as they are when the first norm is about to be taken."""
    gradients: dict[str, Tensor] = {}
    plain, first = states.grad_norm, [True]

    def grad_norm() -> float:
        if first.pop() if first else False:
            gathered = whole.gather(states, "grad")
            gradients.update({name: gradient.clone() for name, gradient in gathered.items()})
        return plain()

    states.grad_norm = grad_norm
    return gradients


class _Routes:
    """Listens to the routers."""

    def __init__(self, shard: RankModel, data_rank: int, num_data_ranks: int) -> None:
        self.found: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.step = 0
        self._place = (data_rank, num_data_ranks)
        for name, module in shard.model.named_modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._listen(int(name.split(".")[1])))

    def _listen(self, layer: int) -> Callable:
        data_rank, num_data_ranks = self._place
        calls = Counter()

        def hook(router: Router, inputs: tuple[Tensor], output: tuple) -> None:
            logits = torch.nn.functional.linear(inputs[0].detach(), router.weight.detach())
            probs = logits.softmax(-1, dtype=torch.float32).sort(-1, descending=True).values
            gap = probs[:, router.top_k - 1] - probs[:, router.top_k]
            number = calls[self.step] * num_data_ranks + data_rank
            calls[self.step] += 1
            self.found[self.step, layer, number] = (output[1].sort(-1).values, gap)

        return hook


class Agreement(NamedTuple):
    """How near a run came to that of one process."""

    broken: list[str]
    """Promises that do not hold, in words; empty if all do."""
    gradient_error: float
    """The largest relative norm of a difference over parameters."""
    loss_error: float
    """Of the cross-entropy and of the whole objective, over all steps: absolute, in nats."""
    aux_error: float
    """Of auxiliary losses, their coefficients not applied. Told, not promised: AdamW makes
    whole steps of rounding where a gradient is near its eps, and z feels them most (with eps 1e-5
    the same runs agree to 2e-7)."""
    near_ties: int
    """Tokens whose choice hangs on less than NEAR_TIE, over steps, layers and microbatches."""
    turned: int
    """Tokens that went elsewhere, at any step: only near-ties may."""
    widest: float
    """The largest gap of a token that turned."""
    only_later: bool
    """Whether something is broken, and tokens that were no near-ties turned, behind an update
    alone, from gradients that hold, and none of them by more than `reach_of_adamw`."""
    by_adamw: tuple[str, ...] = ()
    """What was broken with the usual eps, where the run holds `gently`."""


def agree(
    case: Case, run: Callable[[int, dict], Outcome], alone: Callable[[dict], Outcome]
) -> Agreement:
    """A case by the promise of deterministic mode: `run` on its ranks against one process, `alone`.
    Where tokens turn behind an update alone, `gently` tells AdamW from the layout."""
    agreement = compare(case, run(case.size, case.tree()), alone(case.one_process()))
    if case.is_exact or not agreement.only_later:
        return agreement
    tree, one = gently(case.tree()), gently(case.one_process())
    again = compare(case, run(case.size, tree), alone(one))
    if again.broken:
        still = [f"with optim.eps = 1e-5: {words}" for words in again.broken]
        return agreement._replace(broken=agreement.broken + still)
    return again._replace(by_adamw=tuple(agreement.broken))


def reach_of_adamw(case: Case) -> float:
    """The widest gap over which a whole step of AdamW made of rounding may turn a token: one weight
    of a router moves by lr, its input is 1 as the norm before it makes it, and a probability near
    1 / num_experts follows its logit by that factor. 3.8e-4 here; the widest seen is 7.0e-5, while
    one token in thirty has a gap below it."""
    tree = case.one_process()
    return tree["optim"]["lr"] / tree["model"]["num_experts"]


def compare(case: Case, many: Outcome, one: Outcome) -> Agreement:
    """Hold a run against that of one process, by what is promised for its layout.

    Where bits are promised, bits are compared. Over tp and ep the bound of 1e-5 is held
    strictly: for gradients it is a relative norm, by parameter, and for losses (each step's
    cross-entropy and objective) it is in nats. Losses begin at ln(VOCAB) = 5.8, where neighbours in
    fp32 lie 4.8e-7 apart, so the bar is 21 such steps, or 1.7e-6 of the loss. What is not finite
    on either side is an infinite error.
    """
    broken = []
    if many.initial != one.initial:
        broken.append("the initial parameters differ")
    if set(many.gradients) != set(one.gradients):
        broken.append("the gradients are those of other parameters")
        return Agreement(broken, math.nan, math.nan, math.nan, 0, 0, 0.0, False)
    gradient_error, worst = max(
        (_relative_error(many.gradients[n], g), n) for n, g in one.gradients.items()
    )
    routes = _compare_routes(many, one)
    steps = list(zip(many.metrics, one.metrics, strict=True))
    loss_error = max(_error(m[0], o[0]) for m, o in steps)
    loss_error = max(loss_error, *(_error(_objective(m), _objective(o)) for m, o in steps))
    aux_error = max(_error(a, b) for m, o in steps for a, b in zip(m[1:3], o[1:3], strict=True))
    astray = [gap for _, gap in routes.turned if gap >= NEAR_TIE]
    early = [gap for step, gap in routes.turned if gap >= NEAR_TIE and step == 1]
    only_later = bool(astray) and not broken and not early and gradient_error < TOLERANCE
    only_later = only_later and max(astray) <= reach_of_adamw(case)
    if astray:
        broken.append(
            f"{len(astray)} tokens went elsewhere, their choice clear by {max(astray):.1e}"
        )
    widest = max((gap for _, gap in routes.turned), default=0.0)
    agreement = Agreement(
        broken,
        gradient_error,
        loss_error,
        aux_error,
        routes.near_ties,
        len(routes.turned),
        widest,
        only_later,
    )
    if case.is_exact:
        if many.metrics != one.metrics or not math.isfinite(loss_error):
            broken.append(f"losses or norms are not the same bits (losses off by {loss_error:.1e})")
        differing = [name for name in one.final if many.final.get(name) != one.final[name]]
        if differing:
            broken.append(f"parameters are not the same bits: {', '.join(differing[:3])}")
        if gradient_error > 0:
            broken.append(f"the gradient of {worst} is not the same bits ({gradient_error:.1e})")
        return agreement
    if not gradient_error < TOLERANCE:
        broken.append(f"the gradient of {worst} is off by {gradient_error:.1e}")
    if not loss_error < TOLERANCE:
        broken.append(f"losses are off by {loss_error:.1e}")
    return agreement


def _relative_error(many: Tensor, one: Tensor) -> float:
    if torch.equal(many, one):  # where both are 0, too
        return _error(float(one.norm()), float(one.norm()))
    return _error(float((many - one).norm() / one.norm()), 0.0)


def _error(many: float, one: float) -> float:
    """A NaN would be lost in `max`, which asks whether it is larger."""
    error = abs(many - one)
    return error if math.isfinite(error) else math.inf


def _objective(metrics: tuple[float, ...]) -> float:
    aux_coef, z_coef = (
        ModelConfig.model_fields[key].default for key in ("aux_loss_coef", "z_loss_coef")
    )
    return metrics[0] + aux_coef * metrics[1] + z_coef * metrics[2]


class _Compared(NamedTuple):
    near_ties: int
    turned: list[tuple[int, float]]
    """Step and gap of each token that went elsewhere."""


def _compare_routes(many: Outcome, one: Outcome) -> _Compared:
    assert many.routes.keys() == one.routes.keys(), "routers were asked about other microbatches"
    near_ties, turned = 0, []
    for place, (chosen, gap) in one.routes.items():
        near_ties += int((gap < NEAR_TIE).sum())
        moved = (many.routes[place][0] != chosen).any(-1)
        turned += [(place[0], width) for width in gap[moved].tolist()]
    return _Compared(near_ties, turned)
