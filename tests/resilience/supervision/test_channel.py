"""Tests of signed messages. A channel refuses peers without the secret, and messages that are
changed, repeated or endless."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct

import pytest

from optimus.errors import ConfigError
from optimus.resilience.supervision.attempt import Progress
from optimus.resilience.supervision.channel import (
    Channel,
    PeerError,
    create_secret,
    read_secret,
)
from optimus.resilience.supervision.messages import Hello, Kill, Message, Report, Staged

SECRET = b"a" * 64


async def streams():
    """Return the pair (reader, writer) of each of the two ends of a connection."""
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
            await agent.send(Staged(problem=f"{number} \ufffd"))
            await supervisor.send(Kill(attempt=number + 1))
        received = [await supervisor.receive(Staged) for _ in range(5)]
        answers = [await agent.receive(Message) for _ in range(5)]
        assert [message.problem for message in received] == [f"{n} \ufffd" for n in range(5)]
        assert answers[4] == Kill(attempt=5)
        await agent.close()
        with pytest.raises(EOFError):
            await supervisor.receive(Message)
        await supervisor.close()

    asyncio.run(run())


def test_suspended_process_acknowledges_all_bytes():
    """A suspended process reads nothing, but the kernel of its machine acknowledges all bytes that
    the kernel has received, also if the buffers are full. The number of unacknowledged bytes is
    therefore 0, so a suspended process does not count as a cut of the network."""

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
    """An agent must refuse a peer that claims to be an agent. Otherwise, an attacker could send the
    signed messages of an agent back to the same agent."""

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
        await agent.send(Staged(problem="start"))
        agent._writer.write = write
        (message,) = sent
        if how == "repeated":
            write(message)
            assert await supervisor.receive(Staged) == Staged(problem="start")
        elif how == "changed":
            message = message.replace(b"start", b"stoop")
        elif how == "of another connection":
            _, supervisor = await channels()
            supervisor._reader.feed_data(message)
        else:
            message = struct.pack(">I", 1 << 31) + message[4:]
        write(message)
        with pytest.raises(PeerError, match="signature|bytes"):
            await supervisor.receive(Message)

    asyncio.run(run())


PROGRESS = [3, 40, "update", 0.5, 2, 0, {"start": 1.0}]
REPORT = {"kind": "report", "attempt": 1, "ranks": [{"rank": 0, "pid": 7}], "lines": []}


def with_progress(index, value):
    """Return a report whose progress has `value` at position `index`."""
    progress = [*PROGRESS[:index], value, *PROGRESS[index + 1 :]]
    return REPORT | {"ranks": [{"rank": 0, "pid": 7, "progress": progress}]}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (with_progress(0, 3), ""),
        (REPORT | {"attempt": "1"}, "report.attempt"),
        (REPORT | {"attempt": -1}, "report.attempt"),
        (REPORT | {"attempt": True}, "report.attempt"),
        (REPORT | {"lines": None}, "report.lines"),
        (REPORT | {"lines": [1]}, "report.lines.0"),
        (REPORT | {"ranks": {}}, "report.ranks"),
        (REPORT | {"ranks": [{"rank": 0}]}, "report.ranks.0.pid: Field required"),
        (REPORT | {"more": 1}, "report.more: Extra inputs"),
        (with_progress(0, -1), "negative progress"),
        (with_progress(2, "sleep"), "report.ranks.0.progress.2"),
        (with_progress(3, float("nan")), "report.ranks.0.progress.3"),
        (with_progress(6, {"start": "1"}), "report.ranks.0.progress.6.start"),
        ({"kind": "report"}, "Field required"),
        ({"kind": "kill", "attempt": 1}, "does not match any of the expected tags"),
        ({}, "Unable to extract tag"),
        ([], "should be an object"),
        (None, "should be an object"),
    ],
)
def test_message_of_a_wrong_type_is_refused(content, problem):
    """A message with a valid signature can have wrong fields. Such a message must be refused with a
    text that names the field."""

    async def run():
        agent, supervisor = await channels()
        await agent._send(json.dumps(content).encode())
        if problem:
            with pytest.raises(PeerError, match=f"message with a wrong field: .*{problem}"):
                await supervisor.receive(Message)
        else:
            report = await supervisor.receive(Report)
            assert report.ranks[0].progress == Progress(*PROGRESS)

    asyncio.run(run())


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'{"kind": "\xff"}', b"1e999"])
def test_signed_message_that_is_no_object_is_refused(body):
    async def run():
        agent, supervisor = await channels()
        await agent._send(body)
        with pytest.raises(PeerError, match="wrong field"):
            await supervisor.receive(Message)

    asyncio.run(run())


def test_message_of_an_unexpected_kind_is_refused():
    async def run():
        agent, supervisor = await channels()
        await agent.send(Staged(problem=""))
        with pytest.raises(PeerError, match="message 'staged' instead of Hello"):
            await supervisor.receive(Hello)

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
    with pytest.raises(ConfigError, match="others can read or write the launch secret"):
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
