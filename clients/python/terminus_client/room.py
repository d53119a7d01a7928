"""A room: one request's hand-over of KV cache, seen from its worker."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

from . import frames
from .connection import Numbered, Pending
from .errors import BadField, EngineLost, LimitExceeded, NotReusable, TerminusError
from .status import KVPoll, Residency

if TYPE_CHECKING:
    from .client import Client

_ENGINE_LOST = "The engine is gone; latched by the client library, never by an engine."
_WORKER_LOST = "The worker process that opened the room is gone."


class Part(NamedTuple):
    """Pages of one pool. prefix (register only): how many of them, at the front, the destination already holds."""

    pool: int
    pages: frames.PageIds
    prefix: int = 0


Parts = Sequence[Union[Part, Tuple[int, Any], Tuple[int, Any, int]]]


class Failure(NamedTuple):
    """Why a room is in its state. reason is of the closed set of docs/worker-api.md, "none" while it has not ended;
    of an open that was refused it is the code of the refusal."""

    status: int
    residency: int
    reason: str
    doc: str
    detail: str


class _Fixed:
    """Stands where a room's byte of the status page would be, whatever the index."""

    __slots__ = ("_byte",)

    def __init__(self, status: int, residency: int = Residency.NONE) -> None:
        self._byte = status | residency << 3

    def __getitem__(self, index: int) -> int:
        return self._byte


class _NotYet:
    """Stands for the room's byte until its word bears the room's tag: until then it is another room's."""

    __slots__ = ("_room",)

    def __init__(self, room: "Room") -> None:
        self._room = room

    def __getitem__(self, index: int) -> int:
        room = self._room
        client = room._client
        word = client._page.word(room._slot)
        if word >> 16 != room._tag:
            return KVPoll.Bootstrapping
        with client._lock:
            if room._bytes is self:  # not latched meanwhile
                room._bytes = client._page.map
        return word & 0xFF


