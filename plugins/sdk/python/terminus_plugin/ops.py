"""Submit, abort, drain and stats: the life of an op."""

from __future__ import annotations

import collections
import math
import time
import traceback
from typing import TYPE_CHECKING, Any, Callable

from . import contract_pb2 as pb
from . import plan as plans
from .backend import LATE_REFUSED, LAYER_RANGE, STRIDED, Cause, Error, Generation, Lane, Level, Opener, Stop
from .crew import Crew
from .op import Op, OpState
from .text import cut

if TYPE_CHECKING:
    from .session import Session

# The shortest time between two Progress events of an op. The contract allows a millisecond; in Python each
# event takes the interpreter away from a copy.
PROGRESS_EVERY = 0.01
RECENT_OPS = 1 << 14  # ended ops that are remembered, so that a reused id is noticed
EARLY_ABORTS = 4096  # aborts that overtook their Submit
MAX_COUNTERS = 256


class Recent:
    """The last n ids added."""

    def __init__(self, n: int):
        self._n = n
        self._ids: "set[int]" = set()
        # Not a dict for both: to find the oldest key of one it walks over all those deleted before it.
        self._order: "collections.deque[int]" = collections.deque()

    def add(self, i: int) -> None:
        if i in self._ids:
            return
        if len(self._order) == self._n:
            self._ids.remove(self._order.popleft())
        self._ids.add(i)
        self._order.append(i)

    def __contains__(self, i: int) -> bool:
        return i in self._ids


def cause_of(error: Exception, other: Cause) -> int:
    """The cause that an error carries, else other."""
    return int(error.cause if isinstance(error, Error) else other)


def breached(what: str) -> Error:
    """The host broke the contract."""
    return Error(Cause.PROTOCOL, what)


def opener(field: str, m: Any) -> Opener:
    """Convert and check a key. Raises Error."""
    if m.incarnation == 0 or m.sequence == 0:
        raise breached(f"{field} is {m.incarnation}.{m.sequence}; neither part may be 0")
    return Opener(m.incarnation, m.sequence)


def concrete(lane: int) -> bool:
    """Tell whether bytes can take this lane."""
    return lane in Lane.__members__.values() and lane != Lane.ANY


def slower(lane: int, demanded: int) -> bool:
    """Tell whether a known lane is worse than the demanded one."""
    return Lane.ANY not in (lane, demanded) and lane > demanded


