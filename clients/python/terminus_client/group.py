"""The list by which all ranks of a group act (Client.poll_group, Client.apply_group)."""
from __future__ import annotations

import operator
import threading
import time
from typing import TYPE_CHECKING, Dict, List, NamedTuple, Optional, Sequence, Tuple

from . import frames
from .connection import Pending
from .errors import BadField, BadState, TerminusError
from .status import COUNTER, KVPoll, Residency

if TYPE_CHECKING:
    from .client import Client
    from .room import Room

_REASON_TIMEOUT = 2.0  # seconds for rank 0's engine to say why a room failed
_SAID = 1 << 16  # rooms whose last item is remembered when they are not open here; the oldest are forgotten
_LARGEST = (1 << 63) - 1  # room and attempt
_OUTCOME_UNKNOWN = "outcome_unknown"


class GroupItem(NamedTuple):
    """One line of the list: the room has reached the status. A tuple of plain values, so that pickle, json and
    msgpack carry it. reason is that of Failed as rank 0 knows it, "" where its engine did not tell in time."""

    room: int
    attempt: int
    status: int
    reason: str = ""


class GroupChange(NamedTuple):
    """An item with this rank's room: opened is None where this rank has not opened that attempt (yet), or its
    engine refused it."""

    room: int
    attempt: int
    status: int
    reason: str
    opened: "Optional[Room]"


class _Said(NamedTuple):
    """The last item of an attempt."""

    status: int
    left: bool  # its room was open here and is gone: an open of the same attempt is another one


def _check(at: int, raw: object) -> GroupItem:
    """One item of a list, as another rank may have sent it. BadField names item and field."""
    try:
        item = GroupItem(*raw)  # type: ignore[misc]
    except TypeError as e:
        raise BadField(f"{raw!r} is not (room, attempt, status, reason)", field=f"list[{at}]") from e
    for name, most in (("room", _LARGEST), ("attempt", _LARGEST), ("status", KVPoll.Success)):
        value, field = getattr(item, name), f"list[{at}].{name}"
        try:
            ok = 0 <= operator.index(value) <= most
        except TypeError:
            ok = False
        if not ok:
            raise BadField(f"{value!r} is not an integer of 0 to {most}", field=field)
    if not isinstance(item.reason, str):
        raise BadField(f"{item.reason!r} is not a string", field=f"list[{at}].reason")
    return GroupItem(operator.index(item.room), operator.index(item.attempt), operator.index(item.status), item.reason)


