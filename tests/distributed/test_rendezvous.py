"""Tests of the rendezvous of ranks: checks of the address, and errors of ranks that cannot
start."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from optimus.distributed.agreement import RunEnded
from optimus.distributed.collectives import barrier
from optimus.distributed.rendezvous import check_meeting_point, listen_at_meeting_point
from optimus.distributed.world import silent_libraries, start_world
from optimus.errors import DataError, LaunchError, LostPeerError
from optimus.launch.environment import ATTEMPT, LaunchEnv

FIRST = LaunchEnv(0, 2, 0, 2, "")


def at(where: str, launch: LaunchEnv = FIRST) -> LaunchEnv:
    return replace(launch, init_method=where)


def test_a_good_meeting_point_passes():
    check_meeting_point(at("tcp://127.0.0.1:0"))
    check_meeting_point(at("env://"))
    check_meeting_point(at("file:///anything"))


def test_a_bad_meeting_point_is_refused_before_any_wait():
    with pytest.raises(LaunchError, match=r"nowhere\.invalid is not a host"):
        check_meeting_point(at("tcp://nowhere.invalid:29500"))
    for host in ("a..b", "x" * 70):
        with pytest.raises(LaunchError, match=rf"{host} is not a host name .*\(not a valid name\)"):
            check_meeting_point(at(f"tcp://{host}:29500"))
    elsewhere = "tcp://192.0.2.1:29500"  # reserved for documentation
    with pytest.raises(LaunchError, match=r"192\.0\.2\.1 is not the machine of rank 0"):
        check_meeting_point(at(elsewhere))
    check_meeting_point(at(elsewhere, replace(FIRST, rank=1)))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} of 127.0.0.1 is in use"):
            check_meeting_point(at(f"tcp://127.0.0.1:{port}"))


def test_port_in_use_is_no_mistake_of_the_user_in_a_supervised_run(monkeypatch):
    """The supervisor of a run chose a port that was free at that time. If another program uses the
    port now, the supervisor chooses another port, so the error is not a mistake of the user."""
    monkeypatch.setenv(ATTEMPT, "3")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LostPeerError, match=f"port {port} of 127.0.0.1 is in use; the super"):
            check_meeting_point(at(f"tcp://127.0.0.1:{port}"))


def test_ranks_that_do_not_meet_are_lost_peers():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(RunEnded, match=f"2 ranks did not meet at tcp://127.0.0.1:{port} ") as ended:
        start_world(at(f"tcp://127.0.0.1:{port}"), timeout_s=1.0, device="cpu")
    assert ended.value.exit_code == 5 and ended.value.prints


def listening_sockets() -> set[str]:
    """Return HOST:PORT, in hexadecimal, of each listening TCP socket of this machine."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables if table.exists() for line in table.open()]
    return {words[1] for words in lines if words[3] == "0A"}


