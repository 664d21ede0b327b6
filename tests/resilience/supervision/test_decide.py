"""Tests of the cause that is attributed to a failure, and of the decision about the next attempt.
The decision follows from the ledger."""

from __future__ import annotations

import itertools
import random
import signal
from math import inf

import pytest

from optimus.resilience.supervision.decide import (
    STOPPED_BY_SUPERVISOR,
    Evidence,
    Policy,
    RankEnd,
    RankProgress,
    decide,
    find_cause,
    names_cause,
)
from optimus.resilience.supervision.ledger import (
    AttemptEnded,
    AttemptStarted,
    History,
    NodeMarked,
    Progress,
    SupervisorStarted,
)
from optimus.resilience.supervision.markers import Instance, LayerOutput, Marker

RANKS = 4
"""Ranks 0 and 1 are on node a, ranks 2 and 3 on node b."""
LOST = 5
"""Exit status of a rank that has lost another rank."""


def node_of(rank):
    return "ab"[rank // 2]


def ends(statuses, **more):
    """Return a `RankEnd` for each rank in `statuses`, a dict from rank to exit status, in the order
    of the dict."""
    return tuple(RankEnd(rank, node_of(rank), status, **more) for rank, status in statuses.items())


def marker(rank, step=7, instances="i3"):
    return Marker(
        rank=rank,
        node=node_of(rank),
        step=step,
        text="the output of layer 1 is non-finite",
        data_xxh3=instances,
        was_repeated=True,
    )


ADOPTED = ends(dict.fromkeys(range(3), 1), was_adopted=True)
SEGV, KILL, TERM = -signal.SIGSEGV, -signal.SIGKILL, -signal.SIGTERM
SLOW = tuple(RankProgress(rank, node_of(rank), 6, 40 - (rank == 2), 1.0) for rank in range(RANKS))


@pytest.mark.parametrize(
    ("evidence", "failure", "nodes", "signature"),
    [
        ({"ends": ends({0: LOST, 2: SEGV, 1: LOST})}, "hard", "b", f"signal {signal.SIGSEGV}"),
        ({"ends": ends({2: SEGV, 0: KILL})}, "hard", "ba", f"signal {signal.SIGSEGV}"),
        ({"ends": ends({2: -40})}, "hard", "b", "signal 40"),  # a real-time signal, without a name
        ({"ends": ends({3: 1, 0: LOST})}, "hard", "b", "status 1"),
        ({"ends": ends({3: 134, 0: LOST})}, "hard", "b", "status 134"),
        ({"ends": ends(dict.fromkeys(range(4), 1))}, "shared", "", "status 1"),
        ({"ends": (*ADOPTED, *ends({3: 1}))}, "hard", "b", "status 1"),
        ({"unreachable": ("b",), "ends": ends({0: LOST})}, "hard", "b", "silent"),
        ({"unreachable": ("b",), "nodes": ("a", "b")}, "hard", "b", "silent"),
        ({"unreachable": ("b",), "nodes": ("b",)}, "hard", "b", "silent"),
        ({"restarted": ("b",), "nodes": ("a", "b")}, "ambiguous", "b", "silent"),
        ({"ends": ends({0: 2, 1: 2, 2: LOST}), "nodes": ("a", "b")}, "hard", "a", "status 2"),
        ({"unreachable": ("b",), "markers": (marker(0),)}, "soft", "a", "nonfinite i3"),
        ({"markers": (marker(3, 8), marker(1, 7))}, "soft", "a", "nonfinite i3"),
        ({"ends": ends({0: 4, 2: 4}), "markers": (marker(2),)}, "soft", "b", "nonfinite i3"),
        ({"markers": (marker(2, 7, ""),)}, "soft", "b", "nonfinite state"),
        ({"ends": ends({2: 4, 0: LOST})}, "shared", "", "status 4"),  # no marker
        ({"ends": ends({2: 4, 0: SEGV})}, "hard", "a", f"signal {signal.SIGSEGV}"),
        ({"ends": ends({0: LOST, 1: LOST}), "progress": SLOW}, "ambiguous", "b", "no progress"),
        ({"ends": ends({0: TERM}, was_ended=True)}, "shared", "", "unknown"),
        ({"ends": ends({0: TERM})}, "shared", "", "unknown"),
        ({"ends": ends({0: TERM, 2: SEGV})}, "hard", "b", f"signal {signal.SIGSEGV}"),
        ({"ends": ends(dict.fromkeys(range(4), LOST))}, "shared", "", "unknown"),
    ],
)
def test_cause_of_a_failure(evidence, failure, nodes, signature):
    end = find_cause(Evidence(3, 9, **evidence), RANKS, 100.0)
    assert (end.outcome, end.failure, end.nodes) == ("failed", failure, tuple(nodes))
    assert end.signature == signature and end.attempt == 3 and end.time == 100.0
    assert end.step == (7 if failure == "soft" else 9)
    assert end.evidence


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ({0: 0, 1: 0, 2: 0, 3: 0}, "done"),
        ({0: 3, 1: 3, 2: 0, 3: 3}, "stopped"),
        ({0: 2, 1: LOST, 3: 2}, "usage"),
    ],
)
def test_outcome_without_a_failure(statuses, outcome):
    evidence = Evidence(1, 9, ends(statuses), nodes=("a", "b"))
    assert find_cause(evidence, RANKS, 0.0).outcome == outcome


