"""fp16: gradients are scaled, and an overflow on a rank skips the update on all ranks."""

from __future__ import annotations

import math

import pytest
import torch

from optimus.errors import NonFiniteError
from optimus.train import autotune
from optimus.train.loss_scale import LossScale
from tests.kit.layouts.whole import whole_of
from tests.kit.ranks.pool import RanksFailed
from tests.kit.runs.results import assert_same_run, metrics_of
from tests.kit.runs.tiny import DENSE, tiny_config, tiny_tree
from tests.kit.runs.training import local_batch, make_updater, train_on

HALF = {"train__dtype": "fp16", "train__deterministic": False, "train__threads": 1}
STILL = {"optim__schedule": "constant", "optim__warmup_steps": 0}


def half_tree(**overrides) -> dict:
    return tiny_tree("d", "r", **(HALF | STILL | overrides))


def make_scale(**optim) -> LossScale:
    overrides = {f"optim__{key}": value for key, value in optim.items()}
    config = tiny_config("d", "r", **HALF, **overrides)
    return LossScale(config.optim, config.train.dtype, num_microbatches=6)


def test_the_scale_halves_and_doubles():
    scale = make_scale(loss_scale_growth_steps=3)
    assert scale.scale == 65536 * 8  # 6 microbatches, rounded up to 8
    scale.after_overflow()
    assert (scale.scale, scale.skipped) == (65536 * 4, 1)
    for _ in range(2):
        scale.after_update()
    scale.after_overflow()  # the count of good steps restarts
    for _ in range(3):
        assert scale.scale == 65536 * 2
        scale.after_update()
    assert (scale.scale, scale.good_steps, scale.skipped) == (65536 * 4, 0, 2)


def test_the_scale_stops_at_its_least_and_is_restored():
    scale = make_scale(loss_scale=4.0, min_loss_scale=2.0)
    assert scale.can_fall
    scale.after_overflow()
    assert scale.scale == 2.0 and not scale.can_fall
    scale.after_update()
    other = make_scale()
    other.restore(scale.state())
    assert vars(other) | {"_least": 2.0} == vars(scale)
    higher = make_scale(min_loss_scale=8.0)
    higher.restore(scale.state())
    assert higher.scale == 8.0


def test_other_types_have_no_scale():
    config = tiny_config("d", "r")
    scale = LossScale(config.optim, config.train.dtype, num_microbatches=6)
    assert scale.scale == 1.0 and not scale.can_fall and scale.state() is None


def run_updates(tree: dict, steps: int, poisoned: tuple[int, int] | None = None) -> dict:
    """Run `steps` updates, all on the same microbatches. If `poisoned` is (step, rank), a gradient
    of this rank is infinite in this step.

    Return for each step the fields of the result of the update, and the state of this rank after
    the update: "masters", "moments" (exp_avg) and "updates" (the number of updates of the
    optimizer).
    """
    _, world, groups, _, shard, states, updater = make_updater(tree)
    batch = local_batch(groups)
    by_step = {}
    for step in range(1, steps + 1):
        handle = None
        if poisoned == (step, world.rank):
            # A norm's parameter, because hooks are not called for deferred weight gradients
            # (zb-h1).
            last = [p for n, p in shard.model.named_parameters() if "norm" in n][-1]
            handle = last.register_hook(lambda grad: torch.full_like(grad, math.inf))
        result = updater.run(step, batch)
        if handle is not None:
            handle.remove()
        masters = {name: whole.clone() for name, whole in whole_of(states, "master").items()}
        moments = {name: whole.clone() for name, whole in whole_of(states, "exp_avg").items()}
        updates = states.optimizer.num_updates
        by_step[step] = {**vars(result), "masters": masters, "updates": updates}
        by_step[step]["moments"] = moments
    return by_step


UNDIVIDED = tuple(
    f"blocks.{layer}.{name}.weight" for layer in (0, 1) for name in ("mlp.router", "mlp_norm")
)
"""Parameters that no layout in LAYOUTS divides among ranks."""


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


LAYOUTS = [
    pytest.param(1, {}, id="one"),
    pytest.param(2, {"optim__sharding": "so"}, id="dp2-so"),
    pytest.param(2, {"parallel__pp": 2}, id="pp2"),
    pytest.param(2, {"parallel__ep": 2, "optim__sharding": "epso"}, id="ep2-epso"),
    pytest.param(2, {"parallel__pp": 2, "parallel__schedule": "zb-h1"}, id="pp2-zb"),
    pytest.param(2, {"optim__resident": "parameters"}, id="dp2-in-pieces"),
    pytest.param(2, {"optim__sharding": "so", "optim__resident": "cache"}, id="dp2-so-cache"),
    pytest.param(
        4,
        {
            "parallel__pp": 2,
            "parallel__schedule": "zb-h1",
            "optim__sharding": "epso",
            "optim__resident": "cache",
            "optim__cache_chunks": 3,
            "optim__chunk_length": 4000,
        },
        id="pp2-zb-dp2-epso-cache",
    ),
]


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_scaled_gradients_match_fp32(ranks, size, layout):
    """Gradient norms, losses and moments of an fp16 run agree with an fp32 run on one process.
    Parameters would not show gradients of a wrong scale, because AdamW's update does not depend on
    the scale of gradients."""
    # Large coefficients, because the auxiliary losses add gradients on every stage.
    layout = layout | {"model__aux_loss_coef": 0.5, "model__z_loss_coef": 0.25}
    single = half_tree(**layout | {"parallel__pp": 1, "parallel__ep": 1}, train__dtype="fp32")
    (plain,) = ranks(1, run_updates, single, 3, start_world=False)
    for by_step in ranks(size, run_updates, half_tree(**layout), 3, start_world=False):
        for step in (1, 2, 3):
            assert by_step[step]["loss_scale"] == 65536 * 8 and by_step[step]["skipped_steps"] == 0
            assert by_step[step]["loss"] == pytest.approx(plain[step]["loss"], rel=1e-3)
            assert by_step[step]["aux_loss"] == pytest.approx(plain[step]["aux_loss"], rel=1e-2)
            assert by_step[step]["grad_norm"] == pytest.approx(plain[step]["grad_norm"], rel=1e-2)
            for name, moment in by_step[step]["moments"].items():
                if name in UNDIVIDED:
                    assert _relative(moment, plain[step]["moments"][name]) < 1e-2, name


