"""When chunks are read, when their gradients are complete, and in which order they leave."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from optimus.chunks.arrivals import watch_first_uses
from optimus.chunks.departures import Completion, Departures, Parcel, Procession
from optimus.chunks.states import Home


def test_what_was_ready_in_one_step_is_not_in_the_next():
    gone: list[int] = []
    procession = Procession([2, 1, 0], gone.append)
    for chunk in (0, 1, 2):
        procession.ready(chunk)
    procession.rest()
    procession.ready(2)
    assert gone == [2, 1, 0, 2]


class Net(nn.Module):
    """Three layers in a row, of which the middle one also has a weight that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.unused = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


def run_backward(net: Net) -> None:
    net(torch.ones(2, 4)).backward()


def completion_of(net: Net) -> Completion:
    completion = Completion()
    for number, layer in enumerate(net.layers):
        for name, leaf in layer.named_parameters():
            completion.add(number, f"{number}.{name}", leaf)
    return completion


def test_completion_is_told_behind_the_last_gradient_alone():
    net, told = Net(), []
    completion = completion_of(net)
    run_backward(net)
    assert told == []  # nobody listens
    with completion.listening([0, 1, 2], told.append):
        run_backward(net)
    assert told == [2, 1, 0]
    completion.add(1, "unused", net.unused)
    with completion.listening([0, 1, 2], told.append):
        run_backward(net)
    assert told == [2, 1, 0, 2, 0]


def test_of_late_gradients_those_that_are_put_off_are_awaited():
    net, told = Net(), []
    completion = completion_of(net)
    with completion.listening([2, 1, 0], told.append, late=[net.layers[1].weight]):
        assert told == [2, 0]
        run_backward(net)
    assert told == [2, 0, 1]


def test_a_gradient_that_comes_too_late_is_no_secret():
    net, completion = Net(), Completion()
    completion.add(2, "2.weight", net.layers[2].weight)
    completion.gone(2)
    with pytest.raises(AssertionError, match="gradient of 2.* came after its chunk had been sent"):
        run_backward(net)
    completion.start()
    run_backward(net)


def departures_of(net: Net, early: bool, events: list, looks: bool = False) -> Departures:
    def look(one: Gradients) -> None:
        if looks:
            events.append([name for name, _ in one.named_grads()])

    departures = Departures(True, early, look)
    for number, layer in enumerate(net.layers):
        parts = {}
        for name, leaf in [*layer.named_parameters(), *([("unused", net.unused)] * (number == 1))]:
            leaf.grad = torch.zeros_like(leaf)
            parts[f"{number}.{name}"] = (leaf, leaf.grad)
        flat = parts[f"{number}.weight"][1]
        buffer = Gradients(Home(), flat, flat, list(parts))
        departures.add(Parcel(buffer, parts, lambda number=number: events.append(number)))
    return departures


@dataclass
class Gradients:
    """A Buffer of named gradients."""

    home: Home
    grads: torch.Tensor
    grad: torch.Tensor
    names: list[str]

    def named_grads(self):
        return [(name, self.grads) for name in self.names]


def test_what_has_no_gradient_leaves_at_the_end_and_holds_the_others_back():
    for early in (True, False):
        net, sent = Net(), []
        departures = departures_of(net, early, sent)
        for _ in range(2):
            sent.clear()
            departures.start()
            with departures.last_backward(0, None):
                run_backward(net)
                assert sent == ([2] if early else [])
            departures.rest(0)
            assert sent == [2, 1, 0]
        departures.rest(7)  # a stage without parameters


def test_all_is_looked_at_before_it_leaves():
    net, events = Net(), []
    departures = departures_of(net, True, events, looks=True)
    departures.start()
    with departures.last_backward(0, None):
        run_backward(net)
    departures.rest(0)
    assert events == [
        ["2.weight", "2.bias"], 2, ["1.weight", "1.bias", "1.unused"], 1, ["0.weight", "0.bias"], 0
    ]  # fmt: skip


@pytest.mark.parametrize("number", [0, 2])
def test_a_replaced_gradient_does_not_leave(number):
    """Whether the parcel would leave within backward or behind it."""
    net, sent = Net(), []
    departures = departures_of(net, True, sent)
    departures.start()
    net.layers[number].weight.grad = None
    with pytest.raises(AssertionError, match=f"gradient of {number}.weight was replaced"):
        with departures.last_backward(0, None):
            run_backward(net)
        departures.rest(0)
    assert number not in sent


def test_a_gradient_replaced_behind_the_departure_is_noticed():
    net, sent = Net(), []
    departures = departures_of(net, True, sent)
    departures.start()
    with departures.last_backward(0, None):
        run_backward(net)
    net.layers[2].bias.grad = torch.zeros(4)
    with pytest.raises(AssertionError, match=r"gradient of 2.bias was replaced"):
        departures.check(0)


def test_every_reader_announces_its_chunks_before_it_runs():
    net, events = Net(), []
    chunk_of = {"0": 5, "1": 5, "2": 6, "unused": 6}.__getitem__
    readers = [
        (net.layers[0], ["0"]),
        (net.layers[1], ["1", "unused"]),
        (net.layers[2], ["2"]),
        (net, []),
    ]
    watch_first_uses(readers, chunk_of, events.append)
    for number, layer in enumerate(net.layers):
        layer.register_forward_hook(lambda *_, number=number: events.append(f"layer {number}"))
    with torch.no_grad():
        net(torch.ones(1, 4))
    assert events == [5, "layer 0", 5, 6, "layer 1", 6, "layer 2"]
