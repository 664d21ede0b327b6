"""Tests of the event simulator of a step: bubbles, transfers that share a port, and collectives
that computation hides."""

from __future__ import annotations

import pytest

from optimus.parallel.pipeline.actions import Action, Kind, Schedule
from optimus.parallel.pipeline.schedules import make_schedule
from optimus.parallel.pipeline.simulate import bubble_ratio, simulate, unit_costs
from optimus.planner.play import SharedLevel, Transfer, Transfers, play

SCHEDULES = [
    ("1f1b", 4, 1, 8),
    ("1f1b", 1, 1, 3),
    ("gpipe", 4, 1, 6),
    ("interleaved", 4, 2, 8),
    ("zb-h1", 4, 1, 8),
    ("zb-h1", 8, 1, 5),
]


@pytest.mark.parametrize(("name", "p", "v", "m"), SCHEDULES)
def test_bubble_without_transfers_equals_its_formula(name, p, v, m):
    played = play(make_schedule(name, p, v, m), unit_costs(v))
    assert played.bubble_ratio == pytest.approx(bubble_ratio(name, p, v, m))
    assert not any(played.transfers)


@pytest.mark.parametrize(("name", "p", "v", "m"), SCHEDULES[:1] + SCHEDULES[3:5])
def test_transfers_that_do_not_share_a_port_delay_only_their_receivers(name, p, v, m):
    """If each transfer is shorter than an action, a rank never sends two tensors at once. The
    simulator then gives the step time of `simulate`."""
    schedule = make_schedule(name, p, v, m)

    def cost(action: Action) -> float:
        sends = action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
        return 0.25 if sends else unit_costs(v)(action)

    played = play(schedule, cost, Transfers(lambda action: Transfer(0.25)))
    assert played.end == pytest.approx(simulate(schedule, cost).end)
    lengths = [span.end - span.start for spans in played.transfers for span in spans]
    assert lengths == pytest.approx([0.25] * (2 * (p * v - 1) * m))


def test_two_transfers_at_once_have_half_of_the_rate_each():
    """Rank 0 sends two activations, of which each alone would take 2 s. The second send begins 1 s
    after the first. The sends share the port for 2 s, and end 3 s and 4 s after the first send
    began."""
    first, second = Action(Kind.F, 0, 0), Action(Kind.F, 0, 1)
    sends = [Action(Kind.SEND_ACTIVATION, 0, number) for number in (0, 1)]
    receiver = [Action(Kind.F, 1, number) for number in (0, 1)]
    schedule = Schedule("1f1b", 2, 1, 2, ((first, sends[0], second, sends[1]), tuple(receiver)))
    played = play(schedule, lambda action: 1.0, Transfers(lambda action: Transfer(2.0)))
    assert [span[1:] for span in played.transfers[0]] == [(1.0, 4.0), (2.0, 5.0)]
    assert [span.start for span in played.ranks[1]] == [4.0, 5.0]


def test_collectives_end_before_the_update_and_share_the_port_with_sends():
    schedule = make_schedule("1f1b", 1, 1, 2)

    def end(*reduce_s: float, gather_s: float = 0.0) -> float:
        reduce = {0: [Transfer(seconds) for seconds in reduce_s]}
        return play(
            schedule, unit_costs(), Transfers(reduce=reduce, gather=[Transfer(gather_s)])
        ).end

    assert end() == 6.0
    assert end(2.0) == 6.0 and end(3.0) == 7.0  # the last backward takes 2
    assert end(1.5, 1.5) == 7.0
    assert end(gather_s=1.0) == 6.0 and end(gather_s=1.5) == 6.5  # the first forward takes 1


FAST, SLOW = (1.0, 0.0), (0.0, 1.0)
"""Loads of a transfer on the ports of the two levels. FAST is a transfer within a node, and SLOW is
a transfer between nodes."""


def two_senders(first: Transfer, second: Transfer, shared: SharedLevel | None) -> list[float]:
    """Return the end times, in seconds, of two transfers that begin at 1 s: an activation from rank
    0 to rank 1, and an activation from rank 2 to rank 3. `shared` are links between domains that
    both transfers can use."""
    sends = [Action(Kind.SEND_ACTIVATION, stage, 0) for stage in (0, 1, 2)]
    f = [Action(Kind.F, stage, 0) for stage in range(4)]
    ranks = ((f[0], sends[0]), (f[1],), (Action(Kind.F, 0, 1), sends[2]), (f[3],))
    schedule = Schedule("1f1b", 4, 1, 2, ranks)
    transfers = Transfers(
        lambda action: first if action.stage == 0 else second,
        shared={} if shared is None else {1: shared},
    )
    played = play(schedule, lambda action: 1.0, transfers)
    return [played.transfers[0][0].end, played.transfers[2][0].end]


