"""Where ranks meet, and which of them speaks when one is lost."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from optimus.dist.meeting import check_meeting_point
from optimus.dist.world import start_world, tells_first
from optimus.errors import ConfigError, LostPeerError
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
