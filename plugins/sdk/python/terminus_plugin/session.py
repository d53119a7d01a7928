"""The plugin side of the contract for one process."""

from __future__ import annotations

import collections
import queue
import re
import threading
import time
import traceback
from typing import Any, Callable, Iterable, Iterator

from . import contract_pb2 as pb
from . import options
from .backend import FENCE_PEER, RECEIVER_CHECKED, BusyKind, Info, Level, Start, Stop
from .crew import Crew
from .ops import Ops
from .peers import Peers
from .regions import Regions
from .text import cut

CONTRACT_VERSION = 1
SDK_VERSION = "1.0.0"

DEFAULT_OPS = 8192  # ops outstanding, when the author names no limit
DEFAULT_CONCURRENCY = 16
MAX_TABLE = 1 << 16  # regions, pools, peers, plans, descriptors that wait for their RegionAdd
BEAT_EVERY = 1.0
CLOSE_BOUND = 1.5  # the host kills after 2 s, and the reason has to be on stderr by then
MAX_ENDPOINT = 64 << 10
MAX_FRAME = 1 << 20

# The backlog of events at which the session stops reading new host frames (aborts and beats still pass).
OUTBOX_HIGH = 16384
OUTBOX_LOGS = 256  # log events that may wait; further ones are dropped and counted
LOGS_PER_SECOND = 100
FRAME_EVENTS = 1024
FRAME_BYTES = MAX_FRAME // 2
FRAMES_AHEAD = 4  # host frames that are read before the loop takes them

# Threads for long calls of the backend, by kind.
JOBS = {"region": 4, "peer": 16, "grant": 32, "fence": 4, "stats": 1}

NAME = re.compile(r"[a-z][a-z0-9-]{0,31}\Z")


class OutOfOrder(Exception):
    """A call of the host that the contract does not allow now."""


