"""Tests of the chunk engine on one rank: parameters as views, updates, fp32 gradients, tied
parameters, and the norm."""

from __future__ import annotations

import copy
import math
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from optimus.chunks import grad_reducer
from optimus.chunks.buffers import ChunkState, FurtherUse
from optimus.chunks.engine import ChunkEngine
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.layout import ALIGNMENT
from optimus.chunks.optimizer import AdamW
from optimus.chunks.options import ParamOptions
from optimus.chunks.residency import Pass, Residency
from optimus.chunks.segments import ModelSegment, register_module
from optimus.config import OptimConfig
from optimus.distributed.collectives import Group
from optimus.model.init import initialise_
from optimus.model.transformer import Transformer
from tests.kit.layouts.whole import whole_of
from tests.kit.runs.tiny import tiny_config

OPTIM = OptimConfig(lr=1e-2, min_lr=0.0, weight_decay=0.1)


def make_model(**overrides) -> Transformer:
    torch.set_num_threads(1)
    config = tiny_config("d", "r", **overrides)
    model = Transformer(config.model)
    initialise_(model, seed=3)
    return model


def make_engine(model, dtype=torch.float32, chunk_length=4000) -> ChunkEngine:
    engine = ChunkEngine(
        dict(model.named_parameters()),
        lambda name: ParamProcessGroups(),
        AdamW(OPTIM),
        dtype=dtype,
        chunk_length=chunk_length,
    )
    model.separate_uses()
    for name, leaf in model.separated_uses().items():
        engine.add_use(FurtherUse(name, leaf, "embed.weight"))
    engine.start_step()
    return engine


def backward(model, seed=0):
    tokens = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(seed))
    model.losses(tokens).ce_sum.backward()


def complete_gradients(engine: ChunkEngine) -> None:
    engine.gradients.reduce(0)
    engine.gradients.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_become_aligned_views_with_the_same_values(dtype):
    """Make the engine of a model whose parameters need several chunks. Each parameter has its value
    in the training dtype, is in the memory of a chunk, and begins at a multiple of 64 bytes."""
    model = make_model(model__hidden_size=40)
    before = {name: p.detach().to(dtype) for name, p in model.named_parameters()}
    engine = make_engine(model, dtype)
    assert len(engine.chunks) >= 3
    memory = {state.params.untyped_storage().data_ptr() for state in engine.chunks}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.untyped_storage().data_ptr() in memory
        assert parameter.storage_offset() * dtype.itemsize % 64 == 0


def test_update_equals_torch_adamw_to_the_last_bit():
    """Train a model with the engine, and a copy of the model with torch's fused AdamW, for three
    steps. The gradient norms agree. The parameters have the same bits if their size is a multiple
    of ALIGNMENT, and are close otherwise."""
    model = make_model()
    reference = copy.deepcopy(model)
    engine = make_engine(model)
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, weight_decay=0.1, fused=True
    )
    for step in range(3):
        engine.start_step()
        optimizer.zero_grad()
        backward(model, step)
        backward(reference, step)
        complete_gradients(engine)
        norm = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
        assert engine.grad_norm() == pytest.approx(float(norm), rel=1e-6)
        engine.update(OPTIM.lr)
        optimizer.step()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        # For the last elements of a tensor, which do not fill a vector register, torch uses another
        # formula. Chunks are padded, so the engine has no such elements.
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7, msg=name)
        if theirs.numel() % ALIGNMENT == 0:
            assert torch.equal(ours, theirs), name


def test_bf16_parameters_follow_fp32_masters():
    """Update bf16 parameters with a small learning rate. The masters change by less than the
    distance of neighbouring bf16 values, and each parameter is its master rounded to bf16."""
    model = make_model()
    engine = make_engine(model, torch.bfloat16)
    for seed in range(4):
        backward(model, seed)
    complete_gradients(engine)
    before = {name: master.clone() for name, master in whole_of(engine, "master").items()}
    engine.update(1e-5)
    masters = whole_of(engine, "master")
    change = max(float((masters[name] - before[name]).abs().max()) for name in before)
    assert 0 < change < 2e-5  # far below the distance of neighbouring bf16 weights
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(parameter, masters[name].bfloat16())


