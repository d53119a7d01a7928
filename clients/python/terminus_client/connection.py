"""The socket: writes requests from any thread, matches answers by seq, never waits without a bound."""
from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import struct
import threading
import time
from typing import Any, Callable, Dict, Generic, Iterator, List, Optional, Sequence, Tuple, TypeVar

from . import frames
from .errors import BadState, ConnectFailed, EngineLost, LimitExceeded, ProtocolError, RequestTimeout, from_answer
from .errors import TerminusError

T = TypeVar("T")

WINDOW = 1024  # requests without an answer; the next one waits
_READ = 1 << 18
_HELD = 1 << 16  # bytes that a batch holds back at most
_PATH_MAX = 107  # bytes of a unix socket's path


class Pending(Generic[T]):
    """A request that was sent. Its answer is handled by the client whether or not anybody waits for it."""

    __slots__ = ("_answered", "_error", "_failed", "_then", "_value")

    def __init__(self, then: Callable[[Dict[str, Any], bytes], T],
                 failed: Optional[Callable[[TerminusError], Optional[T]]] = None) -> None:
        self._then = then
        self._failed = failed
        self._value: Optional[T] = None
        self._error: Optional[TerminusError] = None
        self._answered = threading.Lock()  # held until the answer is here: the cheapest event there is
        self._answered.acquire()

    def done(self) -> bool:
        """Whether the answer is here."""
        return not self._answered.locked()

    def wait(self, timeout: float) -> bool:
        """Waits at most timeout seconds for the answer."""
        if not self._answered.acquire(timeout=max(timeout, 0)):
            return False
        self._answered.release()
        return True

    def result(self, timeout: float) -> T:
        """The answer, waited for at most timeout seconds. Raises what the engine answered, EngineLost or
        RequestTimeout."""
        if not self.wait(timeout):
            raise RequestTimeout(f"the engine did not answer within {timeout:g} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]

    def _resolve(self, header: Dict[str, Any], payload: bytes) -> None:
        try:
            self._value = self._then(header, payload)
        except TerminusError as e:
            self._error = e
            raise
        except Exception as e:
            self._error = ProtocolError(f"the answer cannot be used: {e!r}")
            raise self._error from e
        finally:
            self._answered.release()

    def _reject(self, error: TerminusError) -> None:
        try:
            self._error = error
            if self._failed is not None:
                self._value = self._failed(error)
                if self._value is not None:
                    self._error = None
        finally:
            self._answered.release()


class Numbered:
    """Counts the chunks of a room in the order on the wire."""

    __slots__ = ("chunks",)

    def __init__(self) -> None:
        self.chunks = 0


class Connection:
    """One session's socket. `submit` may be called from any thread; `hello`, `pump`, `shut` and `fail` by one."""

    def __init__(self, path: str, timeout: float) -> None:
        if len(os.fsencode(path)) > _PATH_MAX:
            raise ConnectFailed(f"the path {path!r} is longer than {_PATH_MAX} bytes, the limit of a unix socket",
                                field="socket")
        self.timeout = timeout
        self.refusal: Optional[TerminusError] = None  # what the engine said about a message it could not parse
        self._lost: Optional[EngineLost] = None
        self._send_lock = threading.Lock()
        self._pending: Dict[int, Pending[Any]] = {}
        self._seq = 0
        self._batches = 0  # that are open
        self._held: List[bytes] = []  # requests that wait for the end of the batch
        self._held_bytes = 0
        self._decoder = frames.Decoder()
        self._pid = os.getpid()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.settimeout(timeout)
            self._socket.connect(path)
        except OSError as e:
            self._socket.close()
            raise ConnectFailed(f"no engine answers at {path}: {e}; is `engine run` up on this node?",
                                field="socket") from e
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """The socket's descriptor, to poll for answers; negative once shut."""
        return self._socket.fileno()

    def ours(self) -> bool:
        """Whether this process made the connection, and not its parent before a fork."""
        return os.getpid() == self._pid

    def peer_pid(self) -> int:
        """The engine's process id as the kernel knows it; 0 when it lives in another pid namespace."""
        raw = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        return int(struct.unpack("iII", raw)[0])

    def hello(self, header: str) -> Tuple[Dict[str, Any], List[int]]:
        """Sends the first request and reads its answer here, with the descriptors that ride on it. The
        descriptors are the caller's."""
        box: List[Dict[str, Any]] = []
        try:
            pending = self.submit(header, then=lambda answer, _: box.append(answer))
        except EngineLost:
            self.pump()  # it may have said why before it closed
            raise self.refusal or EngineLost("the engine closed the connection before hello") from None
        deadline = time.monotonic() + self.timeout
        fds: List[int] = []
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        try:
            while not pending.done():
                left = deadline - time.monotonic()
                if left <= 0:
                    raise RequestTimeout(f"the engine did not answer hello within {self.timeout:g} s")
                if not poller.poll(left * 1000 + 1):
                    continue
                try:
                    data, ancillary, flags, _ = self._socket.recvmsg(_READ, socket.CMSG_SPACE(4 * 16),
                                                                     socket.MSG_CMSG_CLOEXEC)
                except BlockingIOError:
                    continue
                except OSError as e:
                    raise EngineLost(f"the connection broke during hello: {e}") from e
                for level, kind, raw in ancillary:
                    if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                        received = array.array("i")
                        received.frombytes(raw[:len(raw) // 4 * 4])
                        fds += received
                if flags & socket.MSG_CTRUNC:
                    raise ProtocolError("the answer to hello carries too many descriptors")
                if not data:
                    raise self.refusal or EngineLost("the engine closed the connection during hello")
                self._take(data)
            pending.result(0)
            return box[0], fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def submit(self, header: str, payload: Sequence[frames.Buffer] = (), fds: Sequence[int] = (),
               then: Callable[[Dict[str, Any], bytes], T] = lambda *_: None,  # type: ignore[assignment]
               failed: Optional[Callable[[TerminusError], Optional[T]]] = None,
               numbered: Optional["Numbered"] = None, hold: bool = False) -> "Pending[T]":
        """Sends a request and returns without waiting for the answer. header is what frames.fields makes; seq is
        added to it. then makes the result of an ok answer, failed may turn an error into one; both run on the
        thread that pumps. numbered gives the request the next chunk number, if it is sent. hold lets it wait for
        the end of a batch. Raises EngineLost, RequestTimeout (nothing was sent), LimitExceeded."""
        if not self.ours():
            raise BadState("the client belongs to the parent process; open a new one after fork")
        pending = Pending(then, failed)
        with self._send_lock:
            if self._lost is not None:
                raise self._lost
            deadline = time.monotonic() + self.timeout
            self._await_window(deadline)
            seq = self._seq + 1
            if numbered is not None:
                header += f',"chunk":{numbered.chunks}'
            data = frames.encode(f'{header},"seq":{seq}}}', payload)
            self._pending[seq] = pending
            try:
                if hold and self._batches and not fds:
                    self._held.append(data)
                    self._held_bytes += len(data)
                    if self._held_bytes >= _HELD:
                        self._flush(deadline)
                else:
                    if self._held:
                        self._flush(deadline)
                    self._write(data, fds, deadline)
            except TerminusError:
                self._pending.pop(seq, None)
                raise
            self._seq = seq
            if numbered is not None:
                numbered.chunks += 1
        return pending

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Requests with hold that are submitted inside go out together at the end, in order."""
        with self._send_lock:
            self._batches += 1
        try:
            yield
        finally:
            with self._send_lock:
                self._batches -= 1
            self.flush()

    def flush(self) -> None:
        """Sends what a batch holds back, before somebody waits for it. A broken connection shows by its loss."""
        if self._held:
            with self._send_lock:
                if self._held and self._lost is None:
                    try:
                        self._flush(time.monotonic() + self.timeout)
                    except EngineLost:
                        pass

    def _flush(self, deadline: float) -> None:
        data = b"".join(self._held)
        self._held, self._held_bytes = [], 0
        try:
            self._write(data, (), deadline)
        except RequestTimeout:  # they have their numbers: leaving them out would break the order
            self._break()
            raise EngineLost("the engine does not read its socket") from None

    def _await_window(self, deadline: float) -> None:
        if self._held and len(self._pending) >= WINDOW:
            self._flush(deadline)
        while len(self._pending) >= WINDOW:
            if time.monotonic() > deadline:
                raise LimitExceeded(f"{WINDOW} requests are without an answer", field="seq")
            oldest = next(iter(list(self._pending.values())), None)
            if oldest is not None:
                oldest.wait(0.01)
            if self._lost is not None:
                raise self._lost

    def _write(self, data: bytes, fds: Sequence[int], deadline: float) -> None:
        sent = 0
        while sent < len(data):
            rest = memoryview(data)[sent:]
            try:
                if fds and sent == 0:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                    sent += self._socket.sendmsg([rest], rights)
                else:
                    sent += self._socket.send(rest)
            except BlockingIOError:
                left = deadline - time.monotonic()
                if left > 0:
                    poller = select.poll()
                    poller.register(self._socket, select.POLLOUT)
                    poller.poll(min(left, 1.0) * 1000 + 1)
                    continue
                if sent == 0:
                    raise RequestTimeout("the engine does not read its socket; nothing was sent") from None
                self._break()  # half a message is out: no later one could be understood
                raise EngineLost("the engine does not read its socket; a message was cut") from None
            except OSError as e:
                self._break()
                raise EngineLost(f"the connection broke: {e}") from e

    def _break(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def pump(self) -> Optional[int]:
        """Handles the answers that are there: bytes read, 0 when none wait, None at the end of the stream.
        Raises ProtocolError when the engine talks nonsense."""
        try:
            data = self._socket.recv(_READ)
        except BlockingIOError:
            return 0
        except OSError:
            return None
        if not data:
            return None
        self._take(data)
        return len(data)

    def _take(self, data: bytes) -> None:
        for header, payload in self._decoder.feed(data):
            kind = header.get("t")
            seq = frames.integer(header, "seq")
            error = None
            if kind == "error":
                error = from_answer(*(frames.text(header, f) for f in ("code", "field", "rule", "message")))
                if seq == 0:
                    self.refusal = error
                    continue
            elif kind != "ok":
                raise ProtocolError(f"an answer has the type {kind!r}", field="t")
            pending = self._pending.pop(seq, None)
            if pending is None:
                raise ProtocolError(f"an answer to {seq}, which no request waits for", field="seq")
            if error is not None:
                pending._reject(error)
            else:
                pending._resolve(header, payload)

    def shut(self, lost: EngineLost) -> None:
        """Closes the socket; from now on submit raises lost. Pending requests stay as they are until fail."""
        if self._lost is None:
            self._lost = lost
        self._break()  # wakes a writer, who holds the lock
        with self._send_lock:
            self._socket.close()

    def fail(self) -> None:
        """After shut: ends every request that has no answer."""
        assert self._lost is not None
        while self._pending:
            _, pending = self._pending.popitem()
            pending._reject(self._lost)
