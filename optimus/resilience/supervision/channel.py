"""Signed messages between the supervisor and its agents.

A message is a JSON object of a type in `messages`. Each side proves that it knows the launch secret
before it sends or accepts messages: the connection's key is derived from the secret and from random
numbers of the two sides. Each message is sent with an HMAC-SHA256, which is computed with this key
from the message, its direction, and its number among the messages in this direction. The receiver
can therefore refuse a message of another connection, a repeated message and a changed message.
Messages are not encrypted, because they do not contain secrets.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import struct
import termios
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from optimus.errors import ConfigError, OptimusError, one_line, reason_of
from optimus.resilience.supervision.messages import AgentMessage, Message, SupervisorMessage

_MAC_BYTES = 32
_NONCE_BYTES = 16
_MOST_BYTES = 1 << 22
"""Maximum length of a message. A report on 16 ranks takes about 4 kB. A report on 256 ranks takes
2.7 MB if all ranks have printed a long error in non-ASCII characters and the output is as long as
possible."""
_PROOF_BYTES = 64
"""Maximum length of a message from a side that has not yet proved that it knows the secret."""
_SECRET_BYTES = 64
HANDSHAKE_S = 5.0
"""Time limit in seconds for the authentication of both sides of a new connection."""
_CLOSE_S = 1.0
"""Time limit in seconds for sending the last messages of a connection. A limit is needed because
the process at the other end may be suspended and read nothing."""
_LENGTH = struct.Struct(">I")
_SIOCOUTQNSD = 0x894B
"""Code of the ioctl request, on Linux, for the number of bytes in a socket's send buffer that have
not been sent."""

Side = Literal["agent", "supervisor"]
_OTHER: dict[Side, Side] = {"agent": "supervisor", "supervisor": "agent"}
_TYPES: dict[Side, TypeAdapter[Any]] = {
    "agent": TypeAdapter(AgentMessage),
    "supervisor": TypeAdapter(SupervisorMessage),
}
"""Maps each side of a connection to the types of the messages that it sends."""
_M = TypeVar("_M", bound=Message)


class PeerError(OptimusError):
    """Raised if the other side of a connection does not know the launch secret, or sent a message
    that is damaged, repeated, too long or of a wrong type."""


class Channel:
    """An authenticated connection between the supervisor and an agent. One task can send while
    another task receives."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, side: Side
    ) -> None:
        self._reader, self._writer, self._side = reader, writer, side
        self._key = b""
        self._sent = self._received = 0
        self.peer = str((writer.get_extra_info("peername") or ("unknown",))[0])
        """Address of the other side."""

    @classmethod
    async def open(
        cls,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        side: Side,
        secret: bytes,
    ) -> Self:
        """Authenticate both sides of a new connection, and return its Channel.

        Args:
            reader: Stream from the other side.
            writer: Stream to the other side. It is closed if this function raises an error.
            side: Role of this process in the connection.
            secret: The launch secret.

        Raises:
            PeerError: The other side does not know the secret, or does not answer in time.
        """
        channel = cls(reader, writer, side)
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                nonces = {side: secrets.token_bytes(_NONCE_BYTES)}
                writer.write(nonces[side])
                nonces[_OTHER[side]] = await reader.readexactly(_NONCE_BYTES)
                both = nonces["agent"] + nonces["supervisor"]
                channel._key = hmac.digest(secret, both, hashlib.sha256)
                await channel._send(b"")  # proves that this side knows the secret
                await channel._receive(_PROOF_BYTES)
        except (TimeoutError, OSError, EOFError, PeerError) as error:
            await channel.close()
            reason = str(error) or type(error).__name__
            raise PeerError(f"{channel.peer} is not a process of this launch: {reason}") from None
        return channel

    async def send(self, message: Message) -> None:
        """Send a message. Raises OSError if the connection is lost."""
        await self._send(message.model_dump_json().encode())

    async def _send(self, body: bytes) -> None:
        assert len(body) <= _MOST_BYTES, f"a message of {len(body)} bytes"
        mac = self._mac(self._side, self._sent, body)
        self._sent += 1
        self._writer.write(_LENGTH.pack(len(body)) + mac + body)
        await self._writer.drain()

    async def receive(self, kind: type[_M]) -> _M:
        """Wait for the next message and return it.

        Args:
            kind: Type that the message must have; `Message` to accept all types that the other side
                sends.

        Raises:
            PeerError: The message is not authentic, is damaged or has another type. The connection
                must be closed.
            OSError, EOFError: The connection is lost.
        """
        body = await self._receive(_MOST_BYTES)
        try:
            message = _TYPES[_OTHER[self._side]].validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, first["loc"]))
            raise PeerError(
                one_line(f"message with a wrong field: {field}: {first['msg']}")
            ) from None
        if not isinstance(message, kind):
            raise PeerError(f"received the message {message.kind!r} instead of {kind.__name__}")
        return message

    async def _receive(self, most_bytes: int) -> bytes:
        header = await self._reader.readexactly(_LENGTH.size + _MAC_BYTES)
        (length,) = _LENGTH.unpack_from(header)
        if length > most_bytes:
            raise PeerError(f"message of {length} bytes; at most {most_bytes} bytes are accepted")
        body = await self._reader.readexactly(length)
        mac = self._mac(_OTHER[self._side], self._received, body)
        if not hmac.compare_digest(mac, header[_LENGTH.size :]):
            raise PeerError("message without a valid signature")
        self._received += 1
        return body

    def unacknowledged_bytes(self) -> int:
        """Return the number of sent bytes that the other machine has not acknowledged.

        The kernel of that machine acknowledges bytes even if the process there is suspended.
        """
        try:
            fd = self._writer.get_extra_info("socket").fileno()
            waiting, unsent = (
                struct.unpack("i", fcntl.ioctl(fd, request, struct.pack("i", 0)))[0]
                for request in (termios.TIOCOUTQ, _SIOCOUTQNSD)
            )
        except OSError:  # the socket is closed, or this system is not Linux
            return 0
        return int(waiting - unsent)

    def abort(self) -> None:
        """Close the connection, and discard the bytes that have not been sent."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close the connection. May be called more than once."""
        self._writer.close()
        with contextlib.suppress(OSError):  # OSError includes TimeoutError
            async with asyncio.timeout(_CLOSE_S):
                await self._writer.wait_closed()
        self._writer.transport.abort()  # discards what was not sent in time

    def _mac(self, sender: Side, number: int, body: bytes) -> bytes:
        about = f"{sender} {number} ".encode()
        return hmac.digest(self._key, about + body, hashlib.sha256)


