"""Memory that a worker shares with its engine, and the proof that nobody else can write to it any more."""
from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import secrets
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any, Iterator, List, NamedTuple, Optional, Sequence

from .errors import BadField, LimitExceeded, NotReusable
from .frames import PageIds, page_ids

if TYPE_CHECKING:
    from .client import Client
    from .room import Room

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_ALL = (1 << 64) - 1


def writers_gone(memfd: int) -> bool:
    """Whether no process holds a writable descriptor or mapping of the file handed out for memfd: the kernel
    grants a read lease only then. Raises OSError where leases do not work."""
    fd = os.open(f"/proc/self/fd/{memfd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # a broken lease must not raise SIGIO, which kills
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        except BlockingIOError:
            return False
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return True
    finally:
        os.close(fd)


def proof_works() -> bool:
    """Tries writers_gone on memory of our own: refused while a second descriptor is open, granted after."""
    fd = os.memfd_create("terminus-selftest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, mmap.PAGESIZE)
        out = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            busy = not writers_gone(fd)
        finally:
            os.close(out)
        return busy and writers_gone(fd)
    except OSError:
        return False
    finally:
        os.close(fd)


class Region:
    """Memory that can be shared: a sealed memfd. Made here and added with Client.add_region, or both by
    Client.create_region. Keep it for as long as pages of it are in use."""

    def __init__(self, size: int) -> None:
        """The memory is zero and untouched. size is in bytes, at least 8."""
        if size < 8:
            raise BadField(f"a region has at least 8 bytes, not {size}", field="size")
        self.number = 0
        """Its number in the session; 0 in none."""
        self.size = size
        self._owner: Optional[Client] = None
        self._proven = True
        self._fd = os.memfd_create("terminus-region", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, self.size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
            self._map = mmap.mmap(self._fd, self.size)  # of the memfd itself: the proof does not count it
            self._map.madvise(mmap.MADV_DONTFORK)
        except BaseException:
            os.close(self._fd)
            raise
        self._lease: Optional[socket.socket] = None  # an attribute: closed by the collector it would be a false EOF
        self._lock = threading.Lock()  # hand-out, proof and canary; close goes without, a collector may run it
        self._canary = 0
        self._under_canary: Optional[bytes] = None  # what the canary covers, while somebody may still write there
        self.buf = memoryview(self._map)
        """The memory, writable."""

    @contextlib.contextmanager
    def _hand_out(self, client: "Client", number: int) -> "Iterator[tuple[int, int, int, int]]":
        """Paints the canary and yields what the engine gets: a re-opened descriptor (never the memfd), the far end
        of a new lease, the canary's offset and value. Both descriptors are closed at exit."""
        near, far = socket.socketpair()
        near.setblocking(False)
        out = -1
        try:
            with self._lock:
                if self._held() or self._owner is not None and not self._prove():
                    raise NotReusable(f"region {self.number} is with an engine still", field="region", rule="R4")
                out = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
                if self._lease is not None:
                    self._lease.close()
                self._lease, self._owner, self.number, self._proven = near, client, number, False
                self._canary = canary = secrets.randbits(64)
                at = self._canary_at()
                self._under_canary = bytes(at)  # the worker's own: the proof above put back what an older one covered
                at[:] = canary.to_bytes(8, "little")
            yield out, far.fileno(), (self.size - 8) & ~7, canary
        finally:
            far.close()
            if out >= 0:
                os.close(out)
            if self._lease is not near:
                near.close()

    def _canary_at(self) -> memoryview:
        offset = (self.size - 8) & ~7
        return self.buf[offset:offset + 8]

    def _answered(self, canary: int, ready: bool) -> bool:
        """Called with the engine's answer to the hand-out of that canary, however late: puts back what it covered.
        Whether its complement stood there, written by the engine through its own mapping. After a refusal a plugin
        may still write it, so the bytes are kept until the proof."""
        with self._lock:
            if self._under_canary is None or self._canary != canary:
                return False  # an answer of a session before the last hand-out
            try:
                seen = int.from_bytes(self._canary_at(), "little") == canary ^ _ALL
            except ValueError:
                return False  # closed meanwhile
            self._uncover(last=ready and seen)
            return seen

    def _uncover(self, last: bool) -> None:
        """Puts back what the canary covers, unless the worker has written there since. last: nobody writes it any
        more. Called with _lock."""
        if self._under_canary is None:
            return
        try:
            at = self._canary_at()
            if int.from_bytes(at, "little") in (self._canary, self._canary ^ _ALL):
                at[:] = self._under_canary
        except ValueError:
            pass  # closed meanwhile
        if last:
            self._under_canary = None

    def _held(self) -> bool:
        """Whether it is with a session that lives."""
        return self._owner is not None and self._owner.lost is None

    def released(self) -> bool:
        """Whether the engine and every plugin are provably unable to write here: end of the lease, then the
        proof by writers_gone. True only after the session has ended (or before the first began). With the proof
        the 8 bytes that an unanswered add_region used are what they were."""
        with self._lock:
            return self._prove()

    def _prove(self) -> bool:
        if not self._proven:
            if self._fd < 0 or self._owner is None or self._lease is None or self._owner.lost is None:
                return False
            try:
                if self._lease.recv(1) != b"":
                    return False
            except BlockingIOError:
                return False
            except OSError:
                pass  # reset: the far end is gone
            try:
                self._proven = writers_gone(self._fd)
            except OSError:
                return False
            if self._proven:
                self._uncover(last=True)
        return self._proven

    def __del__(self) -> None:
        if hasattr(self, "_lease"):  # the last attribute that needs care: __init__ got that far
            self.close()

    def close(self) -> None:
        """Gives the memory back once nothing in this process uses buf any more. Only after the client is closed."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd, self._owner = -1, None
        if self._lease is not None:
            self._lease.close()
        try:
            self.buf.release()
            self._map.close()
        except BufferError:
            pass  # arrays over buf live on; the last of them unmaps it


class Tensor(NamedTuple):
    """One tensor of a pool: page k lies at offset + k * page_stride of region and has page_bytes bytes."""

    region: Region
    offset: int
    page_stride: int
    page_bytes: int
    layer: int = 0


class Staging:
    """Shared pages that stand in for pages of private memory, for stacks that allocate their KV cache
    themselves. Made by Client.create_staging. A source copies in with put and sends what it returns; a
    destination registers what take returns and copies out with get after Success; both give back with free."""

    def __init__(self, client: "Client", tensors: Sequence[Any], page_bytes: Sequence[int], pages: int,
                 layers: Sequence[int]) -> None:
        if not tensors or len(tensors) != len(page_bytes) or len(tensors) != len(layers):
            raise BadField(f"{len(tensors)} tensors, {len(page_bytes)} page sizes and {len(layers)} layers",
                           field="page_bytes")
        self._private: List[memoryview] = []
        for tensor, size in zip(tensors, page_bytes):
            view = memoryview(tensor)
            if not view.c_contiguous:
                raise BadField("a staged tensor must be contiguous", field="tensors")
            view = view.cast("B")
            if size <= 0 or view.nbytes % size:
                raise BadField(f"a tensor of {view.nbytes} bytes does not divide into pages of {size}",
                               field="page_bytes")
            self._private.append(view)
        self._bytes = list(page_bytes)
        self.region = client.create_region(pages * sum(page_bytes))
        self._at: List[int] = []
        at = 0
        for size in page_bytes:
            self._at.append(at)
            at += pages * size
        self.pool = client.add_pool(pages, [Tensor(self.region, at, size, size, layer)
                                            for layer, at, size in zip(layers, self._at, page_bytes)])
        self._lock = threading.Lock()
        self._free = list(range(pages - 1, -1, -1))
        self._taken = bytearray(pages)

    @property
    def available(self) -> int:
        """How many staging pages are free."""
        return len(self._free)

    def take(self, count: int) -> "array.array[int]":
        """Reserves count staging pages. LimitExceeded when there are fewer: wait until a room is released."""
        with self._lock:
            if count > len(self._free):
                raise LimitExceeded(f"{count} staging pages wanted, {len(self._free)} free", field="pages")
            ids = array.array("i", (self._free.pop() for _ in range(count)))
            for i in ids:
                self._taken[i] = 1
        return ids

    def put(self, pages: PageIds) -> "array.array[int]":
        """Copies private pages into staging pages that it reserves, and returns those."""
        source = array.array("i", bytes(page_ids(pages)))
        self._check(source)
        staged = self.take(len(source))
        self._copy(source, staged, out=False)
        return staged

    def get(self, staged: PageIds, pages: PageIds) -> None:
        """Copies staging pages to the private pages, in order."""
        ids, target = (array.array("i", bytes(page_ids(p))) for p in (staged, pages))
        if len(ids) != len(target):
            raise BadField(f"{len(ids)} staging pages for {len(target)} pages", field="pages")
        self._check(target)
        self._reserved(ids)
        self._copy(target, ids, out=True)

    def free(self, staged: PageIds, room: "Optional[Room]" = None) -> None:
        """Gives staging pages back. With room: NotReusable while somebody may still touch its pages."""
        if room is not None and not room.reusable:
            raise NotReusable("the room's pages may still be touched; see Room.wait_reusable", rule="R4")
        ids = array.array("i", bytes(page_ids(staged)))
        with self._lock:
            self._reserved(ids)
            if len(set(ids)) != len(ids):
                raise BadField("a staging page is named twice", field="pages")
            for i in ids:
                self._taken[i] = 0
            self._free.extend(ids)

    def _check(self, pages: "array.array[int]") -> None:
        limit = min(view.nbytes // size for view, size in zip(self._private, self._bytes))
        if len(pages) and not 0 <= min(pages) <= max(pages) < limit:
            raise BadField(f"page ids from {min(pages)} to {max(pages)}, the tensors have {limit}", field="pages")

    def _reserved(self, ids: "array.array[int]") -> None:
        for i in ids:
            if not 0 <= i < len(self._taken) or not self._taken[i]:
                raise BadField(f"staging page {i} is not reserved", field="pages")

    def _copy(self, private: "array.array[int]", staged: "array.array[int]", out: bool) -> None:
        shared = self.region.buf
        for view, size, base in zip(self._private, self._bytes, self._at):
            for k, i in zip(private, staged):
                here, there = k * size, base + i * size
                if out:
                    view[here:here + size] = shared[there:there + size]
                else:
                    shared[there:there + size] = view[here:here + size]