@pytest.mark.parametrize("gone", [{"unreachable": ("a",)}, {"restarted": ("b", "a")}])
@pytest.mark.parametrize(("last", "outcome"), [(0, "done"), (3, "stopped"), (LOST, None)])
def test_loss_of_agents_after_the_end_of_all_ranks_is_no_failure(gone, last, outcome):
    """Slurm cancels a job. The ranks end, and then the agents are killed. If no rank had an error,
    the attempt must not count as failed. If rank 3 ended because it lost another rank, the attempt
    failed (one node is gone) or was interrupted (both nodes are gone)."""
    statuses = {0: 0, 1: 0, 2: 0, 3: last}
    evidence = Evidence(1, 9, ends(statuses), nodes=("a", "b"), **gone)
    end = find_cause(evidence, RANKS, 0.0)
    assert end.outcome == (outcome or ("failed" if len(*gone.values()) == 1 else "interrupted"))


@pytest.mark.parametrize(("rank", "outcome"), [(0, "usage"), (3, "failed")])
def test_error_of_a_single_rank_at_the_start(rank, outcome):
    """An error of rank 0 at the start is a mistake in the settings, because this rank checks the
    settings. An error of another rank is attributed to the node of the rank, because the node can
    lack a file of the data set."""
    others = ends(dict.fromkeys({*range(RANKS)} - {rank}, 2), was_adopted=True)
    evidence = Evidence(1, 0, (*others, *ends({rank: 2}, message="m")), nodes=("a", "b"))
    end = find_cause(evidence, RANKS, 0.0)
    assert end.outcome == outcome
    assert end.nodes == (() if outcome == "usage" else ("b",))


def test_error_of_an_ended_rank_is_the_cause_unless_another_rank_may_have_it():
    ended = ends({3: 1})
    assert names_cause(Evidence(1, 6, ended, progress=SLOW[:3]))
    losing = [rank._replace(failure=LOST) for rank in SLOW[:3]]
    assert names_cause(Evidence(1, 6, ended, progress=tuple(losing)))
    failing = (SLOW[0]._replace(failure=1), *SLOW[1:3])
    assert not names_cause(Evidence(1, 6, ended, progress=failing))
    for others in (ends({3: LOST}), ends({3: 0}), ADOPTED):
        assert not names_cause(Evidence(1, 6, others, progress=SLOW[3:]))


@pytest.mark.parametrize(
    "gone",
    [
        {"unreachable": ("b", "a")},
        {"restarted": ("a", "b")},
        {"unreachable": ("b",), "restarted": ("a",)},
    ],
)
def test_loss_of_all_nodes_at_once_is_attributed_to_none(gone):
    """If the network of the supervisor fails, or if all agents end before another supervisor takes
    over, all nodes are lost at once. Such a loss must not be attributed to a node."""
    end = find_cause(Evidence(1, 9, nodes=("a", "b"), **gone), RANKS, 0.0)
    assert (end.outcome, end.nodes) == ("interrupted", ())


def test_loss_of_the_network_of_the_supervisor_is_attributed_to_none():
    evidence = Evidence(1, 5, unreachable=("b",), nodes=("a", "b"), is_cut_off=True)
    end = find_cause(evidence, RANKS, 0.0)
    assert (end.outcome, end.nodes) == ("interrupted", ())


def test_interrupted_attempt_is_started_again_without_marks():
    run = Run()
    assert run.start() == "abcd"
    run.end(outcome="interrupted", failure=None)
    assert run.start() == "abcd" and not run.history.standings