def meet_on_loopback(port: int) -> tuple:
    """Start a world at 127.0.0.1. Return the new listening sockets and gloo's interface."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    before, rank = listening_sockets(), int(os.environ["RANK"])
    world = start_world(at(f"tcp://127.0.0.1:{port}", LaunchEnv(rank, 2, rank, 2, "")), 30.0, "cpu")
    barrier(world.everyone)
    new = listening_sockets() - before
    barrier(world.everyone)
    return new, os.environ["GLOO_SOCKET_IFNAME"]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="this system has no /proc/net/tcp")
def test_a_world_on_loopback_listens_nowhere_else(ranks):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for new, interface in ranks(2, meet_on_loopback, port, start_world=False):
        assert interface == "lo"
        assert {address.partition(":")[0] for address in new} == {"0100007F"}


def test_the_first_rank_listens_at_the_meeting_address_alone(monkeypatch):
    def listen(host: str, *resolved: str, is_local: bool = True) -> str | None:
        if resolved:
            answer = [(socket.AF_INET, 1, 6, "", (address, 0)) for address in resolved]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
        descriptor = listen_at_meeting_point(urlsplit(f"tcp://{host}:0"), is_local)
        if descriptor is None:
            return None
        with socket.socket(fileno=descriptor) as listener:
            assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return listener.getsockname()[0]

    assert listen("127.0.0.2") == "127.0.0.2"
    assert listen("localhost") in ("127.0.0.1", "::1")
    assert listen("localhost", "127.0.0.1") == "127.0.0.1"
    # A launcher can set MASTER_ADDR to localhost on the machine of rank 0. On other machines,
    # MASTER_ADDR is then the name of the machine of rank 0.
    assert listen("localhost", "127.0.0.1", is_local=False) is None
    # A supervisor gives all ranks the same address, also the ranks of emulated nodes.
    with monkeypatch.context() as supervised:
        supervised.setenv(ATTEMPT, "1")
        assert listen("127.0.0.2", "127.0.0.2", is_local=False) == "127.0.0.2"
        assert listen("node0", "127.0.1.1", is_local=False) is None
    # Debian resolves a machine's own name to 127.0.1.1, which other machines cannot reach.
    assert listen("node0", "127.0.1.1") is None
    assert listen("node0", "127.0.1.1", "0.0.0.0") == "0.0.0.0"
    assert listen("0.0.0.0", "192.0.2.1", "0.0.0.0") == "0.0.0.0"
    with pytest.raises(LaunchError, match="MASTER_ADDR: node0 is not the machine of rank 0"):
        listen("node0", "192.0.2.1", "198.51.100.1")


def test_a_port_that_another_program_takes_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} of 127.0.0.1 is in use"):
            start_world(at(f"tcp://127.0.0.1:{port}"), timeout_s=5.0, device="cpu")


def start(failing: tuple[int, ...], missing: tuple[int, ...] = ()) -> RunEnded | None:
    """Start the world. Return the RunEnded that this rank raises, or None.

    Ranks in `failing` fail with a DataError. Ranks in `missing` do not start the world.
    """
    rank = int(os.environ["RANK"])
    if rank in missing:
        time.sleep(4.0)
        return None
    failure = DataError(f"rank {rank} has no data") if rank in failing else None
    try:
        start_world(device="cpu", timeout_s=2.0 if missing else 60.0, failure=failure)
    except RunEnded as ended:
        return ended
    return None


@pytest.mark.parametrize("failing", [(0, 1, 2), (1, 2)])
def test_a_failure_is_printed_once_and_ends_all(ranks, failing):
    ends = ranks(3, start, failing, start_world=False)
    assert [ended.exit_code for ended in ends] == [2, 2, 2]
    (printing,) = [rank for rank, ended in enumerate(ends) if ended.prints]
    assert printing in failing and (printing == 0 or 0 not in failing)
    assert {str(ended) for ended in ends} == {f"rank {printing} has no data"}


def test_ranks_without_a_failure_start(ranks):
    assert ranks(3, start, (), start_world=False) == [None] * 3


@pytest.mark.parametrize("missing", [(0,), (2,)])
def test_missing_ranks_are_printed_once(ranks, missing):
    ends = [ended for ended in ranks(4, start, (), missing, start_world=False) if ended]
    assert all("4 ranks did not meet" in str(ended) and ended.exit_code == 5 for ended in ends)
    assert sorted(ended.prints for ended in ends) == [False, False, True]


def start_over(interface: str) -> RunEnded | None:
    """Start a world with gloo on the given network interface. Return the RunEnded that this rank
    raises, or None."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        start_world(device="cpu", timeout_s=60.0)
    except RunEnded as ended:
        return ended
    return None


def test_an_absent_network_interface_is_printed_once(ranks):
    """GLOO_SOCKET_IFNAME names an interface that does not exist. Both ranks raise the error, but
    only one of them prints the error."""
    ends = ranks(2, start_over, "absent0", start_world=False)
    for ended in ends:
        assert str(ended).startswith("GLOO_SOCKET_IFNAME: the network interface absent0 of ")
        assert "MASTER_ADDR" not in str(ended) and ended.exit_code == 2
    assert [ended.prints for ended in ends].count(True) == 1  # either rank can print


def test_a_failure_is_printed_although_others_are_missing(ranks):
    ended = ranks(2, start, (0,), (1,), start_world=False)[0]
    assert str(ended) == "rank 0 has no data" and ended.exit_code == 2 and ended.prints


def test_output_of_libraries_while_ranks_connect_goes_to_standard_error(capfd):
    with silent_libraries():
        os.write(1, b"connected to 1 peer\n")  # as gloo of torch 2.8 does
    os.write(1, b"{}\n")
    assert capfd.readouterr() == ("{}\n", "connected to 1 peer\n")