@pytest.mark.parametrize("natively", [True, False])
def test_bf16_accumulation_over_microbatches_is_fp32(monkeypatch, natively):
    """Run five microbatches of a bf16 model, with `Tensor.grad_dtype` or with a hook that converts
    gradients to fp32. The gradients are the fp32 sums of the bf16 gradients of each microbatch."""
    if natively and not grad_reducer._WIDENS_NATIVELY:
        pytest.skip("this torch has no Tensor.grad_dtype")
    monkeypatch.setattr(grad_reducer, "_WIDENS_NATIVELY", natively)
    model, reference = make_model(), make_model()
    engine = make_engine(model, torch.bfloat16)
    reference.to(torch.bfloat16)
    total = {name: torch.zeros(p.shape) for name, p in reference.named_parameters()}
    for seed in range(5):
        backward(model, seed)
        reference.zero_grad()
        backward(reference, seed)
        for name, parameter in reference.named_parameters():
            total[name] += parameter.grad.float()
    complete_gradients(engine)
    for name, gradient in whole_of(engine, "grad").items():
        assert torch.equal(gradient, total[name]), name


def test_tied_embedding_gradients_of_both_uses_are_added_once():
    """Run a step with tied embeddings. Each use of the parameter has a separate gradient. The
    parameter has the sum of the two gradients, and the norm counts this sum once. After the update,
    the model computes the same output as a second model that loads the parameters of the first."""
    model = make_model(model__tie_embeddings=True)
    reference = copy.deepcopy(model)
    engine = make_engine(model)
    backward(model)
    backward(reference)
    uses = [model.embed.weight, *model.separated_uses().values()]
    assert len(uses) == 2 and all(leaf.grad.abs().sum() > 0 for leaf in uses)
    complete_gradients(engine)
    expected = reference.embed.weight.grad
    torch.testing.assert_close(
        whole_of(engine, "grad")["embed.weight"], expected, rtol=1e-5, atol=1e-6
    )
    # The norm counts the sum of the two gradients, and not only the gradient of the head.
    norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in reference.parameters()))
    assert engine.grad_norm() == pytest.approx(norm, rel=1e-6)
    engine.update(OPTIM.lr)
    tokens = torch.randint(0, 320, (1, 8))
    loaded = make_model(model__tie_embeddings=True)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens), loaded(tokens))


def test_frozen_parameters_put_after_shards_keep_the_new_values():
    """`shards` makes an fp32 copy of a frozen parameter, and then `put` sets two elements of the
    parameter. `settle` does not overwrite these two elements with their old values in the copy. If
    a load writes values to the copy, `sync_params` copies these values to the parameter."""
    named = {"a": nn.Parameter(torch.zeros(3))}
    groups = {"a": ParamProcessGroups(options=ParamOptions(frozen=True))}
    engine = ChunkEngine(named, groups.get, AdamW(OPTIM), dtype=torch.bfloat16, chunk_length=4)
    shards = list(engine.frozen.shards())
    engine.put("master", "a", torch.ones(2), 1)
    engine.frozen.settle()
    assert shards and named["a"].tolist() == [0, 1, 1]
    (shard,) = engine.frozen.shards()
    shard.states["master"].fill_(2)
    engine.sync_params()
    assert named["a"].tolist() == [2, 2, 2]


def test_initial_values_do_not_exist_together():
    """The engine requests the initial value of each parameter once, also of frozen parameters. Each
    value is freed before the engine requests the next value."""
    model = make_model()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    frozen = [name for name in values if name.endswith("norm.weight")]
    asked: list[str] = []
    last: list[weakref.ref] = []

    def initial(name: str) -> torch.Tensor:
        assert not last or last[0]() is None, f"{asked[-1]} still has memory"
        asked.append(name)
        value = values[name].clone()
        last[:] = [weakref.ref(value)]
        return value

    groups = {
        True: ParamProcessGroups(options=ParamOptions(frozen=True)),
        False: ParamProcessGroups(),
    }
    named = dict(model.named_parameters())
    for parameter in named.values():
        parameter.data = torch.zeros(()).expand(parameter.shape)
    engine = ChunkEngine(
        named,
        lambda name: groups[name in frozen],
        AdamW(OPTIM),
        initial=initial,
        dtype=torch.float32,
        chunk_length=4000,
    )
    assert sorted(asked) == sorted(values) and len(engine.chunks) > 2
    for name, parameter in named.items():
        assert torch.equal(parameter, values[name]), name


