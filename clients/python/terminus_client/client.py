"""The client: one session of one worker with the engine on its node."""
from __future__ import annotations

import math
import mmap
import os
import select
import sys
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any, Callable, ContextManager, Dict, List, Mapping, Optional, Sequence, Union

from . import frames
from .connection import Connection, Pending
from .errors import (BadField, BadMemory, BadState, Draining, EngineLost, LimitExceeded, NoBackend, NotReusable,
                     ProtocolError, Refused, TerminusError)
from .group import GroupChange, GroupItem, GroupList
from .memory import Region, Staging, Tensor, proof_works
from .room import Room, _Fixed, _NotYet
from .status import COUNTER, KVPoll, Residency, StatusPage

_TICK = 0.1  # seconds between looks at the beat; the engine writes it as often
_PAUSE = 0.5  # a tick longer than this was our own pause and counts for no more
_REGION_TIMEOUT = 150.0  # registering memory with a backend may take two minutes


@dataclass(frozen=True)
class Layout:
    """What the bytes of a page mean. The same for every tensor-parallel size."""

    dtype: str
    layers: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    kind: str = "mha"
    order: str = ""
    """Of a tensor's page, "nhd" ([token][head][dim]) or "hnd". A pair of groups needs it when they differ in ranks
    or page sizes; empty: not said."""