def test_failures_before_the_first_update_do_not_repeat_each_other():
    """Two unrelated crashes before the first update have the same signature and step 0. The second
    crash must not count as a repetition of the first, so both nodes are excluded."""
    run = Run()
    run.start()
    run.end("a", step=0)
    run.start()
    run.end("b", step=0)
    run.start()
    assert {node: run.history.standing(node) for node in "ab"} == dict.fromkeys("ab", "excluded")


def test_ranks_that_ended_without_failure_do_not_complete_a_run():
    """Ranks 0 and 1 have ended without an error, but ranks 2 and 3 have not ended, so the run is
    not complete."""
    evidence = Evidence(1, 9, ends({0: 0, 1: 0}), progress=SLOW[2:])
    assert find_cause(evidence, RANKS, 0.0).failure == "ambiguous"


class Run:
    """A simulated run, for tests of decisions. The job has the nodes a to f, of which at most four
    have ranks."""

    def __init__(self, **policy):
        self.policy = Policy(**{"sizes": (1, 2, 4), **policy})
        self.reachable = list("abcdef")
        self.history = History()
        self.remaining_s = inf
        self.begin_job()

    def begin_job(self, job="1"):
        nodes = tuple(self.reachable)
        event = SupervisorStarted(time=0, host="a", pid=1, job=job, nodes=nodes, settings="")
        self.history.add(event)

    def decide(self):
        return decide(self.history, self.policy, self.reachable, self.remaining_s)

    def start(self):
        """Start the attempt that the last decision describes. Return the names of its nodes."""
        decision = self.decide()
        assert decision.action == "start", decision
        for node, (standing, reason) in decision.marks.items():
            self.history.add(NodeMarked(time=0, node=node, standing=standing, reason=reason))
        attempt = AttemptStarted(
            time=0,
            attempt=len(self.history.attempts) + 1,
            nodes=decision.nodes,
            ranks_per_node=1,
            port=1,
            load=decision.load,
            skipped_steps=decision.skipped_steps,
        )
        self.history.add(attempt)
        return "".join(decision.nodes)

    def end(
        self,
        nodes="",
        failure="hard",
        outcome="failed",
        step=5,
        signature="x",
        saved=True,
        updates=3,
    ):
        attempt = self.history.attempts[-1].attempt
        if saved:
            event = Progress(time=0, attempt=attempt, milestone="checkpoint", step=step)
            self.history.add(event)
        self.history.add(
            AttemptEnded(
                time=0,
                attempt=attempt,
                outcome=outcome,
                step=step,
                failure=failure if outcome == "failed" else None,
                nodes=tuple(nodes),
                signature=signature,
                evidence=(f"{signature} on {nodes}",),
                updates=updates,
            )
        )
        for node in nodes if signature == "silent" else "":
            self.reachable.remove(node)


def test_failed_node_is_replaced_and_all_others_keep_their_ranks():
    run = Run()
    assert run.start() == "abcd"
    run.end("b", step=5)
    assert run.decide().marks == {"b": ("excluded", "x on b")}
    assert run.start() == "aecd"
    run.end("ad", signature="silent", step=6)
    assert run.decide().marks.keys() == {"a", "d"}
    assert run.decide().action == "continue" and "no buffer node" in run.decide().reason


@pytest.mark.parametrize(
    ("on_exhausted", "action", "status"),
    [("requeue", "continue", 3), ("stop", "stop", STOPPED_BY_SUPERVISOR), ("shrink", "start", 0)],
)
def test_job_without_a_free_node(on_exhausted, action, status):
    run = Run(on_exhausted=on_exhausted)
    run.reachable = list("abcd")
    run.start()
    run.end("b")
    decision = run.decide()
    assert (decision.action, decision.status) == (action, status)
    assert decision.marks == {"b": ("excluded", "x on b")}
    if action == "start":
        assert run.start() == "ac"  # 3 nodes are not a valid size
        run.end("c", step=6)
        assert run.start() == "ad"
        run.reachable += ["g", "h", "i"]
        run.end("", "shared", step=7)
        assert run.start() == "adgh"  # full size again


def test_excluded_node_gets_no_ranks_in_a_later_job():
    run = Run()
    run.start()
    run.end("b")
    run.start()
    run.end(outcome="stopped")
    assert run.decide().action == "continue" and run.decide().status == 3
    run.begin_job("2")
    assert run.start() == "acde"
    run.history.add(NodeMarked(time=0, node="b", standing="good", reason="--pardon"))
    run.begin_job("3")
    assert run.start() == "abcd"


