"""The owner's side: regions that the plugins of peers may map."""

from __future__ import annotations

import collections
import hmac
import os
import socket
import threading
import time
from typing import Any

from ..backend import Cause, Error, Lane, Level, Peer, Region, Start
from ..regions import close_all
from . import wire
from .remote import Remote
from .wire import Hello, Record

WITHDRAW_BOUND = 15.0  # longer than an engine lets a plugin be silent before it kills it
ADMIT_BOUND = 5  # seconds that a writer may take to say who it is, and then waits for its PeerAccept
MAX_INBOUND = 1024  # connections in all
MAX_WAITING = 64  # of them not yet admitted
MAX_OF_WRITER = 4  # a writer needs one, and one more while it reconnects
CLOSE_BOUND = 5.0


class Share:
    """What this plugin process shares with its peers, and what it maps of theirs. Its methods are those of
    Backend of the same names, to be inherited or called; all may be called from any thread."""

    def listen(self, s: Start) -> None:
        """Open the socket. Call it from start, which returns endpoint."""
        self._start = s
        self._path = os.path.abspath(os.path.join(s.runtime_dir, "shm"))
        if len(os.fsencode(self._path)) > wire.MAX_PATH:
            raise OSError(
                f"shm: socket path {self._path} is longer than the {wire.MAX_PATH} bytes that are possible; "
                "use a shorter runtime directory"
            )
        self._mu = threading.Lock()
        self._admitted = threading.Condition(self._mu)  # a writer was added, or the share is closed
        self._regions: "dict[int, Region]" = {}
        self._writers: "dict[int, Hello]" = {}  # by the handle of PeerAccept
        self._inbound: "set[Inbound]" = set()
        self._waiting = 0  # of _inbound, those not admitted
        self._remotes: "set[Remote]" = set()
        self._counts: "collections.Counter[str]" = collections.Counter()
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self._path)
        os.chmod(self._path, 0o600)
        self._listener.listen(MAX_WAITING)
        self._accepting = threading.Thread(target=self._accept_all, name="shm-accept", daemon=True)
        self._accepting.start()

    @property
    def endpoint(self) -> bytes:
        """What start returns."""
        return wire.SCHEME + os.fsencode(self._path)

    # Regions

    def add_region(self, r: Region) -> None:
        """Let admitted peers map the region."""
        with self._mu:
            self._regions[r.id] = r

    def remove_region(self, r: Region) -> None:
        """Take the region away from all peers: afterwards none maps it any more, each has said so or its
        process is gone. Waits at most WITHDRAW_BOUND; what a peer did not let go of then is logged, and its
        lease goes on telling the engine."""
        with self._mu:
            self._regions.pop(r.id, None)
            conns = list(self._inbound)
        gone = [(c.pid, event) for c in conns if (event := c.withdraw(r.id)) is not None]
        late = _await(gone)
        if late:
            self._count("withdraw_late")
            self._start.log(
                Level.ERROR,
                f"shm: region {r.id} is still mapped by processes {late} after {WITHDRAW_BOUND:.0f} s; "
                "they have to end before its memory is free",
            )

    # Writers

    def accept(self, p: Peer) -> None:
        """Admit a writer."""
        with self._mu:
            self._writers[p.handle] = Hello(p.incarnation, p.epoch, p.token)
            self._admitted.notify_all()

    def unaccept(self, p: Peer) -> None:
        """Dismiss the writer and wait, at most WITHDRAW_BOUND, until it maps nothing any more."""
        with self._mu:
            self._writers.pop(p.handle, None)
            conns = [c for c in self._inbound if c.writer == p.handle]
        for c in conns:
            wire.hang_up(c.conn, socket.SHUT_WR)
        late = _await([(c.pid, c.over) for c in conns])
        if late:
            self._count("withdraw_late")
            self._start.log(
                Level.ERROR, f"shm: dismissed writer {p.node} (peer {p.handle}) has not let go: processes {late}"
            )

    # Targets

    def add_peer(self, p: Peer) -> Lane:
        """Dial the peer and keep the Remote in p.data."""
        p.data = self.dial(p)
        return Lane.SHM

    def remove_peer(self, p: Peer) -> None:
        """Close the Remote that add_peer made."""
        if isinstance(p.data, Remote):
            p.data.close()

    def dial(self, p: Peer) -> Remote:
        """Connect to the share of the peer's plugin; the peer's engine may admit us later. The caller closes
        the Remote. Raises Error."""
        path = p.endpoint[len(wire.SCHEME) :]
        if not p.same_host:
            raise Error(
                Cause.PEER_UNREACHABLE,
                f"shm: engine {p.node} is on another machine, shared memory ends at this one; "
                "choose another backend for the pair",
            )
        if not p.endpoint.startswith(wire.SCHEME + b"/") or len(path) > wire.MAX_PATH:
            raise Error(
                Cause.PEER_UNREACHABLE,
                f"shm: the endpoint of engine {p.node} is not one of this backend: {p.endpoint[:64]!r}",
            )
        r = Remote(self, p.node, os.fsdecode(path), Hello(self._start.incarnation, self._start.epoch, p.token))
        r.connect()
        with self._mu:
            closed = self._closed
            self._remotes.add(r)
        if closed:
            r.close()
            raise Error(Cause.SHUTDOWN, "shm: closed")
        return r

    def forget(self, r: Remote) -> None:
        """Called by a Remote that is closed."""
        with self._mu:
            self._remotes.discard(r)

    # The rest

    def counters(self) -> "dict[str, int]":
        """What went wrong."""
        with self._mu:
            return {f"shm.{name}": n for name, n in self._counts.items()}

    def close(self) -> None:
        """Unmap everything of others, and forget what was shared."""
        with self._mu:
            if self._closed:
                return
            self._closed = True
            remotes, conns = list(self._remotes), list(self._inbound)
            self._admitted.notify_all()
        wire.hang_up(self._listener)
        for c in conns:
            wire.hang_up(c.conn)
        deadline = time.monotonic() + CLOSE_BOUND
        for r in remotes:
            r.close()
        for c in conns:
            c.over.wait(max(0.0, deadline - time.monotonic()))
        self._accepting.join(max(0.0, deadline - time.monotonic()))
        self._listener.close()
        try:
            os.unlink(self._path)
        except FileNotFoundError:
            pass
        if not all(r.wait_closed(max(0.0, deadline - time.monotonic())) for r in remotes):
            raise TimeoutError("shm: a copy into the memory of a peer does not end")

    def _count(self, name: str) -> None:
        with self._mu:
            self._counts[name] += 1

    def _accept_all(self) -> None:
        while True:
            try:
                conn, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                self._count("accept_errors")
                time.sleep(0.05)  # out of descriptors, most likely: others may give some back
                continue
            self._enter(conn)

    def _enter(self, conn: socket.socket) -> None:
        """Take a connection in, if there is room for it."""
        wire.prepare(conn)
        try:
            pid = wire.of_this_user(conn)
        except OSError as e:
            self._count("refused")
            self._start.log(Level.WARN, f"shm: connection refused: {e}")
            conn.close()
            return
        c = Inbound(self, conn, pid)
        with self._mu:
            full = len(self._inbound) >= MAX_INBOUND or self._waiting >= MAX_WAITING
            if not full and not self._closed:
                self._inbound.add(c)
                self._waiting += 1
                threading.Thread(target=c.serve, name="shm-writer", daemon=True).start()
                return
            self._counts["refused"] += 1
        if full:
            _try_send(conn, Record(wire.WELCOME, wire.CROWDED))
        conn.close()

    def find_writer(self, h: Hello) -> "tuple[int, int] | None":
        """The handle of the writer that h names, and how many connections it has. _mu is held."""
        for handle, w in self._writers.items():
            if hmac.compare_digest(w.token, h.token) and w[:2] == h[:2]:
                return handle, sum(c.writer == handle for c in self._inbound)
        return None


