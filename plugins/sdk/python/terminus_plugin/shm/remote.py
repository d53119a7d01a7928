"""The writer's side: mappings of the regions of a peer."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

from .. import memory
from ..backend import Cause, Error, Stop, Stopped
from ..once import Once, wait_any
from ..regions import close_all
from . import wire
from .wire import Hello, Record

if TYPE_CHECKING:
    from ..op import Op
    from .share import Share

ANSWER_BOUND = 10.0  # the wait for WELCOME (longer than the owner's ADMIT_BOUND) and for MAPPED


class Remote:
    """The memory of one peer. It connects anew when the connection was lost. All methods may be called from
    any thread."""

    def __init__(self, share: "Share", node: str, path: str, hello: Hello):
        self._share, self._node, self._path, self._hello = share, node, path, hello
        self._mu = threading.Lock()
        self._link: "Link | None" = None  # the live or the last connection
        self._closed = False

    def acquire(self, region: int, op: "Op | None" = None) -> "Window":
        """Map a region of the peer, if it is not mapped yet, and keep it mapped until release. Raises Error
        with the cause to report, Stopped when op is to stop."""
        link = self.connect()
        self._await(link.welcome, op, "no welcome")
        w = link.ask(region)
        try:
            self._await(w.ready, op, "no answer to MAP")
            if w.error is not None:
                raise w.error
        except BaseException:
            w.release()
            raise
        return w

    def write(self, region: int, off: int, src: Any, src_off: int, n: int, op: "Op | None" = None) -> None:
        """Copy n bytes of a local region (Region) to offset off of a region of the peer. When it returns,
        nothing of it can land any more, and without an Error every byte is visible to the worker there."""
        link = self._link
        w = link.use(region) if link is not None else None  # mostly it is mapped
        if w is None:
            w = self.acquire(region, op)
        try:
            memory.copy(w.memory, off, src, src_off, n)
        finally:
            w.release()

    def _await(self, answered: Once, op: "Op | None", missing: str) -> None:
        if answered or wait_any(ANSWER_BOUND, answered, *([op.stopped] if op is not None else [])):
            if answered:
                return
            raise Stopped(op.stop or Stop.ABORTED)
        raise Error(Cause.PEER_UNREACHABLE, f"shm: engine {self._node}: {missing} within {ANSWER_BOUND:.0f} s")

    def connect(self) -> "Link":
        """The live connection, made if there is none. Raises Error."""
        with self._mu:
            if self._closed:
                raise Error(Cause.SHUTDOWN, "shm: closed")
            if self._link is None or self._link.why is not None:
                self._link = self._dial()
            return self._link

    def _dial(self) -> "Link":
        conn = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            wire.prepare(conn)  # connecting is bounded by it, too
            conn.connect(self._path)
            wire.of_this_user(conn)
            wire.send(conn, self._hello.encode())
        except OSError as e:
            conn.close()
            raise Error(
                Cause.PEER_UNREACHABLE,
                f"shm: engine {self._node}: {e}; its plugin has ended, " "or the two engines do not see the same files",
            ) from None
        link = Link(self._node, conn)
        link.start()
        return link

    def close(self) -> None:
        """Let go of the peer's memory. What is acquired stays mapped until its release."""
        self._share.forget(self)
        with self._mu:
            self._closed = True
            link = self._link
        if link is not None:
            link.end(Error(Cause.SHUTDOWN, "the peer was removed"))

    def wait_closed(self, timeout: float) -> bool:
        """Wait, after close, until nothing is mapped."""
        return self._link is None or self._link.over.wait(timeout)


class Window:
    """A mapped region of a peer, until release. Also a context manager."""

    def __init__(self, link: "Link", region: int):
        self.region = region
        self.ready = Once()  # memory or error is set
        self.memory: "memory.Mapping | None" = None
        self.error: "Error | None" = None
        self.refs = 1  # guarded by Link.mu, as going
        self.going = False  # unmap it at the last release
        self._link = link

    def release(self) -> None:
        """End the use of memory. Once for each acquire."""
        with self._link.mu:
            self.refs -= 1
            self._link.drop(self)

    def __enter__(self) -> "memory.Mapping":
        return self.memory

    def __exit__(self, *_: Any) -> None:
        self.release()