class Room:
    """Made by Client.open. poll, residency and reusable read memory and nothing else.

    Requests take wait: with False they are sent and not waited for. An error that nobody waited for is kept in
    `error` and raised by the next register or send. A request on a room that has ended does nothing and returns
    the reason; it returns None otherwise."""

    __slots__ = ("_applied", "_bytes", "_client", "_given", "_index", "_kept", "_leaving", "_listed", "_numbered",
                 "_opening", "_slot", "_tag", "_unanswered", "_verdict", "attempt", "error", "id")

    def __init__(self, client: "Client", room: int, attempt: int) -> None:
        self._client = client
        self.id = room
        self.attempt = attempt
        self.error: Optional[TerminusError] = None
        self._slot = -1
        self._tag = -1
        self._index = 0
        self._bytes: Any = _Fixed(KVPoll.Bootstrapping)
        self._numbered = Numbered()
        self._given = False  # pages were named in a request
        self._unanswered = 0  # such requests whose answer is not here: residency does not count them yet
        self._opening: Optional[Pending[None]] = None
        self._verdict: Optional[Failure] = None  # of an open that got no slot: refused, or ended before it came
        # For the group's list, under its lock.
        self._kept = False  # pages are kept until the list has ended the room
        self._applied = KVPoll.Bootstrapping  # what this rank was told last
        self._listed = KVPoll.Bootstrapping  # what it said last
        self._leaving = False  # a release was asked for

    def __repr__(self) -> str:
        return f"<Room {self.id} attempt {self.attempt} slot {self._slot} status {self.poll()}>"

    # Memory reads.

    def poll(self) -> int:
        """The status, a value of KVPoll. The byte read is the low one of the slot's word, beside the tag: the
        byte plane may lag a word by one store."""
        return self._bytes[self._index] & 7  # type: ignore[no-any-return]

    def residency(self) -> int:
        """Who may still touch the pages, a value of Residency."""
        return self._bytes[self._index] >> 3 & 7  # type: ignore[no-any-return]

    @property
    def reusable(self) -> bool:
        """Whether the pages may be used for something else (R4). Never implied by a terminal status. Where the group
        acts by a list, False until that has ended the room."""
        return self._unanswered == 0 and not self._kept and Residency.reusable(self.residency())

    @property
    def slot(self) -> int:
        """The room's index in Client.poll_all; -1 while the open is not answered."""
        return self._slot

    # Waits. Each has a bound.

    def wait(self, timeout: float) -> int:
        """The status once it is terminal, or what it is after timeout seconds."""
        self._client._until(lambda: KVPoll.terminal(self.poll()), timeout)
        return self.poll()

    def wait_reusable(self, timeout: float) -> bool:
        """Waits until the pages are reusable. False after timeout seconds."""
        return self._client._until(lambda: self.reusable, timeout)

    # Requests.

    def register(self, parts: Parts, wait: bool = True) -> Optional[str]:
        """Destination, once: the pages to write to, in the order of the source's pages."""
        described, ids = _describe(parts, prefix=True)
        return self._with_pages("register", f',"parts":{described}', ids, wait)

    def send(self, parts: Parts = (), last: bool = False, aux: frames.Buffer = b"",
             layers: Optional[Tuple[int, int]] = None, wait: bool = True) -> Optional[str]:
        """Source: these pages are complete in memory. Chunks go in order; the one with last ends the room's data
        (it may name no pages) and carries aux. layers [from, to) limits it to some layers of the pages."""
        described, ids = _describe(parts, prefix=False)
        more = f',"parts":{described}'
        if last:
            more += ',"last":true'
        aux = memoryview(aux).cast("B") if len(aux) else b""
        if len(aux) > frames.MAX_AUX:
            raise LimitExceeded(f"aux has {len(aux)} bytes, at most {frames.MAX_AUX} are carried", field="aux")
        if len(aux):
            more += f',"aux":{len(aux)}'
        if layers is not None:
            more += f',"layers":[{frames.index(layers[0], "layers")},{frames.index(layers[1], "layers")}]'
        return self._with_pages("send", more, [*ids, aux] if len(aux) else ids, wait, numbered=self._numbered)

    def abort(self, wait: bool = True) -> Optional[str]:
        """Ends the room, unless it has ended. Does not make its pages reusable."""
        return self._ending("abort", "", wait)

    def release(self, wait: bool = True) -> None:
        """Takes the pages back and frees the slot; the room is of no use after it. NotReusable while somebody may
        still touch the pages."""
        client = self._client
        self._opened()
        if self._verdict is not None:
            return
        if self._kept:
            raise NotReusable("the group's list has not ended the room", rule="R4")
        with client._lock:
            live, status, residency = self._bytes, self.poll(), self.residency()
            if residency == Residency.RELEASED:
                return
            if client.lost is None and KVPoll.terminal(status):
                self._bytes = _Fixed(status, residency)  # the slot may be another room's before the answer is read
                self._leaving = True
        if client.lost is not None:
            self._release_lost()
            return

        def then(header: Dict[str, Any], payload: bytes) -> None:
            client._detach(self, status)

        def failed(error: TerminusError) -> None:
            with client._lock:
                if isinstance(self._bytes, _Fixed):
                    self._bytes = live
                self._leaving = False
            if not wait:
                self._note(error)

        try:
            try:
                pending: Pending[None] = client._connection.submit(self._request("release"), then=then,
                                                                   failed=failed, hold=not wait)
            except TerminusError as e:
                failed(e)
                raise
            if wait:
                self._result(pending)
        except EngineLost:
            client._latched.wait(client.timeout)
            self._release_lost()

    def failure(self) -> Failure:
        """Why the room is in its state. After the engine is lost: from what the client knows."""
        client = self._client
        if self._slot < 0 and self._opening is not None:
            client._connection.flush()
            self._opening.wait(client.timeout)
        if self._verdict is not None:
            return self._verdict

        def then(header: Dict[str, Any], payload: bytes) -> Failure:
            return Failure(frames.integer(header, "status", high=4), frames.integer(header, "residency", high=6),
                           frames.text(header, "reason"), frames.text(header, "doc"), frames.text(header, "detail"))

        if client.lost is None:
            try:
                return client._connection.submit(self._request("failure"), then=then).result(client.timeout)
            except EngineLost:
                client._latched.wait(client.timeout)
        status, residency = self.poll(), self.residency()
        if status == KVPoll.Success:
            return Failure(status, residency, "success", "", "")
        doc = _WORKER_LOST if client.loss_reason == "worker_lost" else _ENGINE_LOST
        return Failure(status, residency, client.loss_reason, doc, client.lost or "")

    def aux(self) -> bytes:
        """Destination: the aux record of a room that ended with Success, until it is released."""
        self._opened()

        def then(header: Dict[str, Any], payload: bytes) -> bytes:
            size = frames.integer(header, "aux", high=frames.MAX_AUX)
            return payload[len(payload) - size:] if size <= len(payload) else payload

        return self._client._connection.submit(self._request("aux"), then=then).result(self._client.timeout)

    # Inside.

    def _request(self, kind: str) -> str:
        return f'{{"t":"{kind}","slot":{self._slot},"room":{self.id}'

    def _opened(self) -> None:
        """Waits for the answer to open where it is not here yet; raises what open was refused with."""
        if self._slot < 0 and self._opening is not None:
            self._client._connection.flush()
            self._opening.result(self._client.timeout)

    def _settle(self, status: int, reason: str, doc: str, detail: str) -> None:
        """open got no slot: this is the room's end."""
        self._verdict = Failure(status, Residency.NONE, reason, doc, detail)
        self._bytes = _Fixed(status)
        if self._client._group is not None:
            self._client._group.opened(self)

    def _note(self, error: TerminusError) -> None:
        if self.error is None:
            self.error = error

    def _with_pages(self, kind: str, more: str, ids: List[frames.Buffer], wait: bool,
                    numbered: Optional[Numbered] = None) -> Optional[str]:
        client = self._client
        if client.lost is not None:
            return client.loss_reason
        self._opened()
        if self._verdict is not None:
            return self._verdict.reason
        error, self.error = self.error, None
        if error is not None:
            raise error
        with client._lock:
            self._given = self._given or not more.startswith(',"parts":[]')
            self._unanswered += 1
        return self._ending(kind, more, wait, ids, numbered, pages=True)

    def _answered(self) -> None:
        with self._client._lock:
            self._unanswered -= 1

    def _ending(self, kind: str, more: str, wait: bool, ids: Sequence[frames.Buffer] = (),
                numbered: Optional[Numbered] = None, pages: bool = False) -> Optional[str]:
        """Sends a request that a room which has ended answers with its reason."""
        client = self._client

        def then(answer: Dict[str, Any], payload: bytes) -> str:
            if pages:
                self._answered()
            return frames.text(answer, "reason") if answer.get("ended") is True else ""

        def failed(error: TerminusError) -> Optional[str]:
            if pages:
                self._answered()
            if isinstance(error, EngineLost):
                return client.loss_reason
            if not wait:
                self._note(error)
            return None

        try:
            self._opened()
            if self._verdict is not None:
                return self._verdict.reason
            pending = client._connection.submit(self._request(kind) + more, ids, then=then, failed=failed,
                                                numbered=numbered, hold=not wait)
        except EngineLost:
            client._latched.wait(client.timeout)  # until then the page may say that no pages are held
            if pages:
                self._answered()
            return client.loss_reason
        except TerminusError:
            if pages:
                self._answered()
            raise
        return (self._result(pending) or None) if wait else None

    def _result(self, pending: "Pending[Any]") -> Any:
        return pending.result(self._client.timeout)

    def _release_lost(self) -> None:
        self._client._prove()
        if not self.reusable:
            raise NotReusable("the engine is lost and its plugins may still write; see Room.wait_reusable", rule="R4")
        self._client._detach(self, self.poll())


def _describe(parts: Parts, prefix: bool) -> Tuple[str, List[frames.Buffer]]:
    """The parts as JSON text, and their page ids."""
    described: List[str] = []
    ids: List[frames.Buffer] = []
    for part in parts:
        try:
            pool, pages, held = part if len(part) == 3 else (*part, 0)
        except (TypeError, ValueError) as e:
            raise BadField("a part is (pool, pages) or (pool, pages, prefix)", field="parts") from e
        raw = frames.page_ids(pages, "parts")
        if held and not prefix:
            raise BadField("only register takes a prefix", field="prefix")
        first = f',"prefix":{frames.index(held, "prefix")}' if held else ""
        described.append(f'{{"pool":{frames.index(pool, "pool")},"pages":{len(raw) // 4}{first}}}')
        ids.append(raw)
    return f"[{','.join(described)}]", ids
