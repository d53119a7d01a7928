"""Mappings of worker memory: what a region is checked for, how it is mapped and proved, and copies."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import mmap
import os
import time
from typing import Any

from .backend import Cause, Error

F_GET_SEALS = 1034
SEALS = 0x1 | 0x2 | 0x4  # SEAL, SHRINK, GROW
HUGETLBFS_MAGIC = 0x958458F6
MADV_DONTFORK = 10
MADV_POPULATE_WRITE = 23

#: A copy of at least this many bytes lets other threads run meanwhile.
PARALLEL_BYTES = 64 << 10

#: How long Mapping.close waits for slices that a thread still holds.
CLOSE_BOUND = 2.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fstatfs.argtypes = [ctypes.c_int, ctypes.c_void_p]


def check_memory(fd: int, size: int, name: str) -> None:
    """Refuse what is not a memfd sealed SHRINK, GROW, SEAL of at least size bytes. name is that of the
    size in the error."""
    buf = ctypes.create_string_buffer(512)
    if _libc.fstatfs(fd, buf) != 0:
        raise _os_error("statfs of the memory descriptor")
    if int.from_bytes(buf.raw[: ctypes.sizeof(ctypes.c_long)], "little") & 0xFFFFFFFF == HUGETLBFS_MAGIC:
        raise Error(Cause.UNSUPPORTED, "the memory is hugetlb; use a plain memfd")
    try:
        seals = fcntl.fcntl(fd, F_GET_SEALS)
    except OSError as e:
        raise Error(Cause.PROTOCOL, f"the memory descriptor is no memfd ({e.strerror})") from None
    if seals & SEALS != SEALS:
        raise Error(Cause.PROTOCOL, f"the memfd has seals {seals:#x}, it needs SHRINK|GROW|SEAL")
    have = os.fstat(fd).st_size
    if size > have:
        raise Error(Cause.PROTOCOL, f"{name} is {size}, the memfd has {have} bytes")


class Mapping:
    """A whole shared mapping of one region, with the two descriptors that have to live as long. Owns
    them from the call on, also when it raises."""

    def __init__(self, fd: int, lease: int, size: int, name: str = "size"):
        self.fd, self.lease, self.size = fd, lease, size
        self.bytes: "memoryview | None" = None
        self.address = 0
        self._map: "mmap.mmap | None" = None
        try:
            check_memory(fd, size, name)
            self._map = mmap.mmap(fd, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
            if _libc.madvise(self.address, size, MADV_DONTFORK) != 0:
                raise _os_error("madvise DONTFORK")
            self.bytes = memoryview(self._map)
        except BaseException:
            self.close()
            raise

    def populate(self) -> None:
        """Make all pages present. Other threads run meanwhile."""
        if _libc.madvise(self.address, self.size, MADV_POPULATE_WRITE) == 0:
            return
        if ctypes.get_errno() != errno.EINVAL:
            raise _os_error("populate")
        for off in range(0, self.size, mmap.PAGESIZE):  # before Linux 5.14: a read allocates a shared page
            self.bytes[off]

    def close(self) -> bool:
        """Unmap, then close the descriptors. False when a slice of bytes is still referred to: then the
        mapping and its descriptors stay, because memory that can be written to has to be seen as such."""
        deadline = time.monotonic() + CLOSE_BOUND
        while self._map is not None:
            try:
                if self.bytes is not None:
                    self.bytes.release()
                self._map.close()
                self._map = None
            except BufferError:
                gc.collect()
                if time.monotonic() >= deadline:
                    return False
                time.sleep(0.01)
        self.bytes, self.address = None, 0
        for fd in (self.fd, self.lease):
            if fd >= 0:
                os.close(fd)
        self.fd = self.lease = -1
        return True


def prove(m: Mapping, offset: int, canary: int) -> None:
    """Read the canary through the mapping and answer with its complement."""
    word = m.bytes[offset : offset + 8]
    got = int.from_bytes(word, "little")
    if got != canary:
        word.release()
        raise Error(Cause.PROTOCOL, f"canary {canary:#x} read as {got:#x}: a private mapping, or another file")
    word[:] = (canary ^ (1 << 64) - 1).to_bytes(8, "little")
    word.release()


def copy(dst: Any, dst_off: int, src: Any, src_off: int, n: int) -> None:
    """Copy n bytes between two of Region and Mapping. Raises Error(Cause.BOUNDS) when they leave either."""
    if dst_off < 0 or src_off < 0 or n < 0 or dst_off + n > dst.size or src_off + n > src.size:
        raise Error(Cause.BOUNDS, f"[{src_off},+{n}) of {src.size} bytes to [{dst_off},+{n}) of {dst.size}")
    if n >= PARALLEL_BYTES:
        to, source = dst.address, src.address
        if not to or not source:
            raise Error(Cause.BOUNDS, "the memory is not mapped any more")
        ctypes.memmove(to + dst_off, source + src_off, n)
        return
    to, source = dst.bytes, src.bytes
    if to is None or source is None:
        raise Error(Cause.BOUNDS, "the memory is not mapped any more")
    to[dst_off : dst_off + n] = source[src_off : src_off + n]


def _os_error(what: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")