@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
def test_overflow_on_a_rank_skips_the_update_on_all(ranks, size, layout):
    results = ranks(size, run_updates, half_tree(**layout), 3, (2, size - 1), start_world=False)
    for by_step in results:
        assert [by_step[step]["updates"] for step in (1, 2, 3)] == [1, 1, 2]
        assert [by_step[step]["skipped_steps"] for step in (1, 2, 3)] == [0, 1, 1]
        scales = [by_step[step]["loss_scale"] for step in (1, 2, 3)]
        assert scales == [2.0**19, 2.0**19, 2.0**18]
        assert math.isnan(by_step[2]["grad_norm"]) and math.isfinite(by_step[2]["loss"])
        assert math.isfinite(by_step[3]["grad_norm"])
        for name, master in by_step[2]["masters"].items():
            assert torch.equal(master, by_step[1]["masters"][name]), name
    assert any(
        not torch.equal(by_step[3]["masters"][name], master)
        for by_step in results
        for name, master in by_step[2]["masters"].items()
    )


def test_overflow_lowers_the_scale_until_it_fits():
    """Updates are skipped, and each skip halves the loss scale, until no gradient overflows. The
    first update that is not skipped must equal the first update of a run that starts with this
    loss scale."""
    large = run_updates(half_tree(**DENSE, optim__loss_scale=2.0**33), 30)
    done = next(step for step in large if large[step]["updates"] == 1)
    assert 5 < done < 30
    assert all(math.isnan(large[step]["grad_norm"]) for step in range(1, done))
    scale = large[done]["loss_scale"]
    assert scale == 2.0 ** (33 - (done - 1))
    (fits,) = run_updates(half_tree(**DENSE, optim__loss_scale=scale), 1).values()
    assert fits["grad_norm"] == large[done]["grad_norm"]
    for name, master in fits["masters"].items():
        assert torch.equal(master, large[done]["masters"][name]), name
    # Scales are powers of two, which cause no rounding.
    (smaller,) = run_updates(half_tree(**DENSE, optim__loss_scale=scale / 16), 1).values()
    assert smaller["grad_norm"] == pytest.approx(fits["grad_norm"], rel=1e-6)


def test_lasting_nan_ends_the_run_at_the_least_scale(ranks, tiny_data, tmp_path):
    tree = tiny_tree(tiny_data, tmp_path / "run", **HALF, optim__loss_scale=4.0, optim__lr=1e30)
    tree["optim"] |= {"min_lr": 0.0, "warmup_steps": 0, "clip_norm": 0.0}
    message = "NonFiniteError.*loss scale is at its minimum, 1"
    with pytest.raises(RanksFailed, match=message) as failure:
        train_on(ranks, 2, tree)
    assert "Traceback" in str(failure.value)
    lines = metrics_of(tmp_path / "run")
    assert [line["skipped_steps"] for line in lines][-2:] == [1, 2]
    assert lines[-1]["grad_norm"] is None and lines[-1]["loss_scale"] == 2.0
    assert NonFiniteError.kind.exit_status == 4


@pytest.mark.parametrize("size", [1, 2])
def test_scale_and_counters_are_resumed_to_the_bit(ranks, tiny_data, tmp_path, size):
    run = HALF | {"train__max_steps": 6, "optim__loss_scale": 2.0**36}
    run |= {"optim__loss_scale_growth_steps": 2, "checkpoint__interval": 3}
    run |= {"kernels__grouped_gemm": "loop"}  # by measurements, runs could choose different ones
    train_on(ranks, size, tiny_tree(tiny_data, tmp_path / "whole", **run))
    for stop in (4, 0):
        tree = tiny_tree(tiny_data, tmp_path / "halves", **run, train__stop_at_step=stop)
        train_on(ranks, size, tree)
    lines = metrics_of(tmp_path / "whole")
    assert lines[0]["loss_scale"] == 2.0**36
    assert lines[-1]["skipped_steps"] > 0  # otherwise, nothing would be restored
    assert_same_run(tmp_path / "whole", tmp_path / "halves")


def fail_as_a_backend_without_the_operation():
    x = torch.ones(2, 2).to_mkldnn()  # addmm raises NotImplementedError
    torch.addmm(x, x, x)


def fail_in_two_lines():
    raise RuntimeError("\"addmm_impl_cpu_\" not implemented\nfor 'Half'")


@pytest.mark.parametrize("fail", [fail_as_a_backend_without_the_operation, fail_in_two_lines])
def test_device_without_an_fp16_operation_is_refused_in_a_line(monkeypatch, fail):
    model, device = tiny_config("d", "r", **HALF).model, torch.device("cpu")
    autotune.check_fp16(model, device)  # this torch supports fp16
    monkeypatch.setattr(autotune.Transformer, "losses", lambda self, tokens: fail())
    message = "train.dtype = 'fp16'.*addmm.*use 'bf16'"
    with pytest.raises(autotune.ConfigError, match=message) as refused:
        autotune.check_fp16(model, device)
    assert "\n" not in str(refused.value)
