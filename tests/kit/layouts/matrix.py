"""Matrix of layouts: all legal layouts, and a sample that contains all pairs of choices.

`check_case` compares the run of a layout with a run on one process, and checks the promises of
deterministic mode.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

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
from tests.kit.runs.training import local_batch, make_updater

STEPS = 5
NEAR_TIE = 1e-6
"""If two router probabilities differ by less than this gap, rounding can exchange their order."""
TOLERANCE = 1e-5
"""Largest accepted error of a gradient (relative norm) and of a loss (nats) in a layout for which
equal bits are not promised."""

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
# The sizes are multiples of eight, so that eight ranks can divide them.
WIDE = {
    "model__num_attention_heads": 8,
    "model__num_experts": 8,
    "model__hidden_size": 64,
}
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1")
BATCHES = (4, 8)
"""Numbers of microbatches of an update, over all data ranks. With 4, some layouts have fewer
microbatches than stages."""


class Case(NamedTuple):
    """A model, a batch and a parallel layout."""

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
        """True if the run must have the same bits as a run on one process."""
        return self.ep == self.tp == 1

    def __str__(self) -> str:
        sequence = "-sequence" if self.sequence_parallel else ""
        return (
            f"pp{self.pp}-dp{self.dp}-ep{self.ep}-tp{self.tp}{sequence}-{self.schedule}-"
            f"{self.model}-{self.dtype}-m{self.batch}"
        )

    def tree(self) -> dict[str, Any]:
        """Return the configuration of the run."""
        return self.single_process_tree() | {
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

    def single_process_tree(self) -> dict[str, Any]:
        """Return the configuration of the same run on one process."""
        stages = self.pp * self.virtual_stages
        layers = 2 if stages == 1 else max(4, stages)
        model = WIDE | {"model__num_layers": layers} | MODELS[self.model]
        batch = {"train__global_batch_tokens": self.batch * CONTEXT, "train__dtype": self.dtype}
        return tiny_tree("d", "r", **model, **batch)


def with_large_eps(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with an eps of AdamW that does not enlarge rounding errors.

    After an update, a token can get other experts than in the run on one process, even if the gap
    between the router probabilities is NEAR_TIE or more. `check_case` then uses this configuration.
    A possible cause is AdamW, which divides by sqrt(v) + eps: if a gradient is near eps = 1e-8, the
    rounding error of the gradient moves a parameter by up to lr.

    The affected layouts depend on the machine. With models of 4 layers on an Intel CPU,
    pp1-dp1-ep1-tp4-1f1b-moe-fp32-m8 rerouted one token at a gap of 2.2e-6, with a loss error of
    1.2e-5. On an AMD CPU, tp8 rerouted two tokens at a gap of 7.0e-5, with a loss error of 2.8e-5,
    and ep4 and ep8 rerouted one token at a gap of 1.6e-6. The errors of all first gradients were
    below 1.2e-6. With eps = 1e-5, the same layouts reroute no token, and the errors of their losses
    are below 3.1e-7 in all five steps: the layouts are correct.
    """
    return tree | {"optim": tree["optim"] | {"eps": 1e-5}}


def all_cases() -> list[Case]:
    """Return all legal cases: all factorisations of 2, 4 and 8 ranks into pp, dp, ep and tp, each
    with all combinations of the other choices."""
    shapes = [
        sizes
        for sizes in itertools.product((1, 2, 4, 8), repeat=4)
        if sizes != (1, 1, 1, 1) and sizes[0] * sizes[1] * sizes[2] * sizes[3] <= 8
    ]
    choices = (SCHEDULES, (False, True), MODELS, ("fp32", "bf16"), BATCHES)
    cases = (
        Case(pp, dp, ep, tp, *rest)
        for pp, dp, ep, tp in shapes
        for rest in itertools.product(*choices)
    )
    return [case for case in cases if _is_legal(case)]


def _is_legal(case: Case) -> bool:
    """Return True if Optimus accepts the case, Optimus makes a promise for the case, and no simpler
    case is equivalent."""
    dense = MODELS[case.model].get("model__num_experts") == 0
    grouped = "model__num_key_value_heads" in MODELS[case.model]
    return not (
        (case.pp == 1 and case.schedule != "1f1b")
        or (case.tp == 1 and case.sequence_parallel)
        or (dense and case.ep > 1)
        or (grouped and case.tp == 8)
        or (case.dtype == "bf16" and not case.is_exact)  # nothing is promised
        or case.batch % (case.dp * case.ep)
    )