def test_ranks_of_a_domain_share_the_links_that_leave_it():
    """The links of the domain have the rate of a single port, so two transfers over these links
    take twice as long as one."""
    both = SharedLevel(1.0, [[1.0] * 4] * 4)
    transfer = Transfer(2.0, SLOW)
    assert two_senders(transfer, transfer, None) == [3.0, 3.0]
    assert two_senders(transfer, transfer, both) == [5.0, 5.0]
    # When the first transfer ends, half of the bytes of the second transfer are not sent yet.
    assert two_senders(Transfer(1.0, SLOW), transfer, both) == [3.0, 4.0]
    # A transfer that uses another level does not wait.
    assert two_senders(transfer, Transfer(2.0, FAST), both) == [3.0, 3.0]
    # Ranks of other pipelines in the domain send at the same time.
    load = SharedLevel(2.0, [[4.0] * 4] * 4)
    assert two_senders(transfer, Transfer(2.0, FAST), load) == [5.0, 3.0]
    assert two_senders(transfer, transfer, load) == [9.0, 9.0]
    # A transfer of the level below uses the same port, but not the links between domains.
    above = SharedLevel(1.0, [[1.0] * 4] * 4)
    assert two_senders(Transfer(2.0, (1.0, 1.0)), Transfer(2.0, FAST), above) == [3.0, 3.0]
    # Ranks in different domains do not share links.
    apart = SharedLevel(1.0, [[float(a // 2 == b // 2) for b in range(4)] for a in range(4)])
    assert two_senders(transfer, transfer, apart) == [3.0, 3.0]
    # The ranks of stage 0 are in two domains, and wait for the links of the slower domain.
    for domains in ([0, 1], [1, 0]):
        spread = SharedLevel(1.0, [[1, 0, 1, 0], [3, 0, 0, 0]], [domains, [], [0], []])
        assert two_senders(transfer, transfer, spread) == [7.0, 5.0]


def test_collectives_within_an_action_share_the_port_with_sends():
    """Rank 0 sends the activation of the first microbatch, which alone would take 2 s. Meanwhile,
    rank 0 computes the second microbatch for 1 s, and then starts a collective that alone would
    take 1 s. From then on, the send and the collective share the port for 2 s."""
    f = [Action(Kind.F, 0, number) for number in (0, 1)]
    sends = [Action(Kind.SEND_ACTIVATION, 0, number) for number in (0, 1)]
    receiver = tuple(Action(Kind.F, 1, number) for number in (0, 1))
    schedule = Schedule("1f1b", 2, 1, 2, ((f[0], sends[0], f[1], sends[1]), receiver))

    def ends(loads: tuple[float, ...]) -> list[float]:
        exchange = Transfer(1.0, loads)
        transfers = Transfers(
            lambda action: Transfer(2.0),
            exchanges={(Kind.F, 0): exchange},
        )
        return [span.end for span in play(schedule, lambda action: 1.0, transfers).ranks[0]]

    assert ends(SLOW) == [2.0, 4.0]  # another level
    assert ends(FAST) == [2.0, 5.0]
    # While both transfers run, 1 s of each of them needs 1.25 s of the port.
    assert ends((0.25, 1.0)) == [2.0, 4.25]


def test_a_host_that_is_slower_than_the_device_delays_it():
    """While the device computes a long action, the host launches the kernels of the next action.
    The next action then takes less time on the device than the launches of its kernels."""
    schedule = make_schedule("1f1b", 1, 1, 2)
    on_device = {Kind.F: 1.0, Kind.B: 5.0}
    launches = {Kind.F: 3.0, Kind.B: 2.0}

    def ends(launches: dict[Kind, float]) -> list[float]:
        played = play(
            schedule,
            lambda action: on_device.get(action.kind, 0.0),
            launch=lambda action: launches.get(action.kind, 0.0),
        )
        started = [span.end for span in played.hosts[0]]
        assert started == sorted(started)
        return [span.end for span in played.ranks[0] if span.action.kind in on_device]

    assert ends({}) == [1.0, 6.0, 7.0, 12.0]
    # The second forward takes 1 s on the device, because its launches have ended at 8 s. If a
    # forward always took the 3 s of its launches, a step would take 16 s.
    assert ends(launches) == [3.0, 8.0, 9.0, 14.0]
    assert ends({Kind.F: 8.0, Kind.B: 8.0}) == [8.0, 16.0, 24.0, 32.0]
    # A collective within an action begins when the device has computed its input.
    exchange = Transfers(exchanges={(Kind.F, 0): Transfer(1.0)})
    played = play(
        schedule,
        lambda action: on_device.get(action.kind, 0.0),
        exchange,
        launch=lambda action: launches.get(action.kind, 0.0),
    )
    assert [span.end for span in played.ranks[0][:4]] == [3.0, 8.0, 10.0, 15.0]
