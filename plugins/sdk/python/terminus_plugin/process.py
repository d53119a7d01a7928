"""The plugin process: go-plugin's handshake, gRPC, the control socketpair, signals and exit codes."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

if TYPE_CHECKING:
    from .session import Session

COOKIE_KEY = "ENGINE_PLUGIN_COOKIE"
COOKIE_VALUE = "every-request-reaches-a-terminal-status"
CONTROL_FD = "ENGINE_CTRL_FD"
SERVICE = "terminus.contract.v1.Plugin"
MAX_MESSAGE = 16 << 20
WINDOW = 4 << 20

# Exit codes.
OK = 0
FAULT = 1  # the backend or the session failed; the reason is on stderr
USAGE = 2
HOST_GONE = 3  # the control socketpair reported end of file

SIGNAL_POLL = 0.1  # seconds until a signal that another thread got is handled
# What wakes the main thread, besides the numbers of signals.
SHUTDOWN = b"s"
OVER = b"o"

HOST_GONE_WAIT = 0.1  # how long the end of a session waits for the host's death that may explain it
SWITCH = 0.001  # how long a thread that computes keeps an event of another op from going out
STOP_GRACE = 0.2  # for calls of the host that run when the server stops


def serve(backend: Any) -> NoReturn:
    """Run the backend as a plugin process. Call it from the main thread, first thing.

    Started by an engine it serves until the engine ends the session, shuts it down or dies. With the
    argument "info" it prints a description as JSON. Started by hand it says what it is.
    """
    line = _take_stdout()
    from .session import Session

    session = Session(backend)
    if sys.argv[1:2] == ["info"]:
        _exit(_print_info(session, line))
    if os.environ.get(COOKIE_KEY) != COOKIE_VALUE:
        name = session.info.name
        _say(
            f"{name} {session.info.version} is a Terminus transfer plugin: an engine starts it "
            f"(plugins.{name}.script in engine.yaml).\nTo see what it offers run: {sys.executable} {sys.argv[0]} info"
        )
        _exit(USAGE)
    _exit(_serve(session, line))


def _print_info(session: "Session", out: TextIO) -> int:
    from . import contract_pb2 as pb
    from .session import CONTRACT_VERSION

    try:
        r = session.describe()
    except Exception as e:  # what the author got wrong
        _say(str(e))
        return FAULT
    print(
        json.dumps(
            {
                "name": r.name,
                "version": r.plugin_version,
                "kinds": [pb.Kind.Name(k) for k in r.kinds],
                "memory_kinds": [pb.MemoryKind.Name(k) for k in r.memory_kinds],
                "features": list(r.features),
                "limits": {f.name: getattr(r.limits, f.name) for f in pb.Limits.DESCRIPTOR.fields},
                "contract_versions": [CONTRACT_VERSION],
                "sdk": {"language": r.sdk.language, "version": r.sdk.version},
                "config_schema": json.loads(r.config_schema),
            },
            indent=2,
        ),
        file=out,
        flush=True,
    )
    return OK


def _serve(session: "Session", line: TextIO) -> int:
    name = session.info.name
    # ^C at the engine's terminal is the engine's to handle. SIGPIPE is ignored by Python: a line on stderr
    # that the dead engine no longer reads must not kill us before our children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What wakes this thread comes through a pipe. A signal does so, too: its handler in Python runs only once
    # this thread runs, and may interrupt it anywhere, so that nothing may depend on the handler.
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    stopped = threading.Event()  # GRPCController.Shutdown
    sys.setswitchinterval(SWITCH)
    try:
        control = _control_socket()
    except OSError as e:
        _say(f"{name}: {e}")
        return USAGE
    if os.environ.get("PLUGIN_CLIENT_CERT"):
        _say(
            f"{name}: mutual TLS is not served in Python, whose gRPC refuses the engine's certificate; "
            f"remove mtls: true from plugins.{name}"
        )
        return USAGE
    threading.Thread(target=_watch_host, args=(session, control), name="terminus-host", daemon=True).start()

    def shutdown() -> None:
        stopped.set()
        os.write(wake, SHUTDOWN)

    def over() -> None:
        session.over.wait()
        os.write(wake, OVER)

    threading.Thread(target=over, name="terminus-over", daemon=True).start()
    path = os.path.join(os.environ.get("PLUGIN_UNIX_SOCKET_DIR") or "/tmp", f"plugin{os.getpid()}")
    server = _listen(session, path, shutdown)
    print(f"1|1|unix|{path}|grpc|", file=line, flush=True)

    why = b""
    while why not in (SHUTDOWN, OVER, bytes([signal.SIGTERM])):
        why = os.read(awake, 1)
    if why == OVER:
        stopped.wait(HOST_GONE_WAIT)  # meanwhile the host's death may be seen
    problem: "Exception | None" = None
    try:
        session.close()
    except Exception as e:
        problem = e
    server.stop(STOP_GRACE).wait(2 * STOP_GRACE)
    try:
        os.unlink(path)
    except OSError:
        pass
    for error in (problem, session.over_error):
        if error is not None:
            _say(f"{name}: {error}")
            return FAULT
    return OK


def _take_stdout() -> TextIO:
    """Keep standard output for what it is read for: whoever prints from now on, in Python or C, prints on
    standard error. Returns the former, which stays open as long as the process."""
    out = open(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout.flush()
    sys.stdout = sys.stderr
    return out


def _control_socket() -> socket.socket:
    """The plugin's end of the control socketpair. Raises OSError."""
    text = os.environ.get(CONTROL_FD, "")
    if not text.isdigit() or int(text) < 3:
        raise OSError(f"{CONTROL_FD} is {text!r}; the engine sets it to the number of a descriptor")
    try:
        control = socket.socket(fileno=int(text))
        kind = control.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    except OSError as e:
        raise OSError(f"{CONTROL_FD}={text} is no socket: {e.strerror}") from None
    if kind != socket.SOCK_SEQPACKET:
        raise OSError(f"{CONTROL_FD}={text} is no SOCK_SEQPACKET socket")
    control.setblocking(True)
    control.set_inheritable(False)
    return control


