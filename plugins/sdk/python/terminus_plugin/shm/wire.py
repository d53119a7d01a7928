"""Records of the wire protocol, version 1; the Go package plugins/sdk/shm documents them."""

from __future__ import annotations

import os
import socket
import struct
from typing import NamedTuple

from ..regions import close_all

MAGIC = b"TSHM1\0\0\0"
SCHEME = b"shm1:"
TOKEN_SIZE = 32
MAX_PATH = 107  # of a unix socket
MAX_SIZE = 1 << 46

WELCOME, MAP, MAPPED, WITHDRAW, UNMAPPED = 1, 2, 3, 4, 5
OK, UNKNOWN, REFUSED, CROWDED = 0, 1, 2, 3

SEND_BOUND = 1  # seconds that a record may wait for room in the socket of a peer that does not read

_HELLO = struct.Struct("<8sQII32s")
_RECORD = struct.Struct("<IIQQ")
_LONGEST = max(_HELLO.size, _RECORD.size) + 1


class BadRecord(Exception):
    """A record of another form; the connection ends."""


class Record(NamedTuple):
    kind: int
    code: int = 0
    region: int = 0
    size: int = 0

    def encode(self) -> bytes:
        return _RECORD.pack(*self)

    @staticmethod
    def decode(b: bytes) -> "Record":
        """Raises BadRecord."""
        if len(b) != _RECORD.size:
            raise BadRecord(f"a record of {len(b)} bytes, not {_RECORD.size}")
        return Record(*_RECORD.unpack(b))


class Hello(NamedTuple):
    """Names the writer."""

    incarnation: int
    epoch: int
    token: bytes

    def encode(self) -> bytes:
        return _HELLO.pack(MAGIC, self.incarnation, self.epoch, 0, self.token)

    @staticmethod
    def decode(b: bytes) -> "Hello":
        """Raises BadRecord."""
        if len(b) == _HELLO.size:
            magic, incarnation, epoch, zero, token = _HELLO.unpack(b)
            if magic == MAGIC and zero == 0:
                return Hello(incarnation, epoch, token)
        raise BadRecord(f"a first record of {len(b)} bytes that is no hello")


def prepare(c: socket.socket) -> None:
    """Bound the sending of a socket."""
    c.setblocking(True)
    c.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_BOUND, 0))


def bound_receive(c: socket.socket, seconds: int) -> None:
    """Bound the wait for a record; 0 for no bound. Beyond it receive raises BlockingIOError."""
    c.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))


def send(c: socket.socket, b: bytes, *fds: int) -> None:
    """Write one record. Calls for one connection must not overlap."""
    if fds:
        socket.send_fds(c, [b], fds, socket.MSG_NOSIGNAL)
    else:
        c.send(b, socket.MSG_NOSIGNAL)


def receive(c: socket.socket) -> "tuple[bytes, list[int]]":
    """Read one record, which the caller owns the descriptors of. Raises EOFError at the end of the stream."""
    try:
        data, fds, flags, _ = socket.recv_fds(c, _LONGEST, 8, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # the end, with a record that the other had not read
        raise EOFError from None
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(fds)
        raise BadRecord("a record that is too long, or has too many descriptors")
    if not data:
        close_all(fds)
        raise EOFError
    return data, fds


def of_this_user(c: socket.socket) -> int:
    """Make sure that the process at the other end has our user id, and return its process id. Raises OSError."""
    pid, uid, _ = struct.unpack("3i", c.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise PermissionError(
            f"process {pid} belongs to user {uid}, this one to user {os.geteuid()}; "
            "run both engines as one user, or choose another backend for the pair"
        )
    return pid


def hang_up(c: socket.socket, how: int = socket.SHUT_RDWR) -> None:
    """End a direction of the stream, or both; whoever reads finds the end."""
    try:
        c.shutdown(how)
    except OSError:  # it has ended
        pass
