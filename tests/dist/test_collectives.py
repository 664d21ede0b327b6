from __future__ import annotations

import os

import pytest
import torch

from optimus.dist import collectives
from optimus.dist.collectives import Group
from optimus.errors import LostPeerError
from tests.helpers.rank_pool import RanksFailed
from tests.helpers.worlds import everyone


def run_all(dtype: torch.dtype) -> dict:
    group = everyone()
    own = torch.tensor([float(group.rank + 1)], dtype=dtype)
    summed, largest, sent = own.clone(), own.clone(), own.clone()
    collectives.all_reduce_sum(summed, group)
    collectives.all_reduce_max(largest, group)
    collectives.broadcast(sent, group)
    gathered = torch.empty(group.size, dtype=dtype)
    collectives.all_gather(gathered, own, group)
    exchanged, part = torch.empty(group.size, dtype=dtype), torch.empty(1, dtype=dtype)
    pieces = torch.arange(group.size, dtype=dtype) + 10 * group.rank
    collectives.all_to_all(exchanged, pieces, group)
    collectives.reduce_scatter_sum(part, pieces, group)
    objects = collectives.all_gather_objects(f"rank {group.rank}", group)
    told = collectives.broadcast_object(objects[-1] if group.rank == 0 else None, group)
    collectives.barrier(group)
    return {
        "sum": summed.item(),
        "max": largest.item(),
        "broadcast": sent.item(),
        "gathered": gathered.tolist(),
        "exchanged": exchanged.tolist(),
        "part": part.item(),
        "objects": objects,
        "told": told,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives_over_three_ranks(ranks, dtype):
    for rank, seen in enumerate(ranks(3, run_all, dtype)):
        assert seen["sum"] == 6 and seen["max"] == 3 and seen["broadcast"] == 1
        assert seen["gathered"] == [1, 2, 3]
        assert seen["exchanged"] == [rank, 10 + rank, 20 + rank]
        assert seen["part"] == 30 + 3 * rank
        assert seen["objects"] == ["rank 0", "rank 1", "rank 2"]
        assert seen["told"] == "rank 2"


def test_a_group_of_one_changes_nothing():
    group, tensor = Group(1, 0), torch.tensor([3.0])
    collectives.all_reduce_sum(tensor, group)
    collectives.broadcast(tensor, group)
    gathered = torch.zeros(1)
    collectives.all_gather(gathered, tensor, group)
    assert tensor.item() == gathered.item() == 3
    assert collectives.all_gather_objects("x", group) == ["x"]


def begin_all() -> dict:
    """Three at once, awaited in another order than they were begun in."""
    group = everyone()
    collectives.traffic.clear()
    own = torch.tensor([float(group.rank + 1)])
    summed, gathered, part = own.clone(), torch.empty(group.size), torch.empty(1)
    begun = [
        collectives.begin_all_reduce_sum(summed, group),
        collectives.begin_all_gather(gathered, own, group),
        collectives.begin_reduce_scatter_sum(part, torch.arange(group.size) + own, group),
    ]
    results = [one.wait().tolist() for one in reversed(begun)]
    assert all(one.is_done() for one in begun)
    return {"results": results, "traffic": dict(collectives.traffic)}


def test_collectives_that_do_not_wait(ranks):
    for rank, seen in enumerate(ranks(3, begin_all)):
        assert seen["results"] == [[6.0 + 3 * rank], [1, 2, 3], [6]]
        assert seen["traffic"] == {
            ("all ranks", "all_reduce"): [1, 4],
            ("all ranks", "all_gather"): [1, 12],
            ("all ranks", "reduce_scatter"): [1, 12],
        }


def test_begun_alone_they_are_done():
    group, tensor, gathered = Group(1, 0), torch.tensor([3.0]), torch.zeros(1)
    begun = [
        collectives.begin_all_reduce_sum(tensor, group),
        collectives.begin_all_gather(gathered, tensor, group),
        collectives.begin_reduce_scatter_sum(torch.zeros(1), tensor, group),
    ]
    assert all(one.is_done() and one.wait().item() == 3 for one in begun)


def wait_for_a_dead_peer(begun: bool) -> str:
    group = everyone()
    if group.rank == 1:
        os._exit(0)
    try:
        if begun:
            collectives.begin_all_gather(torch.ones(2), torch.ones(1), group).wait()
        else:
            collectives.all_reduce_sum(torch.ones(1), group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(("begun", "what"), [(True, "all_gather"), (False, "all_reduce_sum")])
def test_a_dead_peer_is_named_as_such(ranks, begun, what):
    with pytest.raises(RanksFailed) as failed:
        ranks(2, wait_for_a_dead_peer, begun)
    word = failed.value.outcomes[0].value()
    assert word.startswith(f"LostPeerError: {what} over all ranks did not complete")


def do_wrong(what: str) -> str:
    """Nobody is lost: the call itself is wrong on every rank."""
    group = everyone()
    try:
        if what == "shape":
            collectives.all_gather(torch.empty(5), torch.ones(2), group)
        else:
            collectives.all_to_all_rows(torch.ones(2, 1), [1, 1], [1 << 60, 1], group)
    except Exception as error:
        return f"{type(error).__name__}: {error} {error.__notes__}"
    return "no error"


@pytest.mark.parametrize(
    ("what", "where", "words"),
    [("shape", "all_gather", "tensor size"), ("memory", "all_to_all_rows", "allocate memory")],
)
def test_an_error_that_lost_nobody_keeps_its_own_words(ranks, what, where, words):
    for told in ranks(2, do_wrong, what):
        assert told.startswith("RuntimeError") and words in told
        assert f"in {where} over all ranks" in told


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RuntimeError("Timed out waiting 6000ms for recv operation"), "nobody answered"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), "another rank has ended"),
        (torch.distributed.DistNetworkError("failed to recv, got 0 bytes"), "another rank has"),
        (torch.distributed.DistBackendError("ncclRemoteError: A call failed"), "another rank has"),
        (torch.distributed.DistBackendError("NCCL error: ncclInvalidUsage"), None),
        (torch.OutOfMemoryError("out of memory after a timeout"), None),
    ],
)
def test_only_silence_is_a_lost_peer(error, wanted):
    kind = RuntimeError if wanted is None else LostPeerError
    lost = collectives.lost_peers("send", Group(2, 0, axes="pp"))
    with pytest.raises(kind, match=wanted) as raised, lost:
        raise error
    assert (raised.value if wanted is None else raised.value.__cause__) is error
