"""The values of a status word and the reader of the status page (docs/worker-api.md, "Status page")."""
from __future__ import annotations

import fcntl
import mmap
import os
import struct
from typing import List, Optional, Tuple

from .errors import ProtocolError


class KVPoll:
    """Status of a room: the field's values. Failed is the lowest, so a minimum over ranks is Failed if any is."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4

    @staticmethod
    def terminal(status: int) -> bool:
        """Whether the status can never change again."""
        return status == 0 or status == 4


class Residency:
    """Who may still touch a room's pages."""

    NONE = 0  # the room holds no pages
    ARMED = 1  # a backend may read or write them
    QUIESCING = 2  # ended; the proof that nothing can land is awaited
    QUARANTINED = 3  # no proof could be had yet
    QUIET = 4  # no access can land any more
    FENCED = 5  # the means of access are provably gone
    RELEASED = 6  # the worker took the pages back

    @staticmethod
    def reusable(residency: int) -> bool:
        """Whether the pages may be used for something else."""
        return residency in (0, 4, 5, 6)


SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL | 0x10  # 0x10: F_SEAL_FUTURE_WRITE

_MAGIC = 0x31505354
_HEADER = struct.Struct("<IIIIQQQIIII")
_BEAT, COUNTER = 3, 4  # index among the page's 64-bit words
_MARGIN = 64  # ring entries that the writer may be filling while we read
_LOW32 = 0xFFFFFFFF
_STATUS_OF_BYTE = bytes(b & 7 for b in range(256))


LOADS_IN_ORDER = os.uname().machine == "x86_64"
"""Whether this processor shows us another's stores in the order in which it made them."""


class StatusPage:
    """One session's page, mapped read-only. Not locked: every read is of one aligned word or of bytes."""

    def __init__(self, fd: int) -> None:
        """Maps and checks the page behind fd, which stays the caller's. ProtocolError names what is wrong."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as e:
            raise ProtocolError(f"the status page is not a memfd: {e}", field="page") from e
        if seals & SEALS != SEALS:  # a page that can shrink is a SIGBUS in the worker
            raise ProtocolError(f"the status page has seals {seals:#x}, want {SEALS:#x}", field="page")
        size = os.fstat(fd).st_size
        if size < _HEADER.size:
            raise ProtocolError(f"the status page has {size} bytes", field="page")
        self.map = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        (magic, version, self.slots, self.ring, self.incarnation, _, _, self.words_at, self.plane_at, self.ring_at,
         said) = _HEADER.unpack_from(self.map)
        if magic != _MAGIC or version != 1:
            raise ProtocolError(f"the status page has magic {magic:#x} version {version}, want {_MAGIC:#x} 1",
                                field="page")
        spans = ((self.words_at, 8 * self.slots, 8), (self.plane_at, self.slots, 1), (self.ring_at, 8 * self.ring, 8))
        if (said > size or not 0 < self.slots <= 65536 or self.ring != 2 * self.slots
                or any(a < _HEADER.size or a + n > said or a % align for a, n, align in spans)):
            raise ProtocolError("the status page's header contradicts itself", field="page")
        self.all_words = memoryview(self.map)[:size // 8 * 8].cast("Q")
        self._halves = memoryview(self.map)[:size // 8 * 8].cast("I")
        self._word0 = self.words_at // 8
        self._ring0 = self.ring_at // 8

    def word(self, slot: int) -> int:
        """The slot's 64-bit word, read at once."""
        word: int = self.all_words[self._word0 + slot]
        return word

    @property
    def beat(self) -> int:
        """The engine's last beat, nanoseconds of its monotonic clock."""
        return self.all_words[_BEAT]

    @property
    def counter(self) -> int:
        """How many changes were ever published on the page."""
        return self.all_words[COUNTER]

    def statuses(self, source: "mmap.mmap | bytearray") -> List[int]:
        """The status of every slot, from the byte plane of source: the map, or a frozen copy of it."""
        return list(source[self.plane_at:self.plane_at + self.slots].translate(_STATUS_OF_BYTE))

    def changed(self, cursor: int) -> Tuple[Optional[List[int]], int]:
        """Slots of the changes after cursor, oldest first, as the engine wrote them, and the new cursor. None for the
        slots: entries were overwritten, so look at every slot."""
        words = self.all_words
        n = words[COUNTER]
        count = n - cursor
        if count == 0:
            return [], cursor
        if not 0 < count <= self.ring - _MARGIN:
            return None, n
        start = cursor % self.ring
        first = min(count, self.ring - start)
        at = self._ring0
        if LOADS_IN_ORDER:
            # The entries were written before the counter that was read first; that none was overwritten while they
            # were read is shown by the counter afterwards. So their sequence numbers need no look.
            slots = self._halves[2 * (at + start):2 * (at + start + first):2].tolist()
            if first < count:
                slots += self._halves[2 * at:2 * (at + count - first):2].tolist()
            return (slots if words[COUNTER] - cursor <= self.ring - _MARGIN else None), n
        entries = words[at + start:at + start + first].tolist()
        if first < count:
            entries += words[at:at + count - first].tolist()
        out = []
        for entry in entries:
            if entry >> 32 != (cursor + 1) & _LOW32:  # overwritten, or not yet visible: the next call goes on here
                break
            cursor += 1
            out.append(entry & _LOW32)
        return out, cursor