class Session(Regions, Peers, Ops):
    """Feeds host frames to a backend and answers with plugin frames. serve makes one; tests drive one
    through serve_session and serve_control with frames of their own.

    One thread, the loop, owns the tables and sends the beats; long calls of the backend run beside it and
    hand their results back to it. Ops and the outbox are shared under mu.
    """

    def __init__(self, backend: Any):
        self.backend = backend
        self.info: Info = backend.info()
        self.max_ops = min(self.info.limits.max_ops, MAX_TABLE) or DEFAULT_OPS
        self.over = threading.Event()
        self.over_error: "Exception | None" = None
        self.mu = threading.Lock()
        self._state = "new"  # then shaking, ready, serving; guarded by mu
        # What the loop looks at; every append is followed by a token in _wake. The queue is reentrant, the
        # deques are atomic: both may be used from a finalizer.
        self._wake: "queue.SimpleQueue[None]" = queue.SimpleQueue()
        self._control: "collections.deque[Any]" = collections.deque()
        self._results: "collections.deque[Callable[[], None]]" = collections.deque()
        self._frames: "collections.deque[Any]" = collections.deque()
        self._room = threading.Semaphore(FRAMES_AHEAD)
        self._control_room = threading.Semaphore(FRAMES_AHEAD)
        self._beats: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
        self._beat_now = False
        self._beat_seq = 0
        # Guarded by mu.
        self._out: "list[tuple[Any, int]]" = []
        self._out_ready = threading.Condition(self.mu)
        self._logs = 0  # waiting in _out
        self._log_second, self._logged = 0.0, 0
        self.counts: "collections.Counter[str]" = collections.Counter()
        self._busy: "dict[object, tuple[BusyKind, int, float]]" = {}
        self._looping: "threading.Thread | None" = None
        self._jobs = {kind: Crew(f"terminus-{kind}", n, self._work) for kind, n in JOBS.items()}
        Regions.__init__(self)
        Peers.__init__(self)
        Ops.__init__(self, self.info.op_concurrency or DEFAULT_CONCURRENCY)
        self._handlers = {**self.region_handlers(), **self.peer_handlers(), **self.op_handlers()}

    # Handshake

    def check_info(self) -> None:
        """Find what the author got wrong. Raises ValueError."""
        info = self.info
        if not NAME.match(info.name):
            raise ValueError(f"Info.name {info.name!r} is not of the form [a-z][a-z0-9-]*, at most 32 bytes")
        if not info.version:
            raise ValueError("Info.version is empty")
        for feature, methods in (
            (RECEIVER_CHECKED, ("accept", "unaccept", "grant", "revoke")),
            (FENCE_PEER, ("fence_peer",)),
        ):
            missing = [m for m in methods if not hasattr(self.backend, m)]
            if feature in info.features and missing:
                raise ValueError(f"feature {feature} needs the methods {', '.join(missing)}")
        options.check_config(info.config)

    def has(self, feature: str) -> bool:
        """Tell whether the backend declares the feature."""
        return feature in self.info.features

    def describe(self) -> Any:
        """What the plugin says of itself, before any configuration. Raises ValueError or BadOptions."""
        self.check_info()
        lim = self.info.limits
        return pb.HandshakeResponse(
            name=self.info.name,
            plugin_version=self.info.version,
            kinds=[pb.KIND_TRANSFER],
            memory_kinds=[pb.MEMORY_KIND_HOST_SHM],
            features=self.info.features,
            limits=pb.Limits(
                max_ops=self.max_ops,
                max_ops_per_peer=lim.max_ops_per_peer,
                max_op_bytes=lim.max_op_bytes,
                max_bytes_per_peer=lim.max_bytes_per_peer,
                max_runs=lim.max_runs,
                max_regions=lim.max_regions,
                progress_timeout_ns=lim.progress_timeout_ns,
            ),
            config_schema=options.schema(self.info.config),
            sdk=pb.SdkInfo(language="python", version=SDK_VERSION),
        )

    def handshake(self, req: Any) -> Any:
        """Answer the host's first call and start the backend. What the operator can mend comes back in
        HandshakeResponse.error; OutOfOrder means that the call itself was."""
        self._step("new", "shaking", "handshake: called twice in one process")
        name = self.info.name
        try:
            resp = self.describe()
        except Exception as e:
            return pb.HandshakeResponse(error=f"plugin {name!r} is built wrong: {e}")
        if CONTRACT_VERSION not in req.versions:
            resp.error = (
                f"plugin {name} speaks contract version {CONTRACT_VERSION}, the engine {list(req.versions)}; "
                "upgrade the older of the two"
            )
            return resp
        resp.version = CONTRACT_VERSION
        try:
            config = options.decode(req.config_json, self.info.config)
        except options.BadOptions as e:
            resp.error = f"plugins.{name}.options: {e}"
            return resp
        try:
            endpoint = self.backend.start(
                Start(
                    req.node,
                    req.incarnation,
                    req.epoch,
                    req.host_id,
                    req.runtime_dir,
                    config,
                    self.declare_busy,
                    self.log,
                    self.fatal,
                )
            )
            if not isinstance(endpoint, bytes):
                raise TypeError(f"start returned {type(endpoint).__name__}; the endpoint is bytes")
            if len(endpoint) > MAX_ENDPOINT:
                raise ValueError(f"the endpoint has {len(endpoint)} bytes, at most {MAX_ENDPOINT} are allowed")
        except BaseException as e:  # also SystemExit: nobody else would hear of it
            resp.error = f"start backend {name}: {e}" if str(e) else f"start backend {name}: {e!r}"
            return resp
        resp.endpoint = endpoint
        self._step("shaking", "ready", "")
        return resp

    def _step(self, before: str, after: str, problem: str) -> None:
        with self.mu:
            if self._state != before:
                raise OutOfOrder(problem)
            self._state = after

    # Streams

    def serve_session(self, frames: "Iterable[Any]") -> "Iterator[Any]":
        """Speak the Session stream: take the host's frames, return the answers. Raises OutOfOrder."""
        self._step("ready", "serving", "session: opened before a good handshake, or twice")
        looping = threading.Thread(target=self._loop, name="terminus-loop", daemon=True)
        looping.start()
        self._looping = looping  # close may come at any time, and joins only what has started
        threading.Thread(target=self._read, args=(frames,), name="terminus-read", daemon=True).start()
        return self._write()

    def serve_control(self, frames: "Iterable[Any]") -> "Iterator[Any]":
        """Speak the Control stream: aborts in, beats out. Raises OutOfOrder."""
        with self.mu:
            if self._state not in ("ready", "serving"):
                raise OutOfOrder("control: opened before a good handshake")
        threading.Thread(target=self._read_control, args=(frames,), name="terminus-control", daemon=True).start()
        return iter(self._beats.get, None)

    def _read(self, frames: "Iterable[Any]") -> None:
        try:
            for frame in frames:
                self._room.acquire()
                if self.over.is_set():
                    return
                self._frames.append(frame)
                self._wake.put(None)
        except Exception:  # the host cancelled the call, or is gone
            pass
        self.end(None)

    def _read_control(self, frames: "Iterable[Any]") -> None:
        try:
            for frame in frames:
                self._control_room.acquire()
                if self.over.is_set():
                    return
                self._control.append(frame)
                self._wake.put(None)
        except Exception:
            pass
        self.end(None)  # without a control stream aborts cannot arrive and beats cannot leave

    def _write(self) -> "Iterator[Any]":
        """Yield what the outbox holds, then look again, until the session is over and the outbox empty."""
        while True:
            with self.mu:
                while not self._out and not self.over.is_set():
                    self._out_ready.wait()
                batch, self._out, self._logs = self._out, [], 0
            if not batch:
                return
            if len(batch) >= OUTBOX_HIGH:
                self._wake.put(None)  # there is room again
            events, total = [], 0
            for event, size in batch:
                if events and (len(events) >= FRAME_EVENTS or total + size > FRAME_BYTES):
                    yield pb.PluginFrame(events=events)
                    events, total = [], 0
                events.append(event if isinstance(event, pb.PluginEvent) else self.progress_event(event))
                total += size
            if events:
                yield pb.PluginFrame(events=events)

    # The outbox

    def emit(self, event: Any, size: int = 0) -> None:
        """Queue an event, or the Progress of an op. The caller holds mu. Nothing is ever dropped here: an op
        has at most one Accepted, one waiting Progress, one end and one Quiesced."""
        self._out.append((event, size + 32))
        if len(self._out) == 1:
            self._out_ready.notify()

    def post(self, event: Any, size: int = 0) -> None:
        """Queue an event; for callers that do not hold mu."""
        with self.mu:
            self.emit(event, size)

    def log(self, level: Level, message: str) -> None:
        """Send a log line to the host. Lines beyond LOGS_PER_SECOND, or faster than the host reads, are
        dropped and counted (sdk.logs_dropped in Stats)."""
        message = cut(str(message), 4096)
        if level not in Level.__members__.values():
            level = Level.INFO
        now = time.monotonic()
        with self.mu:
            if now - self._log_second >= 1:
                self._log_second, self._logged = now, 0
            self._logged += 1
            if self._logs >= OUTBOX_LOGS or self._logged > LOGS_PER_SECOND:
                self.counts["logs_dropped"] += 1
                return
            self._logs += 1
            self.emit(pb.PluginEvent(log=pb.Log(level=int(level), message=message)), len(message))

    def count(self, name: str) -> None:
        """Add one to a counter of Stats."""
        with self.mu:
            self.counts[name] += 1

    def breach(self, what: str) -> None:
        """Note that the host broke the contract where there is nothing to answer."""
        self.count("host_breaches")
        self.log(Level.WARN, "the engine broke the contract: " + what)

    # The end

    def end(self, error: "Exception | None") -> None:
        """End the session; the first error stays. Every op is told to stop."""
        with self.mu:
            if self.over.is_set():
                return
            self.over_error = error
            self.over.set()
            for st in self.ops.values():
                st.cancel(Stop.SESSION_OVER)
            self._out_ready.notify_all()
        self._room.release()
        self._control_room.release()
        self._wake.put(None)
        self._beats.put(None)

    def fatal(self, reason: Any) -> None:
        """Start.fatal: tell the host, then end."""
        detail = cut(str(reason), 4096)
        self.post(pb.PluginEvent(fault=pb.Fault(rule="backend", detail=detail)), len(detail))
        self.end(RuntimeError(f"the backend gave up: {reason}"))

    def close(self) -> None:
        """End the session, wait for the backend's running calls (CLOSE_BOUND), close the backend and unmap the
        regions. Regions stay mapped when a call of the backend does not return. Raises what went wrong."""
        self.end(None)
        deadline = time.monotonic() + CLOSE_BOUND
        idle = True
        if self._looping is not None and self._looping is not threading.current_thread():
            self._looping.join(CLOSE_BOUND)
            idle = not self._looping.is_alive()
        for crew in (*self._jobs.values(), self.workers):
            idle = crew.close(deadline) and idle
        if self._state in ("ready", "serving"):
            self.backend.close()
        if not idle:
            raise TimeoutError(
                f"close: calls of backend {self.info.name} did not return within {CLOSE_BOUND:g} s "
                "of the end of the session"
            )
        self.unmap_all()

    # The loop

    def _loop(self) -> None:
        try:
            self._beat()
            due = time.monotonic() + BEAT_EVERY
            while not self.over.is_set():
                wait = min(due, self.drain_at) - time.monotonic()
                try:
                    self._wake.get(timeout=max(wait, 0.0))
                    while True:  # one pass serves all tokens
                        self._wake.get_nowait()
                except queue.Empty:
                    pass
                while self._turn() and not self.over.is_set():
                    if time.monotonic() >= due:
                        break
                now = time.monotonic()
                if now >= due:
                    self.flush_progress(now)
                if now >= due or self._beat_now:
                    self._beat()
                    due = max(due, now + BEAT_EVERY) if now >= due else due
                    self._wake.put(None)  # a turn may have been cut short
                if now >= self.drain_at:
                    self.finish_drain()
        except Exception:  # a fault of this SDK: the host has to know (R12)
            self.fatal(f"fault in the session: {traceback.format_exc()}")
        finally:
            self._beats.put(None)

    def _turn(self) -> bool:
        """Take one thing to do; aborts overtake. False when there is nothing."""
        if self._control:
            frame = self._control.popleft()
            self._control_room.release()
            for e in frame.events:
                kind = e.WhichOneof("event")
                if kind in ("abort", "beat"):
                    self._handle(e, kind)
                else:
                    self.breach(f"{kind} on the Control stream")
            return True
        if self._results:
            self._results.popleft()()
            return True
        if self._frames and len(self._out) < OUTBOX_HIGH:
            frame = self._frames.popleft()
            self._room.release()
            for e in frame.events:
                self._handle(e, e.WhichOneof("event"))
            return True
        return False

    def _handle(self, e: Any, kind: "str | None") -> None:
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(getattr(e, kind))
        elif kind == "fault":
            f = e.fault
            self.end(RuntimeError(f"the engine ends this epoch: {f.rule} {f.field}: {f.detail}"))
        elif kind != "beat":  # the host's death is seen by the end of the control socketpair
            self.count("events_ignored")

    def result(self, f: "Callable[[], None]") -> None:
        """Run f on the loop."""
        self._results.append(f)
        self._wake.put(None)

    def job(self, kind: str, work: "Callable[[], Callable[[], None]]") -> None:
        """Run work beside the loop and then its result on the loop. work does not raise."""
        self._jobs[kind].put(work)

    def jobs_waiting(self, kind: str) -> int:
        """Jobs of a kind that no thread has taken yet."""
        return len(self._jobs[kind])

    def _work(self, work: "Callable[[], Callable[[], None]]") -> None:
        if not self.over.is_set():
            self.result(work())

    def call(self, name: str, *args: Any) -> "tuple[Any, BaseException | None]":
        """Call a method of the backend: its result and its error."""
        try:
            return getattr(self.backend, name)(*args), None
        except BaseException as e:  # a thread has no one else to tell
            self.log(Level.DEBUG, f"{name} raised: {traceback.format_exc()}")
            e.__traceback__ = e.__context__ = e.__cause__ = None  # its frames may hold a slice of a region
            return None, e

    # Beats

    def declare_busy(self, kind: BusyKind, subject: int) -> "Callable[[], None]":
        """Start.busy."""
        key = object()
        with self.mu:
            self._busy[key] = (BusyKind(kind), subject & (1 << 64) - 1, time.monotonic())
        self._beat_now = True
        self._wake.put(None)

        def done() -> None:
            with self.mu:
                self._busy.pop(key, None)

        return done

    def _beat(self) -> None:
        """Hand one beat to the control stream; one that still waits there is replaced."""
        self._beat_now = False
        self._beat_seq += 1
        beat = pb.Beat(seq=self._beat_seq)
        now = time.monotonic()
        with self.mu:
            for kind, subject, since in list(self._busy.values())[:64]:
                beat.busy.add(kind=int(kind), subject=subject, since_ns=int((now - since) * 1e9))
        try:
            self._beats.get_nowait()
        except queue.Empty:
            pass
        self._beats.put(pb.PluginFrame(events=[pb.PluginEvent(beat=beat)]))