def make_private(folder: Path) -> None:
    """Create the supervisor's folder, in which the launch secret is stored, if the folder does not
    exist.

    Raises:
        ConfigError: The path is not a folder in which only this user can write.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if (
        not stat.S_ISDIR(status.st_mode)
        or status.st_uid != os.geteuid()
        or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    ):
        raise ConfigError(
            f"{folder}: not a folder in which only you can write; remove it and launch again"
        )


def create_secret(path: Path) -> bytes:
    """Create a launch secret, with which the processes of a launch authenticate. Write the secret
    to the file `path`, which only this user can read. Return the secret."""
    secret = secrets.token_hex(_SECRET_BYTES // 2).encode()
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    return secret


def read_secret(path: Path) -> bytes:
    """Return the launch secret in a file.

    Raises:
        ConfigError: The file is missing or damaged, or other users can read or replace the file.
    """
    remedy = "remove it and launch again"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path}: not a regular file; {remedy}")
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise ConfigError(
                    f"{path}: others can read or write the launch secret; {remedy} in a directory "
                    "that only you can write"
                )
            secret = file.read(_SECRET_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: No such file or directory; launch again") from None
    except OSError as error:
        raise ConfigError(f"{path}: {reason_of(error)}; {remedy}") from None
    if len(secret) != _SECRET_BYTES:
        raise ConfigError(f"{path}: damaged; {remedy}")
    return secret