def _watch_host(session: "Session", control: socket.socket) -> None:
    """Read the control socketpair until the host is gone; then nothing may touch worker memory any more,
    so there is nothing to close in good order. A message that is not 8 bytes and two descriptors is
    dropped, its descriptors closed."""
    from .backend import Level

    while True:
        try:
            data, fds, _, _ = socket.recv_fds(control, 64, 16, socket.MSG_CMSG_CLOEXEC)
        except OSError as e:
            _host_gone(session.info.name, str(e))
        if not data and not fds:
            _host_gone(session.info.name, "EOF")
        if len(data) == 8 and len(fds) == 2:
            session.descriptors(int.from_bytes(data, "little"), fds[0], fds[1])
            continue
        for fd in fds:
            os.close(fd)
        session.count("bad_descriptor_messages")
        session.log(
            Level.WARN,
            "the engine broke the contract: a control message of "
            f"{len(data)} bytes with {len(fds)} descriptors; 8 and 2 are expected",
        )


def _host_gone(name: str, why: str) -> NoReturn:
    """Exit at once. The children, which no engine is left to end, come along: the host makes every plugin
    the leader of a process group; one that is not was started by somebody else and is left alone."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    try:
        os.write(2, f"{name}: the engine is gone ({why})\n".encode())
    finally:
        os._exit(HOST_GONE)


def _listen(session: "Session", path: str, shutdown: Any) -> Any:
    """Serve the contract and what go-plugin asks for on a unix socket."""
    # Children are started by exec; gRPC need not get ready for a bare fork.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    from . import contract_pb2 as pb
    from .session import OutOfOrder

    def in_order(call: Any) -> Any:
        def handler(request: Any, context: Any) -> Any:
            try:
                return call(request)
            except OutOfOrder as e:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(e))

        return handler

    def health(request: bytes, context: Any) -> bytes:
        if request not in (b"", b"\n\x06plugin"):
            context.abort(grpc.StatusCode.NOT_FOUND, "only the service plugin is known")
        return b"\x08\x01"  # SERVING

    def stop(_request: bytes, _context: Any) -> bytes:
        shutdown()
        return b""

    frames = dict(request_deserializer=pb.HostFrame.FromString, response_serializer=pb.PluginFrame.SerializeToString)
    server = grpc.server(
        ThreadPoolExecutor(max_workers=8, thread_name_prefix="terminus-grpc"),
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.max_send_message_length", MAX_MESSAGE),
            ("grpc.http2.lookahead_bytes", WINDOW),
        ],
    )
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                SERVICE,
                {
                    "Handshake": grpc.unary_unary_rpc_method_handler(
                        in_order(session.handshake),
                        pb.HandshakeRequest.FromString,
                        pb.HandshakeResponse.SerializeToString,
                    ),
                    "Session": grpc.stream_stream_rpc_method_handler(in_order(session.serve_session), **frames),
                    "Control": grpc.stream_stream_rpc_method_handler(in_order(session.serve_control), **frames),
                },
            ),
            grpc.method_handlers_generic_handler(
                "grpc.health.v1.Health", {"Check": grpc.unary_unary_rpc_method_handler(health)}
            ),
            grpc.method_handlers_generic_handler(
                "plugin.GRPCController", {"Shutdown": grpc.unary_unary_rpc_method_handler(stop)}
            ),
        )
    )
    server.add_insecure_port(f"unix:{path}")
    server.start()
    return server


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _exit(code: int) -> NoReturn:
    """End the process now, whatever threads still run."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads any more
            pass
    os._exit(code)