def test_sharded_chunks_do_not_exist_together(monkeypatch):
    """While the engine fills a chunk with initial values, the unsharded buffers of earlier chunks
    have no memory."""
    made: list[ChunkState] = []
    create = ChunkState.__init__

    def note(state: ChunkState, *args, **kwargs) -> None:
        create(state, *args, **kwargs)
        made.append(state)

    def initial(name: str) -> torch.Tensor:
        for state in made[:-1]:
            assert not state.params.untyped_storage().nbytes()
            assert not state.grads.untyped_storage().nbytes()
        return named[name].detach().clone()

    monkeypatch.setattr(ChunkState, "__init__", note)
    named = dict(make_model().named_parameters())
    group = Group(2, 0)
    ChunkEngine(
        named,
        lambda name: ParamProcessGroups(reduce_group=group, shard_group=group),
        AdamW(OPTIM),
        initial=initial,
        dtype=torch.bfloat16,
        chunk_length=4000,
        residency=Residency(divides_gradients=True, divides_parameters=True, slots=1),
    )
    assert len(made) > 2


def test_norm_of_gradients_whose_squares_overflow_is_finite():
    """The square of a gradient of 1e30 is above the fp32 maximum. The norm is still 1e30."""
    engine = make_engine(make_model())
    engine.chunks[0].grads[0] = 1e30
    assert engine.grad_norm() == pytest.approx(1e30)


def test_parameters_of_several_dtypes_train_in_their_dtypes():
    """Train a bf16 model with an fp32 output layer and a frozen fp16 input layer, with all states
    on the device, and with some or all states on the host. Each parameter keeps its dtype, and all
    placements give the same bits. The fp32 layer equals the layer that torch's AdamW trains."""
    finals = []
    for share in (0.0, 0.7, 1.0):
        torch.manual_seed(3)
        layers = [nn.Linear(8, 8).half(), nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8)]
        net = nn.ModuleList(layers)
        head = copy.deepcopy(net[2])
        adamw = torch.optim.AdamW(head.parameters(), lr=OPTIM.lr, betas=OPTIM.betas, eps=OPTIM.eps)
        adamw.param_groups[0]["weight_decay"] = OPTIM.weight_decay

        def groups_of(name: str, net: nn.ModuleList = net) -> ParamProcessGroups:
            dtype = net.get_parameter(name).dtype
            return ParamProcessGroups(options=ParamOptions(frozen=name[0] == "0", dtype=dtype))

        engine = ChunkEngine(
            dict(net.named_parameters()),
            groups_of,
            AdamW(OPTIM),
            dtype=torch.bfloat16,
            chunk_length=64,
            deterministic=True,
            residency=Residency(share > 0, host_share=share, poison=True),
        )
        segments = [
            ModelSegment(str(n), 0, (f"{n}.weight", f"{n}.bias"), partial(register_module, layer))
            for n, layer in enumerate(net)
        ]
        engine.attach(segments, [Pass(0, False), Pass(0, True)])
        for step in range(3):
            engine.start_step()
            hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).half()
            hidden = net[1](net[0](hidden).bfloat16()).float()
            net[2](hidden).square().mean().backward()
            head(hidden.detach()).square().mean().backward()
            engine.gradients.reduce(0)
            engine.gradients.finish()
            engine.update(OPTIM.lr)
            adamw.step()
            adamw.zero_grad()
        engine.gather([f"{n}.{name}" for n in range(3) for name in ("weight", "bias")])
        dtypes = [layer.weight.dtype for layer in net]
        assert dtypes == [torch.float16, torch.bfloat16, torch.float32]
        finals.append([parameter.detach().clone() for parameter in net.parameters()])
        torch.testing.assert_close(net[2].weight, head.weight, rtol=1e-5, atol=1e-6)
    for final in finals[1:]:
        assert all(map(torch.equal, final, finals[0]))