class Ops:
    """The part of a Session that keeps its ops."""

    def __init__(self: "Session", concurrency: int):
        self.workers = Crew("terminus-op", concurrency, self._transfer)
        # Guarded by mu.
        self.ops: "dict[int, OpState]" = {}  # not ended, or ended and not quiet
        self.ended = Recent(RECENT_OPS)
        self.bytes_done = 0
        self.last_seq = 0
        # The loop's own.
        self.early = Recent(EARLY_ABORTS)
        self.draining = False
        self.drain_at = math.inf
        self._stats_busy = False

    def op_handlers(self: "Session") -> "dict[str, Callable[[Any], None]]":
        return {
            "submit": self._submit,
            "abort": self._abort,
            "drain": self._drain,
            "stats": self._stats,
            "comm_create": self._comm_refused,
            "rebuild": self._comm_refused,
            "comm_run": self._comm_run,
            "comm_close": lambda m: self.post(pb.PluginEvent(comm_closed=pb.CommClosed(comm=m.comm))),
        }

    # Taking an op

    def _submit(self: "Session", m: Any) -> None:
        st, why = None, None
        try:
            st = self._new_op(m)
        except Error as e:
            why = self._failed(m.op, e)
        with self.mu:
            fresh, problem = self._admit(m.op, m.seq)
            if problem is not None:
                why = self._failed(m.op, problem)
            if why is None and m.op in self.early:
                why = pb.PluginEvent(aborted=pb.Aborted(op=m.op, quiet=True))
            elif why is None and self.draining:
                why = pb.PluginEvent(
                    skipped=pb.Skipped(op=m.op, cause=int(Cause.SHUTDOWN), detail="the plugin is draining", quiet=True)
                )
            elif why is None and len(self.ops) >= self.max_ops:
                why = self._failed(m.op, Error(Cause.LIMIT, f"Limits.max_ops is {self.max_ops}"))
            if fresh:
                self.emit(pb.PluginEvent(accepted=pb.Accepted(op=m.op)))
                if why is not None:
                    self._refuse(m.op, why)
                else:
                    self.ops[st.id] = st
                    st.peer.live += 1
                    for r in st.regions:
                        r.unquiet += 1
        if not fresh:
            self.breach(f"Submit.op {m.op} is used a second time")
        elif why is None:
            self.workers.put(st)

    def _admit(self: "Session", op: int, seq: int) -> "tuple[bool, Error | None]":
        """Note op and seq. Not fresh: nothing may be answered, because the op already has its end or will
        get it. mu is held."""
        last = self.last_seq
        self.last_seq = max(last, seq)
        if op in self.ops or op in self.ended:
            return False, None
        if seq != last + 1:
            return True, breached(f"Submit.seq is {seq} after {last}")
        return True, None

    def _refuse(self: "Session", op: int, end: Any) -> None:
        """End an op that never became one of ops. mu is held."""
        self.emit(end, 256)
        self.ended.add(op)

    @staticmethod
    def _failed(op: int, e: Error) -> Any:
        return pb.PluginEvent(failed=pb.Failed(op=op, cause=int(e.cause), detail=cut(str(e)), quiet=True))

    def _new_op(self: "Session", m: Any) -> OpState:
        """Hold a Submit against the tables. Raises Error with the field."""
        if m.direction == pb.DIRECTION_READ:
            raise Error(Cause.UNSUPPORTED, "Submit.direction READ is not served by contract version 1")
        if m.direction != pb.DIRECTION_WRITE:
            raise breached(f"Submit.direction is {m.direction}")
        source = opener("Submit.generation.source", m.generation.source)
        destination = opener("Submit.generation.destination", m.generation.destination)
        peer = self.peers.get(m.peer)
        if peer is None or not peer.ready or peer.removing or peer.accept:
            raise breached(f"Submit.peer {m.peer} is no ready peer")
        entry = self.plans.get(m.plan)
        if entry is None:
            raise breached(f"Submit.plan {m.plan} is unknown")
        if entry.error is not None:
            raise Error(Cause(cause_of(entry.error, Cause.PROTOCOL)), f"Submit.plan {m.plan} is bad: {entry.error}")
        if entry.peer != m.peer:
            raise breached(f"Submit.plan {m.plan} belongs to peer {entry.peer}, not {m.peer}")
        for r in entry.regions:
            if self.ready_region(r.region.id) is not r.region:
                raise breached(f"Submit.plan {m.plan}: region {r.region.id} is gone")
        if m.layer_to <= m.layer_from:
            raise breached(f"Submit.layer_to {m.layer_to} is not above layer_from {m.layer_from}")
        st = OpState(self, m)
        st.generation = Generation(source, destination)
        st.peer, st.plan, st.regions = peer, entry.plan, entry.regions
        try:
            st.source, pages, strided = plans.check_runs("Submit.source", m.source, entry.plan.src.pages)
            st.dest, dst_pages, dst_strided = plans.check_runs(
                "Submit.destination", m.destination, entry.plan.dst.pages
            )
        except plans.BadPlan as e:
            raise breached(str(e)) from None
        plan = entry.plan
        groups, rest = divmod(pages, plan.src_pages)
        if rest or groups * plan.dst_pages != dst_pages:
            raise breached(
                f"Submit.source names {pages} pages, Submit.destination {dst_pages}; "
                f"plan {m.plan} pairs groups of {plan.src_pages} and {plan.dst_pages}"
            )
        self._check_shape(m, st, groups, strided or dst_strided)
        if m.deadline_ns:
            st.deadline = time.monotonic() + m.deadline_ns / 1e9
        return st

    def _check_shape(self: "Session", m: Any, st: OpState, groups: int, strided: bool) -> None:
        """Check features, limits and the size of an op. Raises Error."""
        if strided and not self.has(STRIDED):
            raise Error(Cause.UNSUPPORTED, f"Submit: runs with a stride need feature {STRIDED}")
        per_group = st.plan.bytes_per_group(m.layer_from, m.layer_to)
        if not self.has(LAYER_RANGE) and per_group != st.plan.bytes_per_group():
            raise Error(
                Cause.UNSUPPORTED,
                f"Submit: layers [{m.layer_from},{m.layer_to}) of plan {m.plan} need feature {LAYER_RANGE}",
            )
        if per_group * groups != m.bytes:
            raise breached(f"Submit.bytes is {m.bytes}; {groups} groups of {per_group} bytes are named")
        lim = self.info.limits
        if lim.max_op_bytes and m.bytes > lim.max_op_bytes:
            raise Error(Cause.LIMIT, f"Submit.bytes is {m.bytes}, Limits.max_op_bytes {lim.max_op_bytes}")
        if lim.max_runs and max(len(st.source), len(st.dest)) > lim.max_runs:
            raise Error(Cause.LIMIT, f"Submit has more runs than Limits.max_runs {lim.max_runs}")

    # Running an op

    def _transfer(self: "Session", st: OpState) -> None:
        """Run the author's code for one op on the calling thread."""
        with self.mu:
            if st.ended or self.over.is_set():  # aborted while it waited for its turn
                return
            st.started = True
        try:
            self.backend.transfer(Op(st))
        except BaseException as e:  # a thread has no one else to tell
            self.count("backend_exceptions")
            self.log(Level.ERROR, f"transfer of op {st.id} raised: {traceback.format_exc()}")
            self._no_terminal(st, f"transfer raised {e!r}")
            return
        if not st.kept:
            self._no_terminal(st, "transfer returned without an end")

    def _no_terminal(self: "Session", st: OpState, detail: str) -> None:
        """End an op that its author forgot. An op that has ended is left alone."""
        with self.mu:
            if not st.ended:
                self.counts["no_terminal"] += 1
                self._end(st, "failed", False, Cause.NO_TERMINAL, 0, detail)

    def op_dropped(self: "Session", st: OpState) -> None:
        """The finalizer of a kept handle; may run anywhere, with any lock held."""
        self.result(lambda: self._no_terminal(st, "the op handle was dropped without an end"))

    def op_end(
        self: "Session", st: OpState, kind: str, quiet: bool, cause: int = 0, lane: int = 0, detail: str = ""
    ) -> None:
        """Carry out the author's end: the first one counts."""
        if kind == "done" and not concrete(lane):
            kind, cause, detail = "failed", Cause.INTERNAL, f"the backend reported lane {lane!r} for a finished op"
        elif kind == "done" and slower(lane, st.peer.peer.require_lane):
            kind, cause = "failed", Cause.LANE
            detail = f"the bytes took lane {Lane(lane).name}, {st.peer.peer.require_lane.name} is demanded"
        elif kind in ("failed", "skipped") and cause not in Cause.__members__.values():
            cause, detail = Cause.INTERNAL, f"the backend gave cause {cause!r}; {detail}"
        with self.mu:
            if kind == "aborted" and st.why is Stop.PEER_REMOVED:
                kind, cause, detail = "failed", Cause.PEER_UNREACHABLE, "the peer was removed"
            second = st.ended
            if second:
                self.counts["second_ends"] += 1
            else:
                self._end(st, kind, bool(quiet), cause, lane, detail)
        if second:
            self.log(Level.WARN, f"op {st.id} was ended a second time ({kind} {detail}); the first end stands")

    def _end(self: "Session", st: OpState, kind: str, quiet: bool, cause: int, lane: int, detail: str) -> None:
        """The only place that ends an op. mu is held, st.ended is False."""
        st.ended, st.quiet = True, quiet
        detail = cut(str(detail))
        if kind == "done":
            self.bytes_done += st.bytes
            e = pb.PluginEvent(done=pb.Done(op=st.id, bytes=st.bytes, quiet=quiet, lane=int(lane)))
        elif kind == "failed":
            e = pb.PluginEvent(failed=pb.Failed(op=st.id, cause=int(cause), detail=detail, quiet=quiet))
        elif kind == "skipped":
            e = pb.PluginEvent(skipped=pb.Skipped(op=st.id, cause=int(cause), detail=detail, quiet=quiet))
        else:
            e = pb.PluginEvent(aborted=pb.Aborted(op=st.id, quiet=quiet))
        self.emit(e, len(detail))
        st.cancel(Stop.ABORTED)
        st.peer.live -= 1
        if st.peer.live == 0 and st.peer.removing:
            self.result(self.settle)
        if quiet:
            self._forget(st)

    def op_quiesced(self: "Session", st: OpState) -> None:
        """Carry out Op.quiesced."""
        with self.mu:
            good = st.ended and not st.quiet
            if good:
                st.quiet = True
                self.emit(pb.PluginEvent(quiesced=pb.Quiesced(op=st.id)))
                self._forget(st)
            else:
                self.counts["stray_quiesced"] += 1
        if not good:
            self.log(Level.WARN, f"quiesced of op {st.id} ignored: it is legal once, after an end with quiet=False")

    def _forget(self: "Session", st: OpState) -> None:
        """Drop an op that has ended and is quiet. mu is held."""
        del self.ops[st.id]
        self.ended.add(st.id)
        settle = not self.ops and self.draining
        for r in st.regions:
            r.unquiet -= 1
            settle = settle or (r.unquiet == 0 and r.removing)
        if settle:
            self.result(self.settle)

    # Progress

    def op_progress(self: "Session", st: OpState, moved: int) -> None:
        """Carry out Op.progress."""
        moved = int(moved)
        with self.mu:
            if st.ended:
                return
            if moved > st.bytes:
                self.counts["progress_beyond_size"] += 1
                moved = st.bytes
            if moved < st.moved:
                self.counts["progress_backwards"] += 1
                return
            st.moved = moved
            now = time.monotonic()
            if moved > st.sent and now - st.last_sent >= PROGRESS_EVERY:
                self._queue_progress(st, now)

    def _queue_progress(self: "Session", st: OpState, now: float) -> None:
        """Put a Progress in the outbox unless one waits there already. mu is held."""
        st.last_sent = now
        if not st.queued:
            st.queued = True
            self.emit(st)

    def progress_event(self: "Session", st: OpState) -> Any:
        """The waiting Progress of an op, made when it goes out."""
        with self.mu:
            st.queued = False
            st.sent = st.moved
            return pb.PluginEvent(progress=pb.Progress(op=st.id, bytes=st.moved))

    def flush_progress(self: "Session", now: float) -> None:
        """Send what the rate limit held back; called on every beat."""
        with self.mu:
            for st in self.ops.values():
                if not st.ended and st.moved > st.sent:
                    self._queue_progress(st, now)

    # Ending ops from outside

    def _abort(self: "Session", m: Any) -> None:
        """Idempotent. An abort that overtook its Submit is remembered for it; one of an ended op is
        forgotten."""
        with self.mu:
            st = self.ops.get(m.op)
            if st is None and m.op not in self.ended:
                self.early.add(m.op)
        if st is not None:
            self.abort_op(st, Stop.ABORTED)

    def abort_op(self: "Session", st: OpState, why: Stop) -> None:
        """Tell the author to stop. An op that has not begun ends at once."""
        with self.mu:
            waiting = not st.started and not st.ended
            if waiting and why is Stop.PEER_REMOVED:
                self._end(st, "failed", True, Cause.PEER_UNREACHABLE, 0, "the peer was removed")
            elif waiting:
                self._end(st, "aborted", True, 0, 0, "")
            st.cancel(why)
        if waiting:
            self.workers.remove(st)

    def _drain(self: "Session", m: Any) -> None:
        self.draining = True
        self.drain_at = time.monotonic() + min(m.deadline_ns / 1e9, 3600.0)
        self.settle()

    def finish_drain(self: "Session") -> None:
        """Answer the Drain: all is quiet, or the deadline came."""
        self.drain_at = math.inf
        with self.mu:
            self.emit(pb.PluginEvent(drained=pb.Drained(open_ops=len(self.ops))))

    # Stats

    def _stats(self: "Session", m: Any) -> None:
        """Answer beside the loop when the backend has counters, which may take their time. One request of
        the backend runs at once; meanwhile the answers come without its counters."""
        if not hasattr(self.backend, "counters") or self._stats_busy:
            self._report(m.id, {})
            return
        self._stats_busy = True

        def work() -> "Callable[[], None]":
            counters, error = self.call("counters")
            if error is None:
                try:
                    counters = {cut(name, 64): max(0, int(counters[name])) for name in sorted(counters)[:MAX_COUNTERS]}
                except (TypeError, ValueError) as e:
                    counters, error = None, e

            def report() -> None:
                self._stats_busy = False
                if error is not None:
                    self.log(Level.ERROR, f"counters: {error!r}")
                self._report(m.id, counters or {})

            return report

        self.job("stats", work)

    def _report(self: "Session", id: int, counters: "dict[str, int]") -> None:
        """Queue the answer behind every event that led to it, in one step with the list of open ops."""
        with self.mu:
            stats = pb.Stats(
                id=id,
                last_seq=self.last_seq,
                open_ops=sorted(self.ops),
                bytes_done=self.bytes_done,
                late_refused=counters.get(LATE_REFUSED, 0),
            )
            for name, n in counters.items():
                stats.counters[name] = n
            for name, n in self.counts.items():
                stats.counters["sdk." + name] = n
            self.emit(pb.PluginEvent(stats=stats), 10 * len(self.ops) + 80 * len(stats.counters) + 256)

    # Collectives: a transfer backend has none

    def _comm_refused(self: "Session", m: Any) -> None:
        detail = f"backend {self.info.name} is a transfer backend; collectives are not served"
        self.post(
            pb.PluginEvent(
                comm_failed=pb.CommFailed(comm=m.comm, round=m.round, cause=int(Cause.UNSUPPORTED), detail=detail)
            ),
            128,
        )

    def _comm_run(self: "Session", m: Any) -> None:
        why = Error(Cause.UNSUPPORTED, f"CommRun: backend {self.info.name} is a transfer backend")
        with self.mu:
            fresh, problem = self._admit(m.op, m.seq)
            if fresh:
                self.emit(pb.PluginEvent(accepted=pb.Accepted(op=m.op)))
                self._refuse(m.op, self._failed(m.op, problem or why))
        if not fresh:
            self.breach(f"CommRun.op {m.op} is used a second time")