def test_suspect_node_keeps_its_ranks_once():
    run = Run()
    run.start()
    run.end("c", "ambiguous")
    assert run.decide().marks["c"][0] == "suspect"
    assert run.start() == "abcd"
    run.end("c", "ambiguous", step=6)
    assert run.decide().marks["c"][0] == "excluded"
    assert run.start() == "abed"


@pytest.mark.parametrize("third", ["e", "d"])
def test_failure_that_another_node_repeats_is_attributed_to_no_node(third):
    run = Run()
    run.start()
    run.end("b", step=5)
    assert run.start() == "aecd"
    run.end("e", step=5)
    decision = run.decide()
    assert decision.load == "older" and decision.marks["b"][0] == "good"
    assert "e" not in decision.marks
    assert run.start() == "aecd"
    run.end(third, step=5)
    decision = run.decide()
    assert decision.action == "stop" and decision.status == STOPPED_BY_SUPERVISOR
    assert "e" not in decision.marks
    assert "older checkpoint failed, too" in decision.reason


@pytest.mark.parametrize("change", [{"step": 6}, {"signature": "y"}, {"signature": "silent"}])
def test_different_failures_exclude_both_nodes(change):
    run = Run()
    run.start()
    run.end("b", step=5, signature=change.get("signature", "x").replace("y", "x"))
    run.start()
    run.end("e", **{"step": 5} | change)
    assert run.decide().marks["e"][0] == "excluded" and run.decide().load == "newest"


@pytest.mark.parametrize("on_repeat_nan", ["stop", "skip"])
def test_data_that_gives_nan_on_a_second_node(on_repeat_nan):
    run = Run(on_repeat_nan=on_repeat_nan)
    run.start()
    run.end("b", "soft", signature="nonfinite i3", step=5)
    assert run.decide().marks["b"][0] == "excluded"
    run.start()
    run.end("e", "soft", signature="nonfinite i3", step=5)
    decision = run.decide()
    assert decision.marks["b"][0] == "good" and "e" not in decision.marks
    if on_repeat_nan == "stop":
        assert decision.action == "stop" and "same data" in decision.reason
        return
    assert decision.action == "start" and decision.skipped_steps == (5,)
    run.start()
    run.end("c", step=9)
    assert run.decide().skipped_steps == (5,)  # also after a resume before step 5
    run.begin_job("2")
    assert run.decide().skipped_steps == (5,)


LAYERS = {
    "blocks.0": LayerOutput(min=-1.0, max=2.0, mean=0.5, nonfinite=0.0),
    "blocks.1": LayerOutput(min=-4.0, max=8.0, mean=0.25, nonfinite=0.5),
    "blocks.2": LayerOutput(min=None, max=None, mean=None, nonfinite=1.0),
}
FOUND = marker(2).model_copy(
    update={
        "path": "/run/log/m.json",
        "microbatch": 3,
        "direction": "forward",
        "instances": tuple(Instance(data="/my data", instance=n) for n in (17, 18)),
        "layers": LAYERS,
    }
)


def test_stop_because_of_data_reports_instances_layers_and_marker():
    run = Run()
    for node in "ac":
        run.start()
        marked = FOUND.model_copy(update={"node": node})
        end = find_cause(Evidence(len(run.history.attempts), 9, markers=(marked,)), RANKS, 0.0)
        run.history.add(end.model_copy(update={"updates": 2}))
        if node == "a":
            assert run.decide().marks["a"][0] == "excluded"
    decision = run.decide()
    assert decision.action == "stop" and decision.status == STOPPED_BY_SUPERVISOR
    assert {node: mark[0] for node, mark in decision.marks.items()} == {"a": "good"}
    for text in (
        "the same data gives non-finite values, so no node is the cause: a and c: ",
        "the output of layer 1 is non-finite",
        "step 7, microbatch 3, forward; a second computation also gave a non-finite value",
        "optimus-data inspect '/my data' 17 (and 1 more instance)",
        "blocks.0 0.0% non-finite, min -1, max 2, mean 0.5; blocks.1 50.0% non-finite, min -4",
        "marker: /run/log/m.json",
    ):
        assert text in decision.reason, text
    assert "blocks.2" not in decision.reason


def test_refusal_after_an_update_is_a_failure_of_its_node():
    """The data is not mounted on a replacement node, so its rank refuses the configuration. If an
    earlier attempt made an update, the error is a failure of this node. Otherwise, the error counts
    as a mistake in the settings."""
    refusing = ends({0: 2}) + ends({1: 2, 2: 2, 3: 2}, was_adopted=True)
    first = find_cause(Evidence(2, 0, refusing, nodes=("a", "b")), RANKS, 0.0)
    assert first.outcome == "usage"
    later = find_cause(Evidence(2, 0, refusing, nodes=("a", "b"), has_progressed=True), RANKS, 0.0)
    assert (later.outcome, later.failure, later.nodes) == ("failed", "hard", ("a",))