class GroupList:
    """What a rank knows of the list. It outlives the session: redial hands it on."""

    def __init__(self, client: "Client", rank: int, keeps: bool) -> None:
        self._client = client
        self._lists = rank == 0
        self._keeps = keeps  # destinations: pages are kept until the list has ended their room
        self._lock = threading.RLock()
        self._rooms: "Dict[Tuple[int, int], Room]" = {}  # asked for, and not released
        # The last item by key, also of rooms that are not open here. Two generations, so that the oldest go first.
        self._said: Dict[Tuple[int, int], _Said] = {}
        self._said_before: Dict[Tuple[int, int], _Said] = {}
        # Rank 0.
        self._cursor = 0
        self._fresh: "List[Room]" = []  # to be looked at whatever the page says
        self._asked: "List[Tuple[Room, Optional[Pending[str]], float]]" = []  # failed, reason on its way, until when
        self._saw_loss = False

    # Called by the client.

    def opening(self, room: "Room") -> None:
        """Before the open is sent: the list may name the room before its answer is here."""
        key = (room.id, room.attempt)
        with self._lock:
            before = self._rooms.get(key)
            if before is not None and not before._leaving:
                return  # the same attempt twice: the engine refuses this one
            self._rooms[key] = room
            said = self._last(key)
            if said is not None and (said.left or before is not None):
                self._said.pop(key, None)
                self._said_before.pop(key, None)
            elif said is not None:
                room._applied = said.status
            room._kept = self._keeps and not KVPoll.terminal(room._applied)

    def opened(self, room: "Room") -> None:
        """The open was answered with a slot, or has ended without one; rank 0 lists the latter, too, because the
        other ranks may have theirs."""
        with self._lock:
            if room._verdict is not None:
                room._kept = False
            if self._lists and self._rooms.get((room.id, room.attempt)) is room:
                self._fresh.append(room)
            elif room._verdict is not None:
                self._forget(room)

    def unsent(self, room: "Room") -> None:
        """No engine knows of the open."""
        with self._lock:
            room._kept = False
            self._forget(room)

    def released(self, room: "Room") -> None:
        """The room has left its slot."""
        with self._lock:
            if self._leave(room) and self._lists and not KVPoll.terminal(room._listed):
                self._fresh.append(room)  # released sooner than it was listed, as a source may

    def follow(self, client: "Client") -> None:
        """The session that comes after a loss."""
        with self._lock:
            for room in list(self._rooms.values()):
                if KVPoll.terminal(room._applied):
                    self._leave(room)  # nobody releases it
                elif self._lists and not self._saw_loss:  # nobody polled since the loss
                    self._fresh.append(room)
            self._client, self._saw_loss, self._cursor = client, False, client._page.counter

    def _forget(self, room: "Room") -> bool:
        key = (room.id, room.attempt)
        if self._rooms.get(key) is not room:
            return False
        del self._rooms[key]
        return True

    def _leave(self, room: "Room") -> bool:
        """_forget of a room that was open."""
        if not self._forget(room):
            return False
        self._say((room.id, room.attempt), room._applied, left=True)
        return True

    def _last(self, key: Tuple[int, int]) -> Optional[_Said]:
        return self._said.get(key) or self._said_before.get(key)

    def _say(self, key: Tuple[int, int], status: int, left: bool = False) -> None:
        if len(self._said) >= _SAID // 2:
            self._said, self._said_before = {}, self._said
        self._said[key] = _Said(status, left)

    # Rank 0.

    def poll(self) -> List[GroupItem]:
        """Client.poll_group."""
        if not self._lists:
            raise BadState("poll_group is for rank 0; the other ranks apply_group what it returned there")
        client = self._client
        page = client._page
        if (page.all_words[COUNTER] == self._cursor and not self._fresh and not self._asked
                and client.lost is None):
            return []
        with self._lock:
            out: List[GroupItem] = []
            rooms, self._fresh = self._fresh, []
            if client.lost is not None:
                if not self._saw_loss:
                    self._saw_loss = True
                    rooms = rooms + [self._rooms[k] for k in sorted(self._rooms)]
            else:
                slots, self._cursor = page.changed(self._cursor)
                if slots is None:
                    rooms = rooms + list(self._rooms.values())
                else:
                    rooms = rooms + list(filter(None, map(client._rooms.get, slots)))
            for room in rooms:
                status = room.poll()
                if status == room._listed or KVPoll.terminal(room._listed):
                    continue
                room._listed = status
                if status == KVPoll.Failed:
                    self._asked.append((room, self._ask(room), time.monotonic() + _REASON_TIMEOUT))
                    continue
                out.append(GroupItem(room.id, room.attempt, status))
                if room._verdict is not None:
                    self._forget(room)  # there is nothing to release
            if self._asked:
                out += self._explained()
            return out

    def _ask(self, room: "Room") -> "Optional[Pending[str]]":
        """Asks why a room failed; None where the client knows, or nobody does."""
        client = room._client
        if room._verdict is not None or client.lost is not None or room.residency() == Residency.RELEASED:
            return None
        try:
            return client._connection.submit(room._request("failure"), then=lambda h, _: frames.text(h, "reason"),
                                             failed=lambda _: "", hold=True)
        except TerminusError:
            return None

    def _explained(self) -> List[GroupItem]:
        """The failed rooms whose reasons are known, or were waited for in vain."""
        out, waiting, now = [], [], time.monotonic()
        for entry in self._asked:
            room, pending, until = entry
            lost = room._client.lost is not None
            if pending is not None and not pending.done() and now < until and not lost:
                waiting.append(entry)
                continue
            reason = pending.result(0) if pending is not None and pending.done() else ""
            if not reason and room._verdict is not None:
                reason = room._verdict.reason
            elif not reason and lost:
                reason = room._client.loss_reason
            out.append(GroupItem(room.id, room.attempt, KVPoll.Failed, reason))
            if room._verdict is not None:
                self._forget(room)
        self._asked = waiting
        return out

    # Every rank.

    def apply(self, items: "Sequence[Sequence[object]]") -> List[GroupChange]:
        """Client.apply_group."""
        try:
            checked = [_check(at, raw) for at, raw in enumerate(items)]  # all, before the first is applied
        except TypeError as e:
            raise BadField(f"{items!r} is no sequence", field="list") from e
        out = []
        with self._lock:
            for item in checked:
                key = (item.room, item.attempt)
                room = self._rooms.get(key)
                said = self._last(key)
                last = room._applied if room is not None else said.status if said is not None else KVPoll.Bootstrapping
                if KVPoll.terminal(last) or not KVPoll.terminal(item.status) and item.status <= last:
                    continue  # a list that was applied before
                there = room is not None and room._slot >= 0 and room._verdict is None
                out.append(GroupChange(*item, room if there else None))
                self._say(key, item.status, left=said is not None and said.left)
                if room is None:
                    continue
                room._applied = item.status
                if not KVPoll.terminal(item.status):
                    continue
                room._kept = False
                if room._client.lost is not None:
                    self._leave(room)  # nobody releases it
        if out:
            self._client._nudge()  # who waits for pages
        return out

    def end(self) -> List[GroupChange]:
        """Client.end_group."""
        if self._lists:
            raise BadState("end_group is for the ranks that rank 0 has left; this is rank 0")
        out = []
        with self._lock:
            for key in sorted(self._rooms):
                room = self._rooms[key]
                if room._kept:
                    room._kept, room._applied = False, KVPoll.Failed
                    self._say(key, KVPoll.Failed)
                    out.append(GroupChange(*key, KVPoll.Failed, _OUTCOME_UNKNOWN, room if room._slot >= 0 else None))
        if out:
            self._client._nudge()
        return out
