"""Where ranks meet, and which of them speaks when one is lost."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from optimus.distributed.collectives import barrier
from optimus.distributed.meeting import check_meeting_point, listen_at_meeting_point
from optimus.distributed.world import silent_libraries, start_world, tells_first
from optimus.errors import ConfigError, DataError, LostPeerError, OptimusError
from optimus.launch.environment import LaunchEnv

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


def listening() -> set[str]:
    """Return HOST:PORT in hexadecimal of every TCP socket of this machine that listens."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line.split() for one in tables if one.exists() for line in one.open()]
    return {words[1] for words in lines if words[3] == "0A"}


def meet_on_loopback(port: int) -> tuple:
    """Listening sockets at `port` and new ones elsewhere, and the interface of gloo."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    before, rank = listening(), int(os.environ["RANK"])
    world = start_world(at(f"tcp://127.0.0.1:{port}", LaunchEnv(rank, 2, rank, 2, "")), 30.0, "cpu")
    barrier(world.everyone)
    new = listening() - before
    barrier(world.everyone)
    return new, os.environ["GLOO_SOCKET_IFNAME"]


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="this system has no /proc/net/tcp")
def test_a_world_on_loopback_listens_nowhere_else(ranks):
    """Neither the store nor gloo."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for new, interface in ranks(2, meet_on_loopback, port, start_world=False):
        assert interface == "lo"
        assert {address.partition(":")[0] for address in new} == {"0100007F"}


def test_the_first_rank_listens_at_the_meeting_address_alone(monkeypatch):
    def listen(host: str, *resolved: str, one_machine: bool = True) -> str | None:
        if resolved:
            found = [(socket.AF_INET, 1, 6, "", (address, 0)) for address in resolved]
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        descriptor = listen_at_meeting_point(urlsplit(f"tcp://{host}:0"), one_machine)
        if descriptor is None:
            return None
        with socket.socket(fileno=descriptor) as listener:
            assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            return listener.getsockname()[0]

    assert listen("127.0.0.2") == "127.0.0.2"
    assert listen("localhost") in ("127.0.0.1", "::1")
    assert listen("localhost", "127.0.0.1") == "127.0.0.1"
    # A launcher gave rank 0 localhost, and other machines its name.
    assert listen("localhost", "127.0.0.1", one_machine=False) is None
    # Debian maps a machine's name to 127.0.1.1, where other machines do not find it.
    assert listen("node0", "127.0.1.1") is None
    assert listen("node0", "127.0.1.1", "0.0.0.0") == "0.0.0.0"
    assert listen("0.0.0.0", "192.0.2.1", "0.0.0.0") == "0.0.0.0"
    with pytest.raises(ConfigError, match="MASTER_ADDR: node0 is not the machine of rank 0"):
        listen("node0", "192.0.2.1", "198.51.100.1")


def test_a_port_that_is_taken_meanwhile_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken"):
            start_world(at(f"tcp://127.0.0.1:{port}"), timeout_s=5.0, device="cpu")


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
