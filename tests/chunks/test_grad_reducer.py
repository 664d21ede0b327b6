"""Tests of GradReducer: the time and order in which reductions of buckets (the gradients of a
chunk) are launched, and checks of gradients. Tests of the hooks of segments."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from optimus.chunks.buffers import ChunkState
from optimus.chunks.grad_reducer import GradReducer
from optimus.chunks.groups import ParamProcessGroups
from optimus.chunks.layout import Parameter, lay_out
from optimus.chunks.memory import Memory
from optimus.chunks.optimizer import AdamW, UpdateQueue
from optimus.chunks.segments import ModelSegment, register_module, register_uses
from optimus.config import OptimConfig
from optimus.distributed.collectives import Group


class Net(nn.Module):
    """Three layers in a row. Optionally, the middle layer has a weight that is never used."""

    def __init__(self, has_unused: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        if has_unused:
            self.layers[1].unused = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


def run_backward(net: Net) -> None:
    net(torch.ones(2, 4)).backward()


def make_reducer(
    net: Net, overlap: bool = True, frees_buffers: bool = False
) -> tuple[GradReducer, list[int]]:
    """Return (reducer with a chunk for each layer, list of the numbers of launched chunks).

    The reduce group has two ranks. Instead of a reduction, a launch only appends the number of the
    chunk to the list.
    """
    named, states = dict(net.named_parameters()), []
    memory = Memory(torch.device("cpu"))
    for number, layer in enumerate(net.layers):
        names = [f"layers.{number}.{name}" for name, _ in layer.named_parameters()]
        groups = ParamProcessGroups(reduce_group=Group(2, 0), replica_group=Group(2, 0))
        parameters = [Parameter(name, tuple(named[name].shape), groups, 2) for name in names]
        (chunk,) = lay_out(parameters, 1000).chunks
        state = ChunkState(chunk, groups, {}, torch.float32, torch.float32, memory)
        states.append(state)
        for slot in chunk.slots:
            view = state.view(state.params, slot)
            view.copy_(named[slot.name].data)
            named[slot.name].data = view
    reducer = GradReducer(
        named,
        states,
        {},
        memory,
        UpdateQueue(AdamW(OptimConfig(lr=1.0))),
        deterministic=False,
        reduce_dtype=torch.float32,
        grad_dtype=torch.float32,
        compiled=False,
        overlap=overlap,
        frees_buffers=frees_buffers,
    )
    launched: list[int] = []
    reducer._strategy.reduce = lambda buffer: launched.append(states.index(buffer))
    reducer.start()
    return reducer, launched


def test_buckets_are_launched_in_the_last_backward_as_soon_as_they_are_complete():
    """Run two backwards of a step. Only the last backward launches buckets, in the order of
    backward. The first two buckets are launched before all gradients are computed. `reduce`
    launches no bucket again."""
    net = Net()
    reducer, launched = make_reducer(net)
    run_backward(net)
    assert launched == []  # this is not the last backward
    before_end = []
    net.layers[0].weight.register_post_accumulate_grad_hook(
        lambda _: before_end.append(list(launched))
    )
    with reducer.last_backward(0):
        run_backward(net)
        assert launched == [2, 1, 0]
    assert before_end[-1][:2] == [2, 1]
    reducer.reduce(0)
    assert launched == [2, 1, 0]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_bucket_without_gradient_is_launched_at_the_end_and_delays_later_buckets(overlap):
    """In each of two steps, a weight of the middle layer receives no gradient. With overlap, the
    last backward launches only the bucket of the last layer. Without overlap, the last backward
    launches no bucket. `reduce` launches the other buckets."""
    net = Net(has_unused=True)
    reducer, launched = make_reducer(net, overlap)
    for _ in range(2):  # a bucket that was ready in a step is not ready in the next step
        launched.clear()
        reducer.start()
        with reducer.last_backward(0):
            run_backward(net)
            assert launched == ([2] if overlap else [])
        reducer.reduce(0)
        assert launched == [2, 1, 0]
        reducer.finish()
    reducer.reduce(7)  # a stage without parameters


def test_buckets_without_deferred_gradients_are_launched_at_once():
    """Only the weight gradient of layer 1 is deferred. The bucket of layer 2 is launched at once.
    The bucket of layer 1 waits for the deferred gradient. The bucket of layer 0 waits too, because
    buckets are launched in order."""
    net = Net()
    reducer, launched = make_reducer(net)
    with reducer.last_backward(0, expected=[net.layers[1].weight]):
        assert launched == [2]
        run_backward_of(net.layers[1])
        assert launched == [2, 1, 0]


def run_backward_of(layer: nn.Linear) -> None:
    layer.weight.sum().backward()


def test_a_gradient_after_the_launch_of_its_bucket_is_an_error():
    """Run a further backward after the last backward of a step. The further backward raises an
    error that names a parameter. A backward in the next step raises no error."""
    net = Net()
    reducer, _ = make_reducer(net)
    with reducer.last_backward(0):
        run_backward(net)
    with pytest.raises(AssertionError, match=r"gradient of layers.2.* came after its bucket"):
        run_backward(net)
    reducer.reduce(0)
    reducer.start()
    run_backward(net)


def test_each_buffer_is_passed_to_before_reduce_before_its_launch():
    """Record the calls of `before_reduce` and the launches. Before each launch, `before_reduce` is
    called with the gradients of the launched bucket, both in the last backward and in `reduce`."""
    net = Net(has_unused=True)
    reducer, launched = make_reducer(net)
    events: list[object] = launched
    reducer.before_reduce = lambda buffer: events.append(
        [name.removeprefix("layers.") for name in buffer.grad_views]
    )
    with reducer.last_backward(0):
        run_backward(net)
    reducer.reduce(0)
    assert [event for event in events if isinstance(event, int)] == [2, 1, 0]
    assert events[0] == ["2.weight", "2.bias"] and events[1] == 2
    assert sorted(events[2]) == ["1.bias", "1.unused", "1.weight"] and events[3] == 1


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("in_backward", [True, False])
def test_a_replaced_gradient_is_an_error(number, in_backward):
    """Replace the `.grad` of a weight before backward. The values of a `.grad` outside of the chunk
    would be lost. Therefore the bucket of the weight is not launched, and an error names the
    parameter."""
    net = Net()
    reducer, launched = make_reducer(net)
    net.layers[number].weight.grad = None
    with pytest.raises(AssertionError, match=f"gradient of layers.{number}.weight was replaced"):
        with reducer.last_backward(0) if in_backward else nullcontext():
            run_backward(net)
        reducer.reduce(0)
    assert number not in launched


def test_a_gradient_replaced_after_the_launch_is_an_error():
    """Replace the `.grad` of a bias after the bucket of the bias is launched. `reduce` raises an
    error that names the parameter."""
    net = Net()
    reducer, _ = make_reducer(net)
    with reducer.last_backward(0):
        run_backward(net)
    net.layers[2].bias.grad = torch.zeros(4)
    with pytest.raises(AssertionError, match=r"gradient of layers.2.bias was replaced"):
        reducer.reduce(0)


@pytest.mark.parametrize("overlap", [True, False])
def test_the_step_after_an_abandoned_step_launches_all_buckets(overlap):
    """An error at the second bucket ends a step. The next step launches each bucket once, and
    launches no bucket before its backward."""
    net = Net()
    reducer, launched = make_reducer(net, overlap)

    def fail_at_second(buffer: object) -> None:
        if launched:
            raise ValueError

    reducer.before_reduce = fail_at_second
    with pytest.raises(ValueError):
        with reducer.last_backward(0):
            run_backward(net)
        reducer.reduce(0)
    assert launched == [2]
    launched.clear()
    reducer.before_reduce = lambda buffer: None
    reducer.start()
    with reducer.last_backward(0):
        assert launched == []
        run_backward(net)
    reducer.reduce(0)
    assert launched == [2, 1, 0]


def test_buffers_that_an_abandoned_step_allocated_are_not_reduced():
    """A step is abandoned after buffers are allocated for its backward. The next step must free
    these buffers and must not reduce them."""
    net = Net()
    reducer, launched = make_reducer(net, frees_buffers=True)
    segment = ModelSegment("all layers", 0, tuple(dict(net.named_parameters())), lambda *_: None)
    reducer.attach([segment], [], early=False)
    reducer.before_backward(0)
    reducer.start()
    reducer.reduce(0)
    assert launched == []


@pytest.mark.parametrize("in_backward", [True, False])
def test_segments_report_their_uses_before_they_compute(in_backward):
    """Register the hooks of three segments and run a forward and a backward. The forward of a layer
    is reported before the layer computes, and the backward of a layer before the gradient of its
    weight is computed. Without `in_backward`, only forwards are reported."""
    net, events = Net(), []
    segments = [
        ModelSegment(f"layer {number}", 0, (), partial(register_module, layer))
        for number, layer in enumerate(net.layers)
    ]
    register_uses(segments, lambda *use: events.append(use), in_backward)
    for number, layer in enumerate(net.layers):
        layer.register_forward_hook(lambda *_, number=number: events.append(number))
        layer.weight.register_post_accumulate_grad_hook(
            lambda _, number=number: events.append(f"gradient {number}")
        )
    run_backward(net)
    forward = [(0, False), 0, (1, False), 1, (2, False), 2]
    backward = [event for n in (2, 1, 0) for event in ((n, True), f"gradient {n}")]
    if not in_backward:
        backward = [event for event in backward if isinstance(event, str)]
    assert events == forward + backward