class Client:
    """A session. Usable from several threads. Close it, or use it as a context manager.

    A thread of its own reads answers and watches the engine: end of the stream, exit of its process, or a beat
    that stands still. When the engine is lost every room that has not ended becomes Failed at once (`lost` says
    why), and its pages become reusable when the kernel proves that nobody can write to them any more."""

    def __init__(self, socket: str, group: str, role: str, rank: int = 0, size: int = 1,
                 layout: Union[Layout, Mapping[str, Any], None] = None, slots: int = 1024, notify: bool = True, *,
                 timeout: float = 30.0, suspect_after: float = 2.0, lost_after: float = 12.0,
                 group_list: bool = False) -> None:
        """Connects and says hello. role is "source" (prefill) or "destination" (decode); slots is how many rooms
        may be open at once; notify asks for an eventfd, which wait needs to be prompt. timeout bounds every
        request; suspect_after and lost_after are seconds of our own running time without a beat. group_list makes
        the ranks of a group act by one list, rank 0's: poll_group there, apply_group on all; all ranks or none."""
        if sys.byteorder != "little":
            raise BadState("the status page is little-endian and is read in place; this machine is not")
        self._arguments = (socket, group, role, rank, size, layout, slots, notify, timeout, suspect_after, lost_after,
                           group_list)
        hello: Dict[str, Any] = {"t": "hello", "v": 1, "group": group, "role": role, "rank": int(rank),
                                 "size": int(size), "slots": int(slots), "notify": bool(notify)}
        if layout is not None:
            hello["layout"] = asdict(layout) if isinstance(layout, Layout) else dict(layout)
            if hello["layout"].get("order") == "":  # not said
                del hello["layout"]["order"]
        self.timeout = timeout
        self.lost: Optional[str] = None
        """Why the session is over; None while it is not."""
        self.loss_reason = "engine_lost"
        """The reason of rooms that the end of the session ended: engine_lost, or worker_lost after close."""
        self.unresponsive = False
        """Whether the engine's beat has stood still for suspect_after."""
        self.provable = proof_works()
        """Whether the proof for pages after a loss works here; if not, such pages stay quarantined."""
        self._suspect_after, self._lost_after = suspect_after, lost_after
        self._lock = threading.RLock()  # rooms, regions, the latch
        self._ring_lock = threading.Lock()  # the ring's cursor
        self._wakeup = threading.Condition(threading.Lock())  # who sleeps on the eventfd
        self._sleeper = False
        self._latched = threading.Event()
        self._rooms: Dict[int, Room] = {}  # by slot
        self._unseen: Dict[int, Room] = {}  # of these, whose word or plane byte was not published at attach
        self._fresh: Dict[int, Room] = {}  # of these, to be reported by the next changes
        self._regions: List[Region] = []
        self._ready: List[Region] = []  # of these, which the engine took
        self._pools: "List[tuple[int, List[Tensor], bool]]" = []  # by number
        self._memory_lock = threading.Lock()  # numbers of regions and pools go up in the order sent
        self._local = 0  # changes that the page's counter does not count
        self._proven = False
        self._closing = False
        self._group: Optional[GroupList] = None  # where the group acts by a list
        self._fds: List[int] = []  # closed by close
        self._event = -1
        self._connection = Connection(socket, timeout)
        try:
            self._pidfd = self._open_pidfd()
            self._hello(hello, bool(notify))
            self._stop_read, self._stop_write = self._pipe()
            self._wake_read, self._wake_write = self._pipe()
        except BaseException:
            self._connection.shut(EngineLost("the session never began"))
            self._close_fds()
            raise
        if group_list:
            self._group = GroupList(self, rank, role == "destination")
        self._thread = threading.Thread(target=self._run, name="terminus-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open_pidfd(self) -> int:
        pid = self._connection.peer_pid()
        if pid <= 0:
            return -1
        try:
            fd = os.pidfd_open(pid)
        except OSError:  # another pid namespace, an old kernel: the stream's end has to do
            return -1
        self._fds.append(fd)
        return fd

    def _pipe(self) -> "tuple[int, int]":
        ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._fds += ends
        return ends

    def _close_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def _hello(self, request: Dict[str, Any], notify: bool) -> None:
        answer, fds = self._connection.hello(frames.fields(request))
        self._fds += fds
        if len(fds) != 1 + notify:
            raise ProtocolError(f"the answer to hello carries {len(fds)} descriptors, want {1 + notify}")
        self._page = StatusPage(fds[0])
        if notify:
            self._event = fds[1]
            os.set_blocking(self._event, False)
        if frames.integer(answer, "slots") != self._page.slots:
            raise ProtocolError("the status page and the answer to hello differ in slots", field="slots")
        self.node = frames.text(answer, "node")
        self.incarnation = self._page.incarnation
        limits = answer.get("limits")
        self.limits: Dict[str, Any] = limits if isinstance(limits, dict) else {}
        self._current: "Union[mmap.mmap, bytearray]" = self._page.map
        self._cursor = self._seen = self._page.counter

    # Memory.

    def create_region(self, size: int, timeout: float = _REGION_TIMEOUT) -> Region:
        """Makes memory of size bytes and registers it with every backend."""
        region = Region(size)
        self.add_region(region, timeout)
        return region

    def add_region(self, region: Region, timeout: float = _REGION_TIMEOUT) -> None:
        """Registers memory with every backend. A region that was with a session which is over is taken again once
        it is `released`: so a worker keeps its memory when the engine restarts.

        The last aligned 8 bytes are used meanwhile and then put back: with the answer, also a late one. After an
        error they are undefined until then, or until the session is over and `Region.released` says True: do not use
        them before. A region whose request timed out stays with the session, which has it once the answer is there."""
        with self._memory_lock:
            number = len(self._regions) + 1
            with region._hand_out(self, number) as (memory, lease, offset, canary):
                with self._lock:
                    self._regions.append(region)

                def then(answer: Dict[str, Any], payload: bytes) -> bool:
                    seen = region._answered(canary, ready=True)
                    if seen:
                        with self._lock:
                            self._ready.append(region)
                    return seen

                def failed(error: TerminusError) -> None:
                    if not isinstance(error, EngineLost):  # else the canary may still be answered
                        region._answered(canary, ready=False)

                try:
                    pending: Pending[bool] = self._connection.submit(
                        frames.fields({"t": "region_add", "region": number, "size": region.size,
                                       "canary_offset": offset, "canary": canary}),
                        fds=(memory, lease), then=then, failed=failed)
                except TerminusError as e:  # nothing was sent, unless the engine was lost
                    failed(e)
                    raise
        if not pending.result(timeout):
            raise BadMemory("the engine's write is not seen through this mapping", field="canary")

    def add_pool(self, pages: int, tensors: Sequence[Tensor], timeout: float = _REGION_TIMEOUT, *,
                 state: bool = False) -> int:
        """Declares a pool of pages over tensors that share page ids, and returns its number. The pages of a pool
        of state hold no tokens but what has a fixed size per request (Mamba and the like): they go from rank r to
        rank r as they are, so both groups have equally many ranks."""
        for i, tensor in enumerate(tensors):
            if tensor.region._owner is not self:
                raise BadField(f"tensor {i}: its region is not one of this client", field="region")
        listed = [{"region": t.region.number, "offset": int(t.offset), "page_stride": int(t.page_stride),
                   "page_bytes": int(t.page_bytes), "layer": int(t.layer)} for t in map(Tensor._make, tensors)]

        def failed(error: TerminusError) -> None:
            self._pools.pop()  # the engine takes the number again

        with self._memory_lock:
            number = len(self._pools)
            self._pools.append((pages, list(tensors), state))
            header = {"t": "pool_add", "pool": number, "pages": int(pages), "tensors": listed}
            if state:
                header["kind"] = "state"
            try:
                pending: Pending[None] = self._connection.submit(
                    frames.fields(header),
                    then=lambda *_: None, failed=failed)
            except TerminusError as e:
                failed(e)
                raise
            pending.result(timeout)
        return number

    def create_staging(self, tensors: Sequence[Any], page_bytes: Sequence[int], pages: int,
                       layers: Optional[Sequence[int]] = None) -> Staging:
        """Makes `pages` shared pages that stand in for pages of private tensors: contiguous writable buffers,
        tensor i of layer layers[i] (absent: i) in pages of page_bytes[i]."""
        return Staging(self, tensors, page_bytes, pages, range(len(tensors)) if layers is None else layers)

    # Rooms.

    def open(self, room: int, peer_group: Optional[str] = None, attempt: int = 0, priority: int = 0,
             deadline: Optional[float] = None, wait: bool = True) -> Room:
        """Opens a room. peer_group is required for a destination; deadline is seconds from now. With wait=False
        the room is returned before the engine has answered: it polls Bootstrapping until then, and Failed when
        it was refused (Room.failure says why)."""
        number = frames.index(room, "room")
        header = f'{{"t":"open","room":{number},"attempt":{frames.index(attempt, "attempt")}'
        if not 0 <= number < 1 << 63:
            raise BadField(f"a room id lies in [0, 2^63), not {number}", field="room")
        if peer_group is not None:
            header += f',"peer_group":{frames.quote(peer_group)}'
        if priority:
            header += f',"priority":{frames.index(priority, "priority")}'
        if deadline is not None:
            header += f',"deadline_ms":{max(1, math.ceil(deadline * 1000))}'
        opened = Room(self, number, attempt)

        def then(answer: Dict[str, Any], payload: bytes) -> None:
            if answer.get("ended") is True:
                reason = frames.text(answer, "reason")
                opened._settle(KVPoll.Success if reason == "success" else KVPoll.Failed, reason, "",
                               "the attempt had ended before it was opened here")
                return
            self._attach(opened, frames.integer(answer, "slot", high=self._page.slots - 1),
                         frames.integer(answer, "opener") & (1 << 48) - 1)

        def failed(error: TerminusError) -> None:
            reason = self.loss_reason if isinstance(error, EngineLost) else error.code
            opened._settle(KVPoll.Failed, reason, error.rule, error.message)

        if self._group is not None:
            self._group.opening(opened)
        try:
            pending: Pending[None] = self._connection.submit(header, then=then, failed=failed, hold=not wait)
        except TerminusError as e:
            if self._group is not None and isinstance(e, EngineLost):
                failed(e)
            elif self._group is not None:
                self._group.unsent(opened)
            raise
        opened._opening = pending
        if wait:
            pending.result(self.timeout)
        return opened

    # The group.

    def poll_group(self) -> List[GroupItem]:
        """Rank 0: what all ranks of the group act on in this tick, rooms whose status is not what the last list
        said. It must reach every rank, in order; each rank, rank 0 too, gives it to apply_group. One consumer at a
        time. Without news it is a memory read; a room that failed is asked for its reason (one request that is not
        waited for) and listed when that is here, or after two seconds without.

        Ranks that each polled their own rooms would see a verdict in different ticks and run different batches.
        The list also names rooms that this rank's engine refused to open, and all that had not ended when the
        engine was lost."""
        return self._listing().poll()

    def apply_group(self, items: "Sequence[Sequence[Any]]") -> List[GroupChange]:
        """Every rank: takes rank 0's list of this tick, as it came out of poll_group, and returns it with this
        rank's rooms. That, and not poll or changes, is what the rank's scheduler acts on: the same on all ranks.
        Where the two differ the list is right. Success holds although the own engine has not said so yet, or never
        will (outcome_unknown, engine_lost): the judge counted every byte of every rank, so the pages are whole.
        Failed holds although the own engine may have said Success.

        The pages of a destination room are the room's until a list has ended it, whatever the own engine says:
        before, `Room.reusable` is False and release raises NotReusable. After Success they are the request's; when
        it needs them no more, and at once after Failed, wait_reusable and release as ever. An own engine that has
        not ended the room by then does so by the same verdict, or by its clocks.

        What the list has ended stays so: later items of that room and attempt are left out of what is returned, as
        is an item that says nothing new, so the same list may be applied twice. Open the room again under a new
        attempt. BadField names the item and field that is wrong, and then nothing of the list was applied."""
        return self._listing().apply(items)

    def end_group(self) -> List[GroupChange]:
        """A rank other than 0: rank 0 is gone and its list with it. Rooms that it has not ended are Failed
        (outcome_unknown) for this rank, whatever their own status, and their pages follow the residency again.
        Returns them, and is the only way to give such pages up."""
        return self._listing().end()

    def _listing(self) -> GroupList:
        if self._group is None:
            raise BadState("the client was opened with group_list=False")
        return self._group

    def batch(self) -> ContextManager[None]:
        """Requests with wait=False made inside `with client.batch():` go out together at its end, by one system
        call: for a scheduler that opens, sends and releases many rooms a step."""
        return self._connection.batch()

    def poll_all(self) -> List[int]:
        """The status of every slot, indexed by Room.slot. The value at a slot without a room means nothing."""
        statuses = self._page.statuses(self._current)
        if self._unseen:
            with self._lock:
                for slot, room in list(self._unseen.items()):
                    statuses[slot] = room.poll()
                    self._look(slot, room)
        return statuses

    def changes(self) -> List[Room]:
        """The rooms whose status or residency may have changed since the last call. Nothing is ever lost; a room
        may be named without need, or twice. A new room is named once."""
        page = self._page
        words = page.all_words
        if words[COUNTER] == self._cursor and not self._fresh:
            return []
        with self._ring_lock:
            self._seen = words[COUNTER] + self._local  # first: what comes while we look is news for wait
            fresh: List[Room] = []
            if self._fresh:
                with self._lock:
                    fresh, self._fresh = list(self._fresh.values()), {}
            if self.lost is not None:
                self._cursor = words[COUNTER]
                return fresh
            slots, self._cursor = page.changed(self._cursor)
            if slots is not None:
                changed = list(filter(None, map(self._rooms.get, slots)))
                if len(changed) == len(slots) or max(slots) < page.slots:  # else the ring cannot be trusted
                    return fresh + changed if fresh else changed
            return list(self._rooms.copy().values())

    def wait(self, timeout: float) -> bool:
        """Sleeps until something changed since the last return of wait or changes. False after timeout seconds."""
        changed = self._until(lambda: self._page.counter + self._local != self._seen, timeout)
        self._seen = self._page.counter + self._local
        return changed

    def fileno(self) -> int:
        """The eventfd, for an event loop: readable means look at changes; read it before looking."""
        if self._event < 0:
            raise BadState("the client was opened with notify=False")
        return self._event

    def redial(self, timeout: float) -> "Client":
        """Follows the loss of the engine: a new session on the same socket, as the same rank of the same group, with
        the same memory. The worker goes on with the client that it returns; this one is closed.

        For timeout seconds it tries again while no engine listens, or the one that does is not ready for this worker
        (draining, no backend up, or the rank still taken by the session that was lost). Then it waits for the proof
        that nobody else can write to the regions any more (`Region.released`), and announces all regions that were
        not closed and all pools again, in their old order: pool numbers, and a `Staging`, stay valid. As with
        add_region the last 8 bytes of each region are used for a moment, so no request may be using them.

        Rooms of this client keep their verdicts, and their pages are reusable, except those that the group's list
        has not ended yet: poll_group and apply_group of the new client know them. Retrying a request that failed with
        engine_lost is the router's business: a new attempt, opened with the new client.

        Raises BadState while the session lives and after close; NotReusable when somebody may still write to a
        region (at once where `provable` is False: then make new memory and a new Client); else what the last try
        met. After an error this client is as it was, so redial may be called again. So is the memory, except that
        the last aligned 8 bytes of a region that an engine did not get to take in time, or refused, are undefined
        until its `Region.released` says True; the next redial sees to that, too."""
        if self._closing or self.loss_reason != "engine_lost":
            raise BadState("the client was closed")
        if self.lost is None:
            raise BadState("the session is alive")
        with self._lock:  # one that is with a session that lives was given to it by hand
            regions = [r for r in self._ready if r._fd >= 0 and (r._owner is self or not r._held())]
        if regions and not self.provable:
            raise NotReusable("this machine gives no proof that nobody writes to memory after an engine was lost",
                              field="region", rule="R4")
        deadline = time.monotonic() + timeout
        while True:
            try:
                client = self._follow(deadline, regions)
                break
            except (EngineLost, NoBackend):  # the next engine may die, too, or its plugin while it takes the memory
                if time.monotonic() + 0.5 > deadline:
                    raise
                time.sleep(0.5)
        if self._group is not None:
            client._group = self._group
            self._group.follow(client)
        self.close()
        return client

    def _follow(self, deadline: float, regions: List[Region]) -> "Client":
        """One session with the next engine, with all memory or not at all."""
        client = self._dial_again(deadline)
        try:
            self._await(deadline, lambda: self._prove() and all(r._owner is None or r.released() for r in regions),
                        NotReusable("somebody may still write to the regions", field="region", rule="R4"))
            for region in regions:
                client.add_region(region, max(deadline - time.monotonic(), 0.0))
            for pages, tensors, state in self._pools:
                client.add_pool(pages, tensors, max(deadline - time.monotonic(), 0.0), state=state)
        except BaseException:
            client.close()
            for region in regions:
                region.released()  # where the proof is there already, the memory is as it was, too
            raise
        return client

    def _dial_again(self, deadline: float) -> "Client":
        """Dials until an engine takes the worker, or refuses it for good."""
        socket, group, role, rank, size, layout, slots, notify, patience, suspect_after, lost_after, listed = \
            self._arguments
        pause = 0.02
        while True:
            left = deadline - time.monotonic()
            try:
                client = Client(socket, group, role, rank, size, layout, slots, notify,
                                timeout=max(min(patience, left), 0.01), suspect_after=suspect_after,
                                lost_after=lost_after, group_list=listed)
                client.timeout = client._connection.timeout = patience
                return client
            except TerminusError as e:
                passing = isinstance(e, (ConnectionError, TimeoutError, Draining, LimitExceeded))
                if not (passing or isinstance(e, Refused) and e.field == "rank") or left <= pause:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    @staticmethod
    def _await(deadline: float, condition: Callable[[], bool], otherwise: TerminusError) -> None:
        pause = 0.001
        while not condition():
            if time.monotonic() > deadline:
                raise otherwise
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def close(self) -> None:
        """Ends the session. Rooms that have not ended become Failed (worker_lost); regions stay mapped, and their
        pages reusable only after Region.released."""
        if not self._connection.ours():
            return  # a forked child; the session is its parent's
        with self._lock:
            if self._closing:
                return
            self._closing = True
        os.write(self._stop_write, b"x")
        self._thread.join()
        with self._wakeup:
            while self._sleeper:
                self._wakeup.wait(0.1)
            self._event = -1
            self._close_fds()

    # Inside. _attach, _detach and _latch run on the client's thread, so they need no order among themselves.

    def _attach(self, room: Room, slot: int, tag: int) -> None:
        with self._lock:
            before = self._rooms.get(slot)
            if before is not None:  # its release is answered after this: the slot is not its own any more
                before._bytes = _Fixed(before.poll() if isinstance(before._bytes, _Fixed) else KVPoll.Failed,
                                       Residency.RELEASED)
            room._index = self._page.words_at + 8 * slot
            room._slot, room._tag = slot, tag
            self._rooms[slot] = self._fresh[slot] = self._unseen[slot] = room
            self._local += 1
            seen = self._page.word(slot) >> 16 == tag
            room._bytes = self._page.map if seen else _NotYet(room)
            if seen:
                self._look(slot, room)
        if self._group is not None:
            self._group.opened(room)

    def _look(self, slot: int, room: Room) -> None:
        """Forgets that a room was unseen once its word is there and the plane has caught up with it."""
        word = self._page.word(slot)
        if word >> 16 == room._tag and self._page.map[self._page.plane_at + slot] == word & 0xFF:
            self._unseen.pop(slot, None)

    def _detach(self, room: Room, status: int) -> None:
        with self._lock:
            room._bytes = _Fixed(status if KVPoll.terminal(status) else KVPoll.Failed, Residency.RELEASED)
            for rooms in (self._rooms, self._fresh, self._unseen):
                if rooms.get(room._slot) is room:
                    del rooms[room._slot]
        if self._group is not None:
            self._group.released(room)

    def _run(self) -> None:
        try:
            why = self._attend()
        except TerminusError as e:
            why = str(e)
        except Exception as e:  # never silently: what watches the engine is gone, hence so is the engine
            why = f"the client's own thread failed: {e!r}"
        self._latch(why)
        pause = 0.002
        poller = select.poll()
        poller.register(self._stop_read, select.POLLIN)
        while not self._closing and not self._prove():
            if poller.poll(pause * 1000):
                break
            pause = min(pause * 2, 1.0)

    def _attend(self) -> str:
        """Reads answers and watches the engine until it is lost; returns why."""
        connection, page = self._connection, self._page
        poller = select.poll()
        for fd in (connection.fileno(), self._stop_read, self._pidfd):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        beat, still, last = page.beat, 0.0, time.monotonic()
        while True:
            ready = {fd for fd, _ in poller.poll(_TICK * 1000)}
            if self._stop_read in ready:
                self.loss_reason = "worker_lost"
                return "the client was closed"
            exited = self._pidfd in ready
            read = connection.pump() if ready else 0
            while exited and read:  # what it said before it went still counts
                read = connection.pump()
            if exited:
                return "the engine's process exited"
            if read is None:
                refusal = connection.refusal
                return f"the engine closed the connection: {refusal}" if refusal else "the engine closed the connection"
            if read:
                self._nudge()
            now = time.monotonic()
            step, last = now - last, now
            if page.beat != beat:
                beat, still, self.unresponsive = page.beat, 0.0, False
                continue
            still += min(step, _PAUSE)
            if still >= self._lost_after:
                return f"the engine gave no sign of life for {still:.1f} s"
            self.unresponsive = still >= self._suspect_after

    def _latch(self, why: str) -> None:
        """Socket first: an engine that wakes up must find the session closed before we judge its rooms."""
        self._connection.shut(EngineLost(why))
        page = self._page
        with self._lock:
            frozen = bytearray(page.map)
            for slot, room in self._rooms.items():
                status, residency = room.poll(), room.residency()
                if not (KVPoll.terminal(status) and room.reusable):
                    residency = Residency.QUARANTINED if room._given else Residency.NONE
                if not KVPoll.terminal(status):
                    status = KVPoll.Failed
                frozen[room._index] = frozen[page.plane_at + slot] = status | residency << 3
                room._bytes = frozen
            self._unseen = {}
            self._fresh = dict(self._rooms)
            self._current = frozen
            self._local += 1
            self.lost = why
        self._latched.set()
        self._connection.fail()
        self._wake()

    def _prove(self) -> bool:
        """After a loss: whether no region can be written by others any more; rooms' pages are fenced once so."""
        with self._lock:
            if self._proven or self.lost is None:
                return self._proven
            if not self.provable or not all(r.released() for r in self._regions if r._owner is self):
                return False
            frozen, page = self._current, self._page
            assert isinstance(frozen, bytearray)
            for slot, room in self._rooms.items():
                if room.residency() == Residency.QUARANTINED:
                    frozen[room._index] = frozen[page.plane_at + slot] = room.poll() | Residency.FENCED << 3
            self._fresh = dict(self._rooms)
            self._local += 1
            self._proven = True
        self._wake()
        return True

    def _nudge(self) -> None:
        """Wakes a sleeper after answers: they change what a room reads without a change on the page."""
        with self._wakeup:
            if self._sleeper and self._event >= 0:
                self._ring()

    def _ring(self) -> None:
        try:
            os.write(self._event, (1).to_bytes(8, "little"))
        except BlockingIOError:
            pass  # full of wakes

    def _wake(self) -> None:
        """Wakes every sleeper, now and from now on: the pipe is never emptied."""
        with self._wakeup:
            if self._fds:
                try:
                    os.write(self._wake_write, b"x")
                except BlockingIOError:
                    pass
                if self._event >= 0:
                    self._ring()  # for those who sleep on fileno
            self._wakeup.notify_all()

    def _until(self, done: Callable[[], bool], timeout: float) -> bool:
        """Waits until done() says so: look, sleep, look again. One thread sleeps on the eventfd for all."""
        self._connection.flush()
        deadline = time.monotonic() + timeout
        with self._wakeup:
            while not done():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                if self.lost is not None:
                    self._wakeup.release()
                    try:
                        self._prove()
                    finally:
                        self._wakeup.acquire()
                    if not done():
                        self._wakeup.wait(min(left, 0.02))
                elif self._sleeper:
                    self._wakeup.wait(left)
                else:
                    self._sleeper = True
                    self._wakeup.release()
                    try:
                        self._sleep(left)
                    finally:
                        self._wakeup.acquire()
                        self._sleeper = False
                        self._wakeup.notify_all()
        return True

    def _sleep(self, seconds: float) -> None:
        poller = select.poll()
        poller.register(self._wake_read, select.POLLIN)
        if self._event >= 0:
            poller.register(self._event, select.POLLIN)
        else:
            seconds = min(seconds, 0.002)  # nobody wakes us
        if any(fd == self._event for fd, _ in poller.poll(min(seconds, 1.0) * 1000 + 1)):
            try:
                os.read(self._event, 8)
            except BlockingIOError:
                pass