def pairwise(cases: Sequence[Case], seed: int = 0) -> list[Case]:
    """Return a small sample that contains each pair of choices that occurs in a case.

    The sample is built greedily: each added case contains the largest number of pairs that the
    sample lacks. The mesh counts as one choice, so the sample contains all factorisations.
    """
    order = list(cases)
    random.Random(seed).shuffle(order)
    pairs = {case: set(_pairs(case)) for case in order}
    missing = set().union(*pairs.values())
    sample = []
    while missing:
        best = max(order, key=lambda case: len(pairs[case] & missing))
        sample.append(best)
        missing -= pairs[best]
    return sorted(sample, key=lambda case: case[:4])


def _pairs(case: Case) -> Iterator[tuple[Any, ...]]:
    fields = [("mesh", case[:4]), *zip(Case._fields[4:], case[4:], strict=True)]
    # In pairs with other choices, the mesh is represented by the names of its axes with a size
    # above 1.
    axes = ("axes", tuple(size > 1 for size in case[:4]))
    yield fields[0]
    yield from itertools.combinations([axes, *fields[1:]], 2)


class Outcome(NamedTuple):
    """Results of a run over all ranks."""

    metrics: list[tuple[float, ...]]
    """For each step: (loss, auxiliary loss, z-loss, gradient norm)."""
    initial: dict[str, str]
    """SHA-256 of each whole initial parameter."""
    final: dict[str, str]
    """SHA-256 of each whole final parameter."""
    gradients: dict[str, Tensor]
    """Whole gradients of the first update before clipping; {} on ranks other than the first."""
    routes: dict[tuple[int, int, int], tuple[Tensor, Tensor]]
    """Routes of all tokens. Keys: (step, layer, number of the microbatch in the step). Values: the
    chosen experts, int64 [T, K] in ascending order, and the gap, fp32 [T], between the lowest
    probability of a chosen expert and the highest probability of the other experts."""


def run_case(tree: dict[str, Any], steps: int = STEPS) -> Outcome:
    """Run updates on this rank, on batches made by `make_microbatch`. Return the results."""
    return _run(start_world(device="cpu"), tree, False, steps)


def run_several(
    trees: Sequence[dict[str, Any]], poison: Sequence[bool], steps: int = STEPS
) -> list[Outcome]:
    """Run several configurations on the same ranks, one after the other.

    Args:
        trees: The configurations.
        poison: For each configuration, True to fill freed chunks with NaN.
        steps: Number of updates of each run.
    """
    world = start_world(device="cpu")
    return [_run(world, tree, mode, steps) for tree, mode in zip(trees, poison, strict=True)]


def _run(world: World, tree: dict[str, Any], poison: bool, steps: int) -> Outcome:
    config, _, groups, plan, model, states, updater = make_updater(tree, world, poison)
    recorder = _RouteRecorder(model, groups.data.rank, groups.data.size)
    whole = WholeModel(config, model.layout, groups)
    initial = _digests(whole.gather(states, "master"))
    gradients = _record_first_gradients(states, whole)
    metrics: list[tuple[float, ...]] = []
    for step in range(1, steps + 1):
        count = plan.num_microbatches
        batch = local_batch(groups, count, step * count, config.train.seq_len)
        recorder.step = step
        result = updater.run(step, batch)
        metrics.append((result.loss, result.aux_loss, result.z_loss, result.grad_norm))
    final = _digests(whole.gather(states, "master"))
    states.close()
    local_routes = recorder.routes if groups.coordinate.tp == 0 else {}
    routes_of_ranks: list[Any] = [local_routes] * world.size
    if world.size > 1:
        distributed.all_gather_object(routes_of_ranks, local_routes)
    merged = {key: route for routes in routes_of_ranks for key, route in routes.items()}
    return Outcome(metrics, initial, final, gradients, merged)


def _digests(whole: dict[str, Tensor]) -> dict[str, str]:
    return {
        n: hashlib.sha256(t.contiguous().numpy().tobytes()).hexdigest() for n, t in whole.items()
    }


def _record_first_gradients(states: ChunkEngine, whole: WholeModel) -> dict[str, Tensor]:
    """Return an empty dictionary, which the first computation of the gradient norm fills with the
    whole gradients."""
    gradients: dict[str, Tensor] = {}
    grad_norm = states.grad_norm

    def record_and_norm() -> float:
        patch.stop()
        gathered = whole.gather(states, "grad")
        gradients.update({name: gradient.clone() for name, gradient in gathered.items()})
        return grad_norm()

    patch = mock.patch.object(states, "grad_norm", record_and_norm)
    patch.start()
    return gradients


