"""Where ranks meet, and which of them speaks when one is lost."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace

import pytest

from optimus.dist.meeting import check_meeting_point
from optimus.dist.world import silent_libraries, start_world, tells_first
from optimus.errors import ConfigError, DataError, LostPeerError, OptimusError
from optimus.launch_env import LaunchEnv

FIRST = LaunchEnv(0, 2, 0, 2, "")


def at(where: str, launch: LaunchEnv = FIRST) -> LaunchEnv:
    return replace(launch, init_method=where)


def test_a_good_meeting_point_passes():
    check_meeting_point(at("tcp://127.0.0.1:0"))
    check_meeting_point(at("env://"))
    check_meeting_point(at("file:///anything"))


def test_a_bad_meeting_point_is_told_before_any_wait():
    with pytest.raises(ConfigError, match=r"nowhere\.invalid is no host"):
        check_meeting_point(at("tcp://nowhere.invalid:29500"))
    elsewhere = "tcp://192.0.2.1:29500"  # an address kept for documentation: no machine has it
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not the machine of rank 0"):
        check_meeting_point(at(elsewhere))
    check_meeting_point(at(elsewhere, replace(FIRST, rank=1)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken"):
            check_meeting_point(at(f"tcp://127.0.0.1:{port}"))


def test_ranks_that_do_not_meet_are_a_lost_peer():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LostPeerError, match=f"2 ranks did not meet at tcp://127.0.0.1:{port} "):
        start_world(at(f"tcp://127.0.0.1:{port}"), timeout_s=1.0, device="cpu")


def ask(_: int) -> bool:
    return tells_first()


def test_one_of_the_ranks_speaks(ranks):
    assert sorted(ranks(3, ask, 0)) == [False, False, True]


def start(troubled: tuple[int, ...], missing: tuple[int, ...] = ()) -> tuple:
    """What this rank raises: its words, its exit status, whether another tells its own."""
    rank = int(os.environ["RANK"])
    if rank in missing:
        time.sleep(4.0)
        return ()
    trouble = DataError(f"rank {rank} has no data") if rank in troubled else None
    try:
        start_world(device="cpu", timeout_s=2.0 if missing else 60.0, trouble=trouble)
    except OptimusError as error:
        return str(error), error.exit_code, error.told_by_another
    return ("started",)


@pytest.mark.parametrize("troubled", [(0, 1, 2), (0, 2), (1, 2), (2,)])
def test_a_mistake_is_told_by_one_rank_and_ends_all(ranks, troubled):
    words = ranks(3, start, troubled, start_world=False)
    assert [status for _, status, _ in words] == [2, 2, 2]
    (speaker,) = [rank for rank, (_, _, by_another) in enumerate(words) if not by_another]
    assert speaker in troubled and (speaker == 0 or 0 not in troubled)
    assert words[speaker][0] == f"rank {speaker} has no data"


def test_ranks_without_a_mistake_start(ranks):
    assert ranks(3, start, (), start_world=False) == [("started",)] * 3


@pytest.mark.parametrize("missing", [(0,), (2,)])
def test_one_rank_tells_that_not_all_have_met(ranks, missing):
    words = [word for word in ranks(4, start, (), missing, start_world=False) if word]
    assert all("4 ranks did not meet" in word and status == 5 for word, status, _ in words)
    assert sorted(by_another for *_, by_another in words) == [False, True, True]


def start_over(interface: str) -> tuple:
    """What this rank raises where gloo is to use `interface`."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        start_world(device="cpu", timeout_s=60.0)
    except OptimusError as error:
        return str(error), error.exit_code, error.told_by_another
    return ("started",)


def test_an_absent_network_interface_is_named_by_one_rank(ranks):
    """Where the loopback interface is down, too: the meeting at a file needs none."""
    words = ranks(2, start_over, "absent0", start_world=False)
    for word, status, _ in words:
        assert word.startswith("GLOO_SOCKET_IFNAME: the network interface absent0 of ")
        assert "MASTER_ADDR" not in word and status == 2
    assert sorted(by_another for *_, by_another in words) == [False, True]


def test_a_mistake_is_told_though_others_are_missing(ranks):
    words = ranks(2, start, (0,), (1,), start_world=False)
    assert words[0] == ("rank 0 has no data", 2, None)


def test_what_libraries_print_while_ranks_connect_goes_to_standard_error(capfd):
    """gloo of torch 2.8 does, and it would stand before the JSON of a command on several ranks."""
    with silent_libraries():
        os.write(1, b"connected to 1 peer\n")
    os.write(1, b"{}\n")
    assert capfd.readouterr() == ("{}\n", "connected to 1 peer\n")
