"""Tests of signed messages: peers without the secret, changed, repeated and endless messages."""

from __future__ import annotations

import asyncio
import os
import socket
import struct

import pytest

from optimus.errors import ConfigError
from optimus.resilience.supervision.channel import (
    Channel,
    PeerError,
    create_secret,
    read_secret,
)

SECRET = b"a" * 64


async def streams():
    """Return reader and writer of both ends of a connection."""
    left, right = socket.socketpair()
    return await asyncio.open_connection(sock=left), await asyncio.open_connection(sock=right)


async def channels(secret=SECRET):
    agent, supervisor = await streams()
    return await asyncio.gather(
        Channel.open(*agent, "agent", SECRET),
        Channel.open(*supervisor, "supervisor", secret),
        return_exceptions=True,
    )


def test_messages_arrive_in_order_on_both_sides():
    async def run():
        agent, supervisor = await channels()
        for number in range(5):
            await agent.send({"number": number, "text": "\udcff"})
            await supervisor.send({"number": -number})
        received = [await supervisor.receive() for _ in range(5)]
        answers = [await agent.receive() for _ in range(5)]
        assert [message["number"] for message in received] == [0, 1, 2, 3, 4]
        assert answers[4] == {"number": -4} and received[0]["text"] == "\udcff"
        await agent.close()
        with pytest.raises(EOFError):
            await supervisor.receive()
        await supervisor.close()

    asyncio.run(run())


def test_suspended_process_acknowledges_all_bytes():
    """A process that reads nothing is no cut of the network, also if its buffers are full."""

    async def run():
        server = socket.create_server(("127.0.0.1", 0))
        reader, writer = await asyncio.open_connection(*server.getsockname())
        accepted, _ = server.accept()
        channel = Channel(reader, writer, "agent")
        for size in (100, 50_000_000):
            writer.write(bytes(size))
            await asyncio.sleep(0.5)
            assert channel.unacknowledged_bytes() == 0
        assert writer.transport.get_write_buffer_size()
        channel.abort()
        accepted.close()
        server.close()

    asyncio.run(run())


def test_side_with_another_secret_is_refused():
    first, second = asyncio.run(channels(b"b" * 64))
    for error in (first, second):
        assert isinstance(error, PeerError) and "is not a process of this launch" in str(error)


def test_two_agents_do_not_accept_each_other():
    """An attacker may reflect the messages of an agent."""

    async def run():
        left, right = await streams()
        return await asyncio.gather(
            Channel.open(*left, "agent", SECRET),
            Channel.open(*right, "agent", SECRET),
            return_exceptions=True,
        )

    assert all(isinstance(error, PeerError) for error in asyncio.run(run()))


@pytest.mark.parametrize("how", ["repeated", "changed", "of another connection", "too long"])
def test_message_that_is_not_authentic_is_refused(how):
    async def run():
        agent, supervisor = await channels()
        sent, write = [], agent._writer.write
        agent._writer.write = sent.append
        await agent.send({"do": "start"})
        agent._writer.write = write
        (message,) = sent
        if how == "repeated":
            write(message)
            assert await supervisor.receive() == {"do": "start"}
        elif how == "changed":
            message = message.replace(b"start", b"stoop")
        elif how == "of another connection":
            _, supervisor = await channels()
            supervisor._reader.feed_data(message)
        else:
            message = struct.pack(">I", 1 << 31) + message[4:]
        write(message)
        with pytest.raises(PeerError, match="signature|bytes"):
            await supervisor.receive()

    asyncio.run(run())


def test_silent_or_endless_peer_is_refused(monkeypatch):
    monkeypatch.setattr("optimus.resilience.supervision.channel.HANDSHAKE_S", 0.2)

    async def run(data):
        (_, writer), supervisor = await streams()
        writer.write(data)
        with pytest.raises(PeerError):
            await Channel.open(*supervisor, "supervisor", SECRET)

    for data in (b"", b"x" * 100, os.urandom(3_000_000)):
        asyncio.run(run(data))


def test_secret_is_for_this_user_only(tmp_path):
    path = tmp_path / "secret"
    before = os.umask(0)
    try:
        secret = create_secret(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600 and read_secret(path) == secret
    assert create_secret(path) != secret and len(secret) == 64
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="others may read or write the launch secret"):
        read_secret(path)
    path.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        read_secret(path)
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_secret(path)
    path.unlink()
    (tmp_path / "elsewhere").write_bytes(b"x")
    path.write_bytes(secret[:-1])
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="damaged; remove it"):
        read_secret(path)
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="a symbolic link .*; remove it and launch again"):
        read_secret(path)
    create_secret(path)
    assert not path.is_symlink() and (tmp_path / "elsewhere").read_bytes() == b"x"