class Link:
    """A connection to the owner of regions, seen by the writer."""

    def __init__(self, node: str, conn: socket.socket):
        self._node, self._conn = node, conn
        self.welcome = Once()  # or the end of the stream
        self.over = threading.Event()  # nothing is mapped any more and the reader has ended
        self.mu = threading.Lock()  # also keeps records from overlapping
        self._emptied = threading.Condition(self.mu)  # nothing is mapped or asked for
        self.why: "Error | None" = None  # nothing new, for this reason; the stream is ended when nothing is mapped
        self._windows: "dict[int, Window]" = {}  # asked for, or mapped
        self._asked: "list[Window]" = []  # MAPPED answers in this order

    def start(self) -> None:
        """Read what the owner says, on a thread of its own."""
        threading.Thread(target=self._read, name="shm-owner", daemon=True).start()

    def use(self, region: int) -> "Window | None":
        """The window of a region that is mapped, with a reference taken; None when it is not."""
        with self.mu:
            w = self._windows.get(region)
            if self.why is not None or w is None or w.memory is None or w.going:
                return None
            w.refs += 1
            return w

    def ask(self, region: int) -> Window:
        """The window of a region with a reference taken; it may not be ready yet. Raises Error."""
        with self.mu:
            if self.why is None and region not in self._windows:
                self._say(Record(wire.MAP, 0, region))
            if self.why is not None:
                raise self.why
            w = self._windows.get(region)
            if w is None:
                w = self._windows[region] = Window(self, region)
                self._asked.append(w)
            elif w.going:
                raise Error(Cause.REFUSED, f"shm: region {region} of engine {self._node} is being withdrawn")
            else:
                w.refs += 1
            return w

    def drop(self, w: Window) -> None:
        """Unmap a window that is going and that nobody uses, and say so. mu is held."""
        if not w.going or w.refs or self._windows.get(w.region) is not w:
            return
        if w.memory is not None and not w.memory.close():
            return  # somebody keeps a slice of it: the owner must not believe that it is unmapped
        w.memory = None
        del self._windows[w.region]
        if self.why is None:
            self._say(Record(wire.UNMAPPED, 0, w.region))
        elif not self._windows:
            wire.hang_up(self._conn)
            self._emptied.notify_all()

    def _say(self, r: Record) -> None:
        """mu is held."""
        try:
            wire.send(self._conn, r.encode())
        except OSError as e:
            self._end(e)

    def _read(self) -> None:
        while True:
            data, fds = b"", []
            error: "Exception | None" = None
            try:
                data, fds = wire.receive(self._conn)
            except EOFError:
                error = Error(Cause.TRANSPORT, "the plugin there has ended, or dismissed this one")
            except (OSError, wire.BadRecord) as e:
                error = e
            with self.mu:
                if error is None:
                    try:
                        self._take(data, fds)
                        continue
                    except (Error, wire.BadRecord) as e:
                        error = e
                self._end(error)
                while self._windows:  # copies still run
                    self._emptied.wait()
                break
        self._conn.close()
        self.over.set()

    def _take(self, data: bytes, fds: "list[int]") -> None:
        """Handle one record and own its descriptors. mu is held."""
        try:
            r = Record.decode(data)
        except wire.BadRecord:
            close_all(fds)
            raise
        if r.kind == wire.MAPPED and self.why is None:
            self._answered(r, fds)
            return
        close_all(fds)
        if self.why is not None:
            return  # it crossed the end
        if r.kind == wire.WELCOME:
            self._welcomed(r.code)
        elif r.kind == wire.WITHDRAW:
            w = self._windows.get(r.region)
            if w is not None and w.memory is not None:
                w.going = True
                self.drop(w)
        else:
            raise wire.BadRecord(f"a record of unknown kind {r.kind}")

    def _welcomed(self, code: int) -> None:
        if self.welcome:
            raise wire.BadRecord("a second WELCOME")
        if code == wire.CROWDED:
            raise Error(Cause.LIMIT, "too many connections there")
        if code != wire.OK:
            raise Error(Cause.REFUSED, f"this engine is not admitted there as a writer (code {code})")
        self.welcome.set()

    def _answered(self, r: Record, fds: "list[int]") -> None:
        """Take a MAPPED. mu is held."""
        if not self._asked or self._asked[0].region != r.region:
            close_all(fds)
            raise wire.BadRecord(f"MAPPED of region {r.region}, which was not asked for")
        w = self._asked.pop(0)
        name = f"region {r.region} of engine {self._node}"
        if r.code != wire.OK:
            close_all(fds)
            w.error = Error(Cause.REFUSED, f"shm: engine {self._node} does not share region {r.region} (code {r.code})")
        elif len(fds) != 2 or not 0 < r.size <= wire.MAX_SIZE:
            close_all(fds)
            w.error = Error(Cause.TRANSPORT, f"shm: {name}: {len(fds)} descriptors, {r.size} bytes")
        else:
            try:
                w.memory = memory.Mapping(fds[0], fds[1], r.size)
            except (OSError, ValueError, Error) as e:
                w.error = Error(Cause.TRANSPORT, f"shm: {name}: {e}")
        if w.error is not None:
            del self._windows[w.region]
            if r.code == wire.OK:
                self._say(Record(wire.UNMAPPED, 0, r.region))
        w.ready.set()

    def end(self, why: Exception) -> None:
        """The end of the connection: nothing new, and what is mapped goes."""
        with self.mu:
            self._end(why)

    def _end(self, why: Exception) -> None:
        if self.why is not None:
            return
        self.why = Error(getattr(why, "cause", Cause.TRANSPORT), f"shm: engine {self._node}: {why}")
        self.welcome.set()  # who waits for it finds why
        for w in self._asked:
            w.error = self.why
            del self._windows[w.region]
            w.ready.set()
        self._asked.clear()
        for w in list(self._windows.values()):
            w.going = True
            self.drop(w)
        if not self._windows:
            wire.hang_up(self._conn)
