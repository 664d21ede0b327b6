from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from optimus.distributed import collectives
from optimus.distributed.collectives import Group
from optimus.errors import ConfigError, LostPeerError
from optimus.observe.events import TrafficMeter
from tests.kit.ranks.pool import RanksFailed
from tests.kit.ranks.worlds import everyone


def run_all(dtype: torch.dtype) -> dict:
    group = everyone()
    contribution = torch.tensor([float(group.rank + 1)], dtype=dtype)
    summed, largest, sent, from_last = (contribution.clone() for _ in range(4))
    collectives.all_reduce_sum(summed, group)
    collectives.all_reduce_max(largest, group)
    collectives.broadcast(sent, group)
    collectives.broadcast(from_last, group, group.size - 1)
    gathered = torch.empty(group.size, dtype=dtype)
    collectives.all_gather(gathered, contribution, group)
    exchanged, shard = torch.empty(group.size, dtype=dtype), torch.empty(1, dtype=dtype)
    pieces = torch.arange(group.size, dtype=dtype) + 10 * group.rank
    collectives.all_to_all(exchanged, pieces, group)
    collectives.reduce_scatter_sum(shard, pieces, group)
    objects = collectives.all_gather_objects(f"rank {group.rank}", group, str)
    message = collectives.broadcast_object(objects[-1] if group.rank == 0 else "", group, str)
    collectives.barrier(group)
    return {
        "sum": summed.item(),
        "max": largest.item(),
        "broadcast": [sent.item(), from_last.item()],
        "gathered": gathered.tolist(),
        "exchanged": exchanged.tolist(),
        "shard": shard.item(),
        "objects": objects,
        "message": message,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives_over_three_ranks(ranks, dtype):
    for rank, seen in enumerate(ranks(3, run_all, dtype)):
        assert seen["sum"] == 6 and seen["max"] == 3 and seen["broadcast"] == [1, 3]
        assert seen["gathered"] == [1, 2, 3]
        assert seen["exchanged"] == [rank, 10 + rank, 20 + rank]
        assert seen["shard"] == 30 + 3 * rank
        assert seen["objects"] == ["rank 0", "rank 1", "rank 2"]
        assert seen["message"] == "rank 2"


class Entry(NamedTuple):
    name: str
    weight: float
    path: Path | None = None


@dataclass(frozen=True)
class Report:
    entries: list[Entry]
    settings: Mapping[str, Any]
    pair: tuple[int, str]


REPORT = Report(
    [Entry("a\x00\u2028\N{GRINNING FACE}", float("-inf"), Path("x/y")), Entry("", 5e-324)],
    {"lr": 0.1, "none": None, "nested": {"flags": [True, False], "inf": float("inf")}},
    (1 << 70, "b"),
)


def exchange() -> tuple:
    """Broadcast and gather objects and bytes of different lengths. Return all results of this
    rank."""
    group = everyone()
    mine = replace(REPORT, entries=REPORT.entries * group.rank)
    first = collectives.broadcast_object(REPORT if group.rank == 0 else None, group, Report)
    gathered = collectives.all_gather_objects(mine, group, Report)
    numbers = collectives.all_gather_objects(float("nan"), group, float | None)
    texts = [collectives.broadcast_bytes(text, group) for text in (b"", bytes(range(256)))]
    data = collectives.gather_bytes(b"\xff" * group.rank, group)
    return first, gathered, all(math.isnan(number) for number in numbers), texts, data


def test_values_and_bytes_of_ranks_arrive_as_they_were(ranks):
    wanted = [replace(REPORT, entries=REPORT.entries * rank) for rank in range(3)]
    for rank, (first, gathered, are_nan, texts, data) in enumerate(ranks(3, exchange)):
        assert first == REPORT and gathered == wanted and are_nan
        assert type(first.entries[0]) is Entry and type(first.entries[0].path) is type(Path())
        assert texts == [b"", bytes(range(256))]
        assert data == ([b"", b"\xff", b"\xff\xff"] if rank == 0 else [])


def send_another_type() -> str:
    group = everyone()
    with pytest.raises(ConfigError) as raised:
        collectives.broadcast_object("12", group, int)
    return str(raised.value)


def test_a_value_of_another_type_is_refused_on_all_ranks(ranks):
    for words in ranks(2, send_another_type):
        text = "rank 0 of the group over all ranks sent a value that is not of type int: "
        assert words.startswith(text)
        assert "\n" not in words


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b'"1"', int),
        (b"1", str),
        (b"1.5", int),
        (b"1", bool),
        (b"[1]", tuple[int, str]),
        (b'["a",1,null,0]', Entry),
        (b'[["a","1"]]', list[Entry]),
        (b'{"entries":[],"settings":{}}', Report),
        (b"", str),
        (b"\x80\x04K\x01.", int),
        (b"[" * 100_000, list[int]),
    ],
)
def test_a_value_of_another_type_is_not_decoded(data, kind):
    with pytest.raises(ValueError, match="validation error"):
        collectives.decode_object(data, kind)


def test_only_plain_values_are_encoded():
    with pytest.raises(AssertionError, match="Tensor is not sent between ranks"):
        collectives.encode_object([torch.ones(1)])