class NotAdmitted(Exception):
    """The writer was told so."""


class Inbound:
    """A connection of a writer, seen by the owner of the regions."""

    def __init__(self, share: Share, conn: socket.socket, pid: int):
        self.share, self.conn, self.pid = share, conn, pid
        self.writer: "int | None" = None  # once admitted; guarded by Share._mu
        self.over = threading.Event()  # the writer has let go of everything
        self._mu = threading.Lock()  # also keeps records from overlapping
        self._mapped: "dict[int, threading.Event]" = {}  # set when the writer has let go of the region

    def serve(self) -> None:
        """Runs on a thread of its own until the writer is gone."""
        s = self.share
        try:
            self._admit()
            self._answer()
        except EOFError:
            pass
        except NotAdmitted:
            with s._mu:
                s._counts["refused"] += 1
        except (OSError, wire.BadRecord):
            with s._mu:
                if not s._closed:
                    s._counts["broken"] += 1
            if self.writer is not None:
                # Whatever it was, only the end of the stream proves that the writer has let go.
                wire.hang_up(self.conn, socket.SHUT_WR)
                self._drain()
        self.conn.close()
        with s._mu:
            s._inbound.discard(self)
            if self.writer is None:
                s._waiting -= 1
        with self._mu:
            for event in self._mapped.values():
                event.set()
            self._mapped.clear()
        self.over.set()

    def _drain(self) -> None:
        """Read until the writer is gone."""
        wire.bound_receive(self.conn, 0)
        while True:
            try:
                close_all(wire.receive(self.conn)[1])
            except (EOFError, OSError):
                return
            except wire.BadRecord:
                pass
            if self.share._closed:
                return
            time.sleep(0.001)  # it may go on talking, at our pace

    def _admit(self) -> None:
        """Read who connects and wait until that writer is named by PeerAccept."""
        wire.bound_receive(self.conn, ADMIT_BOUND)
        data, fds = wire.receive(self.conn)
        close_all(fds)
        h = Hello.decode(data)
        wire.bound_receive(self.conn, 0)
        s = self.share
        deadline = time.monotonic() + ADMIT_BOUND
        with s._mu:
            while True:
                found = s.find_writer(h)
                left = deadline - time.monotonic()
                if found is not None or s._closed or left <= 0:
                    break
                s._admitted.wait(left)
            if s._closed:
                raise NotAdmitted
            crowded = found is not None and found[1] >= MAX_OF_WRITER
            if found is not None and not crowded:
                self.writer = found[0]
                s._waiting -= 1
        if self.writer is None:
            if not crowded:
                s._start.log(
                    Level.WARN,
                    f"shm: process {self.pid} is no admitted writer (incarnation {h.incarnation}, epoch {h.epoch})",
                )
            _try_send(self.conn, Record(wire.WELCOME, wire.CROWDED if crowded else wire.REFUSED))
            raise NotAdmitted
        self._send(Record(wire.WELCOME))

    def _answer(self) -> None:
        """Serve the writer until the end of the stream."""
        while True:
            data, fds = wire.receive(self.conn)
            close_all(fds)
            r = Record.decode(data)
            if r.kind == wire.MAP:
                self._map(r.region)
            elif r.kind == wire.UNMAPPED:
                with self._mu:
                    event = self._mapped.pop(r.region, None)
                if event is None:
                    raise wire.BadRecord("UNMAPPED of a region that is not mapped")
                event.set()
            else:
                raise wire.BadRecord(f"a record of unknown kind {r.kind}")

    def _map(self, id: int) -> None:
        """Hand a region over. The descriptors stay open meanwhile: remove_region waits for _mu."""
        with self._mu:
            with self.share._mu:
                r = self.share._regions.get(id)
            if r is None:
                wire.send(self.conn, Record(wire.MAPPED, wire.UNKNOWN, id).encode())
                return
            if id in self._mapped:
                raise wire.BadRecord("MAP of a region that is mapped")
            self._mapped[id] = threading.Event()
            wire.send(self.conn, Record(wire.MAPPED, wire.OK, id, r.size).encode(), r.fd, r.lease)

    def withdraw(self, id: int) -> "threading.Event | None":
        """Ask for a region back. The event is set when the writer has let go; None: it maps none."""
        with self._mu:
            event = self._mapped.get(id)
            if event is not None and not _try_send(self.conn, Record(wire.WITHDRAW, 0, id)):
                wire.hang_up(self.conn, socket.SHUT_WR)  # it does not read; when it does, it finds the end
            return event

    def _send(self, r: Record) -> None:
        with self._mu:
            wire.send(self.conn, r.encode())


def _try_send(conn: socket.socket, r: Record) -> bool:
    try:
        wire.send(conn, r.encode())
    except OSError:
        return False
    return True


def _await(gone: "list[tuple[Any, threading.Event]]") -> "list[int]":
    """Wait for all, at most WITHDRAW_BOUND; the process ids of the late ones."""
    deadline = time.monotonic() + WITHDRAW_BOUND
    return [pid for pid, event in gone if not event.wait(max(0.0, deadline - time.monotonic()))]