def test_damaged_state_on_two_nodes_is_not_skipped():
    """An optimizer state is non-finite on two nodes. The run must stop. It must not skip the
    update, because a skipped update does not repair the state."""
    run = Run(on_repeat_nan="skip")
    for node in "be":
        run.start()
        run.end(node, "soft", signature="nonfinite state", step=5)
    decision = run.decide()
    assert decision.action == "stop" and decision.reason.startswith("two nodes have non-finite")


def test_nan_of_two_nodes_right_after_a_load_starts_from_the_older_checkpoint_once():
    """After a load of the newest checkpoint, two nodes get NaN before an update, so the finite
    weights of this checkpoint can be the cause. The run must then start once from the older
    checkpoint, and stop if the NaN occurs again."""
    run = Run()
    run.start()
    run.end("b", "soft", signature="nonfinite i3", step=5, updates=0)
    assert run.decide().load == "newest"
    run.start()
    run.end("e", "soft", signature="nonfinite i3", step=5, updates=0)
    decision = run.decide()
    assert decision.action == "start" and decision.load == "older"
    assert decision.marks["b"][0] == "good" and "e" not in decision.marks
    run.start()
    run.end("e", "soft", signature="nonfinite i3", step=5, updates=0)
    assert run.decide().action == "stop"


def test_attempts_without_a_checkpoint_are_limited():
    run = Run(max_attempts_without_progress=3)
    for step in range(3):
        run.start()
        run.end("", "shared", step=step, saved=False)
    assert run.decide().action == "stop" and "3 attempts in a row" in run.decide().reason


def test_number_of_restarts_of_a_job_is_limited():
    run = Run(max_restarts=4)
    for step in range(5):
        run.start()
        run.end("", "shared", step=step)
    assert run.decide().action == "stop" and "5 times" in run.decide().reason
    run.begin_job("2")
    run.start()


def test_no_attempt_starts_shortly_before_the_end_of_the_job():
    run = Run(least_s=60)
    run.start()
    run.end("b")
    run.remaining_s = 59
    decision = run.decide()
    assert (decision.action, decision.status) == ("continue", 3)
    assert decision.marks["b"][0] == "excluded" and "ends in 59 s" in decision.reason


@pytest.mark.parametrize("outcome", ["done", "usage"])
def test_outcomes_end_the_job(outcome):
    run = Run()
    run.start()
    run.end(outcome=outcome)
    decision = run.decide()
    assert (decision.action, decision.status) == {"done": ("done", 0), "usage": ("stop", 2)}[
        outcome
    ]


@pytest.mark.parametrize("seed", range(300))
def test_random_failures_keep_the_rules(seed):
    """After any failures, the nodes with ranks are distinct, reachable and not excluded. A node
    that the next attempt uses again keeps the same ranks. Each job ends."""
    chance = random.Random(seed)
    on_exhausted = chance.choice(["shrink", "requeue", "stop"])
    run = Run(on_exhausted=on_exhausted, on_repeat_nan=chance.choice(["stop", "skip"]))
    before, jobs = "", itertools.count(2)
    for _ in range(60):
        decision = run.decide()
        if decision.action != "start":
            assert decision.reason
            run.begin_job(str(next(jobs)))
            run.reachable = sorted({*run.reachable, *chance.sample("abcdefgh", 3)})
            before = ""
            if run.decide().action != "start":
                return  # too few nodes are left
        nodes = run.start()
        assert len({*nodes}) == len(nodes) and len(nodes) in run.policy.sizes
        assert {*nodes} <= {*run.reachable}
        assert not any(run.history.standing(node) == "excluded" for node in nodes)
        if len(nodes) == len(before):
            for old, new in zip(before, nodes, strict=True):
                usable = old in run.reachable and run.history.standing(old) != "excluded"
                assert (old == new) or not usable
        before = nodes
        failure = chance.choice(["hard", "soft", "ambiguous", "shared"])
        failed = "" if failure == "shared" else chance.choice(nodes)
        signature = chance.choice(["x", "silent"]) if failure == "hard" else failure
        run.end(failed, failure, step=chance.randrange(4), signature=signature, saved=seed % 2)
