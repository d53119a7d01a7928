"""One accepted operation: the author's handle and the session's side of it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Iterator

from . import plan as plans
from .backend import Cause, Error, Generation, Lane, Peer, Pool, Stop, Stopped
from .once import Once

if TYPE_CHECKING:
    from .session import Session


class OpState:
    """The session's side of an op. It never refers to the author's Op, so that a dropped handle can be
    noticed. Guarded by Session.mu from beginning on."""

    __slots__ = (
        "session",
        "id",
        "generation",
        "peer",
        "plan",
        "regions",
        "source",
        "dest",
        "layer_from",
        "layer_to",
        "bytes",
        "priority",
        "deadline",
        "trace",
        "kept",
        "why",
        "stopped",
        "started",
        "ended",
        "quiet",
        "moved",
        "sent",
        "queued",
        "last_sent",
    )

    def __init__(self, session: "Session", m: Any):
        self.session = session
        self.id: int = m.op
        self.bytes: int = m.bytes
        self.priority: int = m.priority
        self.layer_from: int = m.layer_from
        self.layer_to: int = m.layer_to
        self.trace: str = m.trace
        self.deadline: "float | None" = None
        self.kept = False
        self.why: "Stop | None" = None
        self.stopped: "Once | None" = None  # made when somebody first waits for it
        self.started = False  # transfer was called
        self.ended = False
        self.quiet = False
        self.moved = 0  # highest progress
        self.sent = 0  # highest progress queued or sent
        self.queued = False  # a Progress waits in the outbox
        self.last_sent = 0.0

    def cancel(self, why: Stop) -> None:
        """Tell the author to end the op; the first reason counts. Session.mu is held."""
        if self.why is None:
            self.why = why
        if self.stopped is not None:
            self.stopped.set()


class Op:
    """The handle of one accepted operation. It ends exactly once, by done, fail, skip or aborted; a second
    end changes nothing, is counted and logged. All methods may be called from any thread."""

    __slots__ = ("_st", "__weakref__")

    def __init__(self, st: OpState):
        self._st = st

    @property
    def id(self) -> int:
        """The op's number, unique within the plugin epoch."""
        return self._st.id

    @property
    def generation(self) -> Generation:
        """The openers. A receiver checks destination."""
        return self._st.generation

    @property
    def peer(self) -> Peer:
        """The target."""
        return self._st.peer.peer

    @property
    def plan(self) -> plans.Plan:
        """The plan with its slices, for backends that build their own descriptors."""
        return self._st.plan

    @property
    def src_pool(self) -> Pool:
        """The local pool."""
        return self._st.plan.src

    @property
    def dst_pool(self) -> Pool:
        """The peer's pool."""
        return self._st.plan.dst

    @property
    def bytes(self) -> int:
        """The size of the op: the sum of len over copies."""
        return self._st.bytes

    @property
    def priority(self) -> int:
        """The urgency; larger is more urgent, 0 is normal."""
        return self._st.priority

    @property
    def deadline(self) -> "float | None":
        """When (time.monotonic) the host will abort the op, None for never. A hint for ordering: the host
        judges (R5)."""
        return self._st.deadline

    @property
    def layers(self) -> "tuple[int, int]":
        """The range [from, to) of model layers that the op moves."""
        return self._st.layer_from, self._st.layer_to

    @property
    def trace(self) -> str:
        """The W3C traceparent of the request, or ""."""
        return self._st.trace

    @property
    def stop(self) -> "Stop | None":
        """Why the op should end early, None while it should not. Ask after every piece."""
        st = self._st
        return st.why or (Stop.SESSION_OVER if st.session.over.is_set() else None)

    @property
    def stopped(self) -> Once:
        """Happens when stop is set, and at the op's end at the latest; to wait for it with a timeout, or
        together with something else."""
        st = self._st
        with st.session.mu:
            if st.stopped is None:
                st.stopped = Once()
                if st.ended or self.stop is not None:
                    st.stopped.set()
            return st.stopped

    def copies(self) -> Iterator[plans.Copy]:
        """The contiguous copies of the op, neighbours joined. May be iterated more than once."""
        st = self._st
        return st.plan.copies(st.source, st.dest, st.layer_from, st.layer_to)

    def pieces(self, most: int) -> Iterator[plans.Copy]:
        """The copies of the op cut to at most `most` bytes each, for backends that copy with the CPU: between
        two pieces they look at stop and report progress."""
        for c in self.copies():
            while c.len > most:
                yield c._replace(len=most)
                c = c._replace(src_off=c.src_off + most, dst_off=c.dst_off + most, len=c.len - most)
            yield c

    def rows(self) -> Iterator[plans.Row]:
        """The op as strided rows, for libraries that take them."""
        st = self._st
        return st.plan.rows(st.source, st.dest, st.layer_from, st.layer_to)

    def runs(self) -> "Iterator[tuple[plans.Run, plans.Run]]":
        """The page runs in pairs of equal count: source pages, destination pages. For plans that pair page
        with page; with REPAGE see source and destination."""
        return plans.pair_runs(self._st.source, self._st.dest)

    @property
    def source(self) -> "list[plans.Run]":
        """The source pages in order; plan.src_pages at a time are a group."""
        return self._st.source

    @property
    def destination(self) -> "list[plans.Run]":
        """The destination pages in order; plan.dst_pages at a time are a group."""
        return self._st.dest

    def progress(self, moved: int) -> None:
        """Report the bytes moved so far. It never goes back (R8) and is sent at most once a millisecond;
        calling it after every piece is cheap. Ignored after the end."""
        self._st.session.op_progress(self._st, moved)

    def done(self, lane: Lane, quiet: bool = True) -> None:
        """End the op: every byte is visible to the destination worker. lane is the path that the bytes
        took, never Lane.ANY. quiet=False when a duplicate may still land: quiesced must follow."""
        self._st.session.op_end(self._st, "done", quiet, lane=lane)

    def fail(self, cause: Cause, detail: str, *, quiet: bool) -> None:
        """End the op. quiet says that no access of it can land any more, at either end; if False, quiesced
        must follow when that becomes true. The detail is cut to 256 bytes."""
        self._st.session.op_end(self._st, "failed", quiet, cause=cause, detail=detail)

    def fail_error(self, error: Exception, *, quiet: bool) -> None:
        """fail with the cause that the error carries (Error), else Cause.TRANSPORT. A Stopped ends the op as
        aborted does."""
        if isinstance(error, Stopped):
            self.aborted(quiet=quiet)
        else:
            self.fail(
                error.cause if isinstance(error, Error) else Cause.TRANSPORT, str(error) or repr(error), quiet=quiet
            )

    def skip(self, cause: Cause, detail: str, *, quiet: bool) -> None:
        """End the op because the backend decided not to do it. Nothing to do is done, not skip."""
        self._st.session.op_end(self._st, "skipped", quiet, cause=cause, detail=detail)

    def aborted(self, *, quiet: bool) -> None:
        """End the op because of op.stop."""
        self._st.session.op_end(self._st, "aborted", quiet)

    def quiesced(self) -> None:
        """Say, after an end with quiet=False, that no access of the op can land any more."""
        self._st.session.op_quiesced(self._st)

    def keep(self) -> None:
        """Let transfer return before the op has ended: keep the handle and end it later. A handle that is
        dropped without an end is ended as failed with Cause.NO_TERMINAL."""
        st = self._st
        if not st.kept:
            st.kept = True
            weakref.finalize(self, st.session.op_dropped, st).atexit = False