class _RouteRecorder:
    """Records the choices of all routers of this rank."""

    def __init__(self, model: RankModel, data_rank: int, num_data_ranks: int) -> None:
        self.routes: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}
        self.step = 0
        self._data_rank, self._num_data_ranks = data_rank, num_data_ranks
        for name, module in model.model.named_modules():
            if isinstance(module, Router):
                module.register_forward_hook(self._hook(int(name.split(".")[1])))

    def _hook(self, layer: int) -> Callable[[Router, tuple[Tensor], tuple[Tensor, ...]], None]:
        calls: Counter[int] = Counter()

        def hook(router: Router, inputs: tuple[Tensor], output: tuple[Tensor, ...]) -> None:
            logits = torch.nn.functional.linear(inputs[0].detach(), router.weight.detach())
            probs = logits.softmax(-1, dtype=torch.float32).sort(-1, descending=True).values
            gap = probs[:, router.top_k - 1] - probs[:, router.top_k]
            number = calls[self.step] * self._num_data_ranks + self._data_rank
            calls[self.step] += 1
            self.routes[self.step, layer, number] = (output[1].sort(-1).values, gap)

        return hook


class Agreement(NamedTuple):
    """Result of the comparison of a run with the run on one process."""

    broken: list[str]
    """Broken promises."""
    gradient_error: float
    """Largest relative norm of the error of a gradient, over parameters."""
    loss_error: float
    """Largest absolute error of the cross-entropy and of the objective over all steps, in nats."""
    aux_error: float
    """Largest error of the auxiliary loss and the z-loss, without their coefficients. This error is
    not limited, since AdamW enlarges rounding errors of gradients near eps. With eps = 1e-5, the
    errors in the same runs are at most 2e-7."""
    near_ties: int
    """Number of tokens with a gap below NEAR_TIE, over steps, layers and microbatches."""
    rerouted: int
    """Number of tokens whose experts differ from those in the run on one process. A rerouted token
    with a gap of NEAR_TIE or more breaks the promise."""
    max_gap: float
    """Largest gap of a rerouted token."""
    may_be_adamw: bool
    """True if tokens with a gap of NEAR_TIE or more were rerouted, and AdamW can be the cause. This
    requires that the initial parameters and the first gradients keep their promises. It also
    requires that these tokens were rerouted after the first update, with gaps of at most
    `max_gap_of_adamw`. The errors of losses are not limited, because a rerouted token changes the
    losses."""
    by_adamw: tuple[str, ...] = ()
    """Promises that were broken with the default eps, and that hold with the eps of
    `with_large_eps`. () if a promise is broken with this eps, too."""


Run = Callable[[int, dict[str, Any]], Outcome]
"""Function `run(size, tree)` that runs the configuration `tree` on `size` ranks, for example with
`run_case` on a pool."""


def check_case(case: Case, run: Run, run_alone: Callable[[dict[str, Any]], Outcome]) -> Agreement:
    """Run a case, and compare the result with a run on one process, according to the promise for
    the layout.

    If the two runs route tokens differently, but only after the first update, the case is run again
    `with_large_eps`. That run shows whether AdamW with a small eps caused the difference.

    Args:
        case: The case.
        run: Function that runs a configuration on several ranks.
        run_alone: Function that runs a configuration on one process.
    """
    alone = case.single_process_tree()
    agreement = compare(case, run(case.size, case.tree()), run_alone(alone))
    if case.is_exact or not agreement.may_be_adamw:
        return agreement
    outcome = run(case.size, with_large_eps(case.tree()))
    again = compare(case, outcome, run_alone(with_large_eps(alone)))
    if again.broken:
        remaining = [f"with optim.eps = 1e-5: {message}" for message in again.broken]
        return agreement._replace(broken=agreement.broken + remaining)
    return again._replace(by_adamw=tuple(agreement.broken))


def max_gap_of_adamw(case: Case) -> float:
    """Return the largest gap between router probabilities at which AdamW can reroute a token by
    enlarging a rounding error.

    The enlarged error changes one weight of a router by lr. A logit then changes by about lr,
    because the norm before the router scales the router's input to about 1. A probability near
    1 / num_experts then changes by lr / num_experts, which is 3.8e-4. The largest observed gap is
    7.0e-5. One token in thirty has a gap below 3.8e-4.
    """
    tree = case.single_process_tree()
    return float(tree["optim"]["lr"] / tree["model"]["num_experts"])


