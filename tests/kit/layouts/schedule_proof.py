"""Proof by simulation that a schedule completes at any speeds of its ranks.

A rank executes its list of actions in order and waits only for the inputs of an action. After the
last action, the rank waits until all its sends are complete. Each channel has a separate
communicator. The messages of a communicator complete in the order in which they were posted, and a
send completes only when its receive is posted, as with NCCL and large messages. A schedule that
completes under these rules also completes on backends with more buffers. The next action of a rank
depends only on its list, and not on the speeds of other ranks. The proof therefore simulates only
one order of execution: if this order completes, all orders complete.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable

from optimus.parallel.pipeline.actions import COMPUTE, RECEIVES, SENDS, Action, Kind, Schedule
from optimus.parallel.pipeline.communicate import WEIGHT_GRADIENT

Communicator = Callable[[Action], Hashable]
"""Function that returns the communicator of a send or receive."""


def validate(schedule: Schedule, communicator: Communicator | None = None) -> tuple[int, ...]:
    """Prove that the schedule of a training step is correct.

    For each microbatch, each stage must execute the actions F (forward) and B (backward) once in
    this order, or F, I (gradient of the input) and W (gradients of the weights). The actions B, I
    and W must be in the order of microbatches. Each channel must have its sends and its receives in
    the same order. A receive must be posted before the action that needs it. Every rank must reach
    the end of its list of actions. A REDUCE_GRAD must follow the last weight gradient of each
    stage; with `reduce_each`, a REDUCE_GRAD must follow each weight gradient. The update must be
    the last action.

    Args:
        schedule: The schedule.
        communicator: Function that returns the communicator of an action; None: the channel of the
            action.

    Returns:
        For each rank, the largest number of live microbatches, summed over its stages. A microbatch
        is live on a stage from its F to the end of its B or W.

    Raises:
        AssertionError: The schedule is wrong. The message names rank and action.
    """
    _check_actions(schedule)
    halves = schedule.splits_backward
    _check_compute(schedule, (Kind.F, Kind.I, Kind.W) if halves else (Kind.F, Kind.B))
    _check_channels(schedule)
    _check_ends(schedule)
    _play(schedule, communicator or schedule.channel_of)
    return tuple(_max_live(actions) for actions in schedule.ranks)


def validate_evaluation(schedule: Schedule) -> None:
    """Prove that a schedule of forward passes is correct, in the same way as `validate`."""
    _check_actions(schedule)
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            is_allowed = action.kind in (Kind.F, *SENDS, *RECEIVES)
            assert is_allowed, f"rank {rank} does {action} in an evaluation"
    _check_compute(schedule, (Kind.F,))
    _check_channels(schedule)
    _play(schedule, schedule.channel_of)


def _check_actions(schedule: Schedule) -> None:
    """Assert that each rank can execute its actions, and executes each action once."""
    lists = len(schedule.ranks)
    assert lists == schedule.num_ranks, f"{lists} lists for {schedule.num_ranks} ranks"
    for rank, actions in enumerate(schedule.ranks):
        done: set[Action] = set()
        for action in actions:
            assert action not in done, f"rank {rank} does {action} twice"
            done.add(action)
            if action.kind is Kind.OPT_STEP:
                continue
            assert action.stage in schedule.stages_of(rank), f"rank {rank} has no stage of {action}"
            is_in_step = 0 <= action.microbatch < schedule.num_microbatches
            assert is_in_step, f"rank {rank}: the step has no microbatch of {action}"
            if action.kind in SENDS or action.kind in RECEIVES:
                _check_peer(schedule, rank, action)


def _check_peer(schedule: Schedule, rank: int, action: Action) -> None:
    """Assert that the peer of a send or receive is an existing stage on another rank."""
    before = action.kind in (Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT)
    neighbour = action.stage + (-1 if before else 1)
    assert 0 <= neighbour < schedule.num_stages, f"rank {rank}: {action} has no peer"
    assert schedule.rank_of(neighbour) != rank, f"rank {rank}: the peer of {action} is the rank"


def _check_compute(schedule: Schedule, expected: tuple[Kind, ...]) -> None:
    """Assert that each stage computes each microbatch once, in the expected order."""
    microbatches = list(range(schedule.num_microbatches))
    for rank, actions in enumerate(schedule.ranks):
        orders: dict[tuple[Kind, int], list[int]] = defaultdict(list)
        position: dict[Action, int] = {}
        for index, action in enumerate(actions):
            position[action] = index
            if action.kind in COMPUTE:
                orders[action.kind, action.stage].append(action.microbatch)
        for stage in schedule.stages_of(rank):
            for kind in COMPUTE:
                order = orders[kind, stage]
                required = microbatches if kind in expected else []
                assert sorted(order) == required, f"rank {rank}: {kind.name} of stage {stage}"
                assert kind is Kind.F or order == required, (
                    f"rank {rank}: {kind.name} of stage {stage} is not in microbatch order"
                )
            for j in microbatches:
                positions = [position[Action(kind, stage, j)] for kind in expected]
                assert positions == sorted(positions), (
                    f"stage {stage}: the actions of microbatch {j} are in the wrong order"
                )


def _check_channels(schedule: Schedule) -> None:
    """Assert that each value is computed before its send, and that the sends and the receives of a
    channel have the same order."""
    sends: dict[Hashable, list[Action]] = defaultdict(list)
    receives: dict[Hashable, list[Action]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        computed: set[Action] = set()
        for action in actions:
            if action.kind in SENDS:
                assert action in computed, f"rank {rank}: {action} before its value is computed"
                sends[schedule.channel_of(action)].append(received_by(action))
            elif action.kind in RECEIVES:
                receives[schedule.channel_of(action)].append(action)
            elif action.kind in COMPUTE:
                computed.update(sends_of(action, schedule.num_stages))
    for channel in sends.keys() | receives.keys():
        assert sends[channel] == receives[channel], f"{channel}: sends and receives differ in order"


def _check_ends(schedule: Schedule) -> None:
    """Assert that each reduction follows the last gradient that it reduces, and that the update is
    the last action of each rank."""
    last = schedule.num_microbatches - 1
    final_kind = Kind.W if schedule.splits_backward else Kind.B
    for rank, actions in enumerate(schedule.ranks):
        is_complete = bool(actions) and actions[-1] == Action(Kind.OPT_STEP)
        assert is_complete, f"the last action of rank {rank} is not its update"
        assert sum(a.kind is Kind.OPT_STEP for a in actions) == 1, f"rank {rank} updates twice"
        gradients: dict[int, list[Action]] = defaultdict(list)
        for action in actions:
            if action.kind in (*WEIGHT_GRADIENT, Kind.REDUCE_GRAD):
                gradients[action.stage].append(action)
        for stage in schedule.stages_of(rank):
            expected = []
            for j in range(schedule.num_microbatches):
                expected.append(Action(final_kind, stage, j))
                if schedule.reduce_each or j == last:
                    expected.append(Action(Kind.REDUCE_GRAD, stage, j))
            reductions = (
                "a reduction after each gradient"
                if schedule.reduce_each
                else ("one reduction after the last gradient")
            )
            assert gradients[stage] == expected, f"rank {rank}: stage {stage} needs {reductions}"


def _play(schedule: Schedule, communicator: Communicator) -> None:
    """Execute the lists of all ranks. Assert that all lists and messages complete, without a
    deadlock."""
    positions = [0] * schedule.num_ranks
    available: set[Action] = set()  # received values, identified by their receive actions
    messages = _Messages(schedule, communicator, available)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                if not _can_run(schedule, rank, action, available, messages.requested):
                    break
                if action.kind in SENDS or action.kind in RECEIVES:
                    messages.post(rank, action)
                elif action.kind in COMPUTE:
                    available.update(_local_outputs(schedule, rank, action))
                positions[rank] += 1
                moved = True
    stuck = [
        f"rank {rank} at {actions[positions[rank]]}"
        for rank, actions in enumerate(schedule.ranks)
        if positions[rank] < len(actions)
    ]
    assert not stuck, f"deadlock: {'; '.join(stuck)}"
    assert not messages.pending(), f"deadlock at the end: {messages.pending()}"


class _Messages:
    """Sends and receives in progress. For each communicator, each rank has a queue of pending
    actions. A message is delivered when its send is the first action in the queue of the sending
    rank, and its receive is the first action in the queue of the receiving rank."""

    def __init__(
        self, schedule: Schedule, communicator: Communicator, available: set[Action]
    ) -> None:
        self._schedule, self._communicator, self._available = schedule, communicator, available
        self._posted: dict[tuple[int, Hashable], deque[Action]] = defaultdict(deque)
        self.requested: set[Action] = set()

    def post(self, rank: int, action: Action) -> None:
        """Post a send or receive of a rank, and deliver all messages that can complete."""
        if action.kind in RECEIVES:
            self.requested.add(action)
        communicator = self._communicator(action)
        self._posted[rank, communicator].append(action)
        self._deliver(rank, communicator)

    def pending(self) -> list[str]:
        """Return texts with the first pending action of each rank and communicator."""
        return [f"rank {rank}: {queue[0]}" for (rank, _), queue in self._posted.items() if queue]

    def _deliver(self, rank: int, communicator: Hashable) -> None:
        waiting = [rank]  # ranks whose first pending action could complete now
        while waiting:
            queue = self._posted[waiting[-1], communicator]
            if queue:
                peer = self._peer(queue[0])
                queue_of_peer = self._posted[peer, communicator]
                if queue_of_peer and _as_receive(queue[0]) == _as_receive(queue_of_peer[0]):
                    self._available.add(_as_receive(queue.popleft()))
                    queue_of_peer.popleft()
                    waiting.append(peer)
                    continue
            waiting.pop()

    def _peer(self, action: Action) -> int:
        channel = self._schedule.channel_of(action)
        return channel.to if action.kind in SENDS else channel.source


def _as_receive(action: Action) -> Action:
    return received_by(action) if action.kind in SENDS else action


def _can_run(
    schedule: Schedule, rank: int, action: Action, available: set[Action], requested: set[Action]
) -> bool:
    """Return True if the inputs of an action are available. Assert that the receives of these
    inputs are posted."""
    if action.kind not in COMPUTE:
        return True
    for need in needs_of(action, schedule.num_stages):
        channel = schedule.channel_of(need)
        is_local = channel.source == channel.to
        assert is_local or need in requested, f"rank {rank}: {action} needs {need} before its post"
        if need not in available:
            return False
    return True


def _local_outputs(schedule: Schedule, rank: int, action: Action) -> list[Action]:
    """Return the receives that `action` makes unnecessary: its outputs for stages on the same rank
    are available without a message."""
    receives = map(received_by, sends_of(action, schedule.num_stages))
    return [receive for receive in receives if schedule.rank_of(receive.stage) == rank]


def _max_live(actions: tuple[Action, ...]) -> int:
    final_kind = Kind.W if any(a.kind is Kind.W for a in actions) else Kind.B
    live = most = 0
    for action in actions:
        live += (action.kind is Kind.F) - (action.kind is final_kind)
        most = max(most, live)
    return most


def sends_of(action: Action, num_stages: int) -> list[Action]:
    """Return a list with the action that sends the result of a compute action to another stage, or
    [] if no stage needs the result.

    The function assumes that each stage is on a different rank.
    """
    if action.kind is Kind.F and action.stage < num_stages - 1:
        return [action._replace(kind=Kind.SEND_ACTIVATION)]
    if action.kind in (Kind.B, Kind.I) and action.stage > 0:
        return [action._replace(kind=Kind.SEND_GRADIENT)]
    return []


def received_by(send: Action) -> Action:
    """Return the receive action that matches a send action."""
    if send.kind is Kind.SEND_ACTIVATION:
        return send._replace(kind=Kind.RECV_ACTIVATION, stage=send.stage + 1)
    return send._replace(kind=Kind.RECV_GRADIENT, stage=send.stage - 1)


def needs_of(action: Action, num_stages: int) -> list[Action]:
    """Return a list with the action that receives the input of a compute action from another stage,
    or [] if the compute action needs no data of another stage.

    The function assumes that each stage is on a different rank.
    """
    if action.kind is Kind.F and action.stage > 0:
        return [action._replace(kind=Kind.RECV_ACTIVATION)]
    if action.kind in (Kind.B, Kind.I) and action.stage < num_stages - 1:
        return [action._replace(kind=Kind.RECV_GRADIENT)]
    return []