def announce_too_much(size: int) -> str:
    """Make rank 1 announce a message of `size` bytes without sending it. Return the error of rank
    0."""
    group = everyone()
    if group.rank == 1:
        length = torch.tensor([size])
        collectives._gather_into(torch.empty(2, dtype=torch.int64), length, group)
        return ""
    try:
        collectives.all_gather_objects(1, group, int)
    except ConfigError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("size", [1 << 45, -1])
def test_length_that_no_rank_sends_is_refused_before_it_is_allocated(ranks, size):
    assert (
        f"rank 1 of 2 announces a message of {size:,} bytes" in ranks(2, announce_too_much, size)[0]
    )


def test_a_group_of_a_single_rank_changes_nothing():
    group, tensor = Group(1, 0), torch.tensor([3.0])
    collectives.all_reduce_sum(tensor, group)
    collectives.broadcast(tensor, group)
    gathered = torch.zeros(1)
    collectives.all_gather(gathered, tensor, group)
    assert tensor.item() == gathered.item() == 3
    assert collectives.all_gather_objects("x", group, str) == ["x"]


def start_all() -> dict:
    """Start three collectives and wait for them in reverse order. Return a dict with the results,
    in the order of the waits, and the recorded traffic."""
    meter = TrafficMeter()
    group = everyone(recorder=meter)
    contribution = torch.tensor([float(group.rank + 1)])
    summed, gathered, shard = contribution.clone(), torch.empty(group.size), torch.empty(1)
    transfers = [
        collectives.all_reduce_sum(summed, group, async_op=True),
        collectives.all_gather(gathered, contribution, group, async_op=True),
        collectives.reduce_scatter_sum(
            shard, torch.arange(group.size) + contribution, group, async_op=True
        ),
    ]
    results = [transfer.wait().tolist() for transfer in reversed(transfers)]
    assert all(transfer.is_done() for transfer in transfers)
    return {"results": results, "traffic": meter.counts}


def test_collectives_that_do_not_wait(ranks):
    for rank, seen in enumerate(ranks(3, start_all)):
        assert seen["results"] == [[6.0 + 3 * rank], [1, 2, 3], [6]]
        assert seen["traffic"] == {
            ("all ranks", "all_reduce"): [1, 4],
            ("all ranks", "all_gather"): [1, 12],
            ("all ranks", "reduce_scatter"): [1, 12],
        }


def test_collectives_of_a_single_rank_are_done_at_once():
    group, tensor, gathered = Group(1, 0), torch.tensor([3.0]), torch.zeros(1)
    transfers = [
        collectives.all_reduce_sum(tensor, group, async_op=True),
        collectives.all_gather(gathered, tensor, group, async_op=True),
        collectives.reduce_scatter_sum(torch.zeros(1), tensor, group, async_op=True),
    ]
    assert all(transfer.is_done() and transfer.wait().item() == 3 for transfer in transfers)


def wait_for_a_dead_peer(is_async: bool) -> str:
    group = everyone()
    if group.rank == 1:
        os._exit(0)
    try:
        if is_async:
            collectives.all_gather(torch.ones(2), torch.ones(1), group, async_op=True).wait()
        else:
            collectives.all_reduce_sum(torch.ones(1), group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("is_async", "operation"), [(True, "all_gather"), (False, "all_reduce_sum")]
)
def test_a_dead_peer_is_a_lost_peer(ranks, is_async, operation):
    with pytest.raises(RanksFailed) as failed:
        ranks(2, wait_for_a_dead_peer, is_async)
    word = failed.value.outcomes[0].value()
    assert word.startswith(f"LostPeerError: {operation} over all ranks did not complete")


def call_wrongly(mistake: str) -> str:
    """Make the same invalid call on all ranks. Return the type, message and notes of the error, or
    "no error"."""
    group = everyone()
    try:
        if mistake == "shape":
            collectives.all_gather(torch.empty(5), torch.ones(2), group)
        else:
            collectives.all_to_all_rows(torch.ones(2, 1), [1, 1], [1 << 60, 1], group)
    except Exception as error:
        return f"{type(error).__name__}: {error} {error.__notes__}"
    return "no error"


@pytest.mark.parametrize(
    ("mistake", "operation", "text"),
    [("shape", "all_gather", "tensor size"), ("memory", "all_to_all_rows", "allocate memory")],
)
def test_an_error_without_a_lost_peer_keeps_its_text(ranks, mistake, operation, text):
    for message in ranks(2, call_wrongly, mistake):
        assert message.startswith("RuntimeError") and text in message
        assert f"in {operation} over all ranks" in message


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("Timed out waiting 6000ms for recv operation"), "did not respond"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), "another rank has ended"),
        (torch.distributed.DistNetworkError("failed to recv, got 0 bytes"), "another rank has"),
        (torch.distributed.DistBackendError("ncclRemoteError: A call failed"), "another rank has"),
        (torch.distributed.DistBackendError("NCCL error: ncclInvalidUsage"), None),
        (torch.OutOfMemoryError("out of memory after a timeout"), None),
    ],
)
def test_errors_of_lost_peers_are_recognised(error, wanted):
    kind = RuntimeError if wanted is None else LostPeerError
    lost = collectives.raising_lost_peers("send", Group(2, 0, axes="pp"))
    with pytest.raises(kind, match=wanted) as raised, lost:
        raise error
    assert (raised.value if wanted is None else raised.value.__cause__) is error