def compare(case: Case, outcome: Outcome, alone: Outcome) -> Agreement:
    """Compare a run with the run on one process, according to the promise for the layout.

    Without tp and ep, all bits must be the same. With tp or ep, these errors must be below
    TOLERANCE: for each parameter, the relative norm of the error of its gradient; for each step,
    the errors of the cross-entropy and of the objective in nats. The initial loss is ln(VOCAB) =
    5.8. TOLERANCE is 1.7e-6 of this loss, or 21 times the distance of neighbouring fp32 values
    (4.8e-7). A non-finite value in either run is an infinite error.
    """
    broken = []
    if outcome.initial != alone.initial:
        broken.append("the initial parameters differ")
    if set(outcome.gradients) != set(alone.gradients):
        broken.append("other parameters have gradients")
        return Agreement(broken, math.nan, math.nan, math.nan, 0, 0, 0.0, False)
    gradient_error, worst = max(
        (_relative_error(outcome.gradients[n], g), n) for n, g in alone.gradients.items()
    )
    near_ties, gaps = _rerouted(outcome, alone)
    steps = list(zip(outcome.metrics, alone.metrics, strict=True))
    loss_error = max(_error(m[0], o[0]) for m, o in steps)
    loss_error = max(loss_error, *(_error(_objective(m), _objective(o)) for m, o in steps))
    aux_error = max(_error(a, b) for m, o in steps for a, b in zip(m[1:3], o[1:3], strict=True))
    clear = [(step, gap) for step, gap in gaps if gap >= NEAR_TIE]
    may_be_adamw = bool(clear) and not broken and gradient_error < TOLERANCE
    may_be_adamw = may_be_adamw and all(
        step > 1 and gap <= max_gap_of_adamw(case) for step, gap in clear
    )
    if clear:
        largest = max(gap for _, gap in clear)
        broken.append(f"{len(clear)} tokens were rerouted, with gaps of up to {largest:.1e}")
    if case.is_exact:
        if outcome.metrics != alone.metrics or not math.isfinite(loss_error):
            broken.append(f"losses or norms are not the same bits (loss error {loss_error:.1e})")
        differing = [name for name in alone.final if outcome.final.get(name) != alone.final[name]]
        if differing:
            broken.append(f"parameters are not the same bits: {', '.join(differing[:3])}")
        if gradient_error > 0:
            broken.append(f"the gradient of {worst} is not the same bits ({gradient_error:.1e})")
    else:
        if not gradient_error < TOLERANCE:
            broken.append(f"the error of the gradient of {worst} is {gradient_error:.1e}")
        if not loss_error < TOLERANCE:
            broken.append(f"the error of a loss is {loss_error:.1e}")
    max_gap = max((gap for _, gap in gaps), default=0.0)
    errors = gradient_error, loss_error, aux_error
    return Agreement(broken, *errors, near_ties, len(gaps), max_gap, may_be_adamw)


def _relative_error(gradient: Tensor, expected: Tensor) -> float:
    if torch.equal(gradient, expected):  # also if both are 0
        return _error(float(expected.norm()), float(expected.norm()))
    return _error(float((gradient - expected).norm() / expected.norm()), 0.0)


def _error(value: float, expected: float) -> float:
    """Return the absolute error; infinity if the error is NaN, because `max` could ignore NaN."""
    error = abs(value - expected)
    return error if math.isfinite(error) else math.inf


def _objective(metrics: tuple[float, ...]) -> float:
    aux_coef, z_coef = (
        ModelConfig.model_fields[key].default for key in ("aux_loss_coef", "z_loss_coef")
    )
    return metrics[0] + aux_coef * metrics[1] + z_coef * metrics[2]


def _rerouted(outcome: Outcome, alone: Outcome) -> tuple[int, list[tuple[int, float]]]:
    """Return the number of near-ties, and the step and the gap of each rerouted token."""
    assert outcome.routes.keys() == alone.routes.keys(), "routers received other microbatches"
    near_ties, gaps = 0, []
    for key, (experts, gap) in alone.routes.items():
        near_ties += int((gap < NEAR_TIE).sum())
        is_rerouted = (outcome.routes[key][0] != experts).any(-1)
        gaps += [(key[0], width) for width in gap[is_rerouted].tolist()]
    return near_ties, gaps
