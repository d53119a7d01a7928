"""The plugin process, seen by a host: real processes, real gRPC."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import grpc

from terminus_plugin import contract_pb2 as pb
from terminus_plugin.process import COOKIE_KEY, COOKIE_VALUE, SERVICE, STOP_GRACE
from terminus_plugin.session import CLOSE_BOUND, SDK_VERSION

from .host import PATIENCE, Memory

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(HERE)


def environment(**more):
    env = {k: v for k, v in os.environ.items() if k != COOKIE_KEY and not k.startswith(("PLUGIN_", "ENGINE_"))}
    return {**env, "PYTHONPATH": ROOT, "PYTHONDONTWRITEBYTECODE": "1", **more}


def gone(pid):
    """A process that is dead, also when nobody has collected it."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


class Process:
    """A plugin process and the host's end of everything."""

    def __init__(self, mode, **env):
        self.dir = tempfile.TemporaryDirectory()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stderr = tempfile.TemporaryFile()
        self.child = subprocess.Popen(
            [sys.executable, os.path.join(HERE, "backends.py"), mode],
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
            env=environment(
                **{
                    COOKIE_KEY: COOKIE_VALUE,
                    "ENGINE_CTRL_FD": str(theirs.fileno()),
                    "PLUGIN_UNIX_SOCKET_DIR": self.dir.name,
                    **env,
                }
            ),
        )
        theirs.close()
        self.channel = None

    def read_line(self):
        """go-plugin's line; "" when the process has ended without one."""
        return self.child.stdout.readline().decode()

    def connect(self):
        line = self.read_line()
        fields = line.rstrip("\n").split("|")
        assert fields[:3] == ["1", "1", "unix"] and fields[4:] == ["grpc", ""], (line, self.errors())
        self.path = fields[3]
        self.channel = grpc.insecure_channel(f"unix:{self.path}")

    def call(self, method, request=b"", parse=None):
        return self.channel.unary_unary(method, response_deserializer=parse)(request, timeout=PATIENCE)

    def handshake(self, config=b""):
        request = pb.HandshakeRequest(versions=[1], config_json=config, runtime_dir=self.dir.name)
        return self.call(f"/{SERVICE}/Handshake", request.SerializeToString(), pb.HandshakeResponse.FromString)

    def stream(self, name, requests):
        return self.channel.stream_stream(
            f"/{SERVICE}/{name}", pb.HostFrame.SerializeToString, pb.PluginFrame.FromString
        )(requests)

    def wait(self):
        return self.child.wait(PATIENCE)

    def errors(self):
        self.stderr.seek(0)
        return self.stderr.read().decode()

    def close(self):
        if self.channel is not None:
            self.channel.close()
        self.control.close()
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.child.wait()
        self.child.stdout.close()
        self.stderr.close()
        self.dir.cleanup()


class TestProcess(unittest.TestCase):
    def start(self, mode="", connect=True, **env):
        p = Process(mode, **env)
        self.addCleanup(p.close)
        if connect:
            p.connect()
        return p

    def test_shutdown(self):
        p = self.start()
        self.assertEqual(p.call("/grpc.health.v1.Health/Check", b"\n\x06plugin"), b"\x08\x01")
        with self.assertRaises(grpc.RpcError) as e:
            p.call("/grpc.health.v1.Health/Check", b"\n\x05other")
        self.assertEqual(e.exception.code(), grpc.StatusCode.NOT_FOUND)
        with self.assertRaises(grpc.RpcError) as e:
            p.call("/plugin.GRPCStdio/StreamStdio")
        self.assertEqual(e.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
        self.assertEqual(p.handshake().name, "modes")
        self.assertEqual(p.call("/plugin.GRPCController/Shutdown"), b"")
        self.assertEqual(p.wait(), 0, p.errors())
        self.assertFalse(os.path.exists(p.path))

    def test_out_of_order(self):
        p = self.start()
        for name in ("Session", "Control"):
            with self.assertRaises(grpc.RpcError) as e:
                next(p.stream(name, iter(())))
            self.assertEqual(e.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
        p.handshake()
        with self.assertRaises(grpc.RpcError):
            p.handshake()

    def test_end_of_the_session(self):
        p = self.start()
        p.handshake()
        p.stream("Session", iter(()))
        self.assertEqual(p.wait(), 0, p.errors())

    def test_print_does_not_break_the_handshake(self):
        p = self.start("prints")
        self.assertEqual(p.handshake().error, "")
        p.call("/plugin.GRPCController/Shutdown")
        self.assertEqual(p.wait(), 0)
        self.assertEqual(p.child.stdout.read(), b"")
        for text in ("from info", "straight to descriptor 1", "x" * 200_000, "y" * 200_000, "from a child"):
            self.assertIn(text, p.errors())

    def test_death_of_the_host(self):
        """Nothing may touch worker memory any more: at once, and the children come along."""
        p = self.start("child")
        child = int(p.handshake().endpoint)
        self.assertFalse(gone(child))
        p.control.close()
        self.assertEqual(p.wait(), -signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE
        while not gone(child):
            self.assertLess(time.monotonic(), deadline, "the child lives on")
            time.sleep(0.01)

    def test_control_socket_does_not_reach_children(self):
        p = self.start("child")
        child = int(p.handshake().endpoint)
        links = []
        for fd in os.listdir(f"/proc/{child}/fd"):
            try:
                links.append(os.readlink(f"/proc/{child}/fd/{fd}"))
            except FileNotFoundError:  # of a library that the child has just loaded
                pass
        self.assertEqual([link for link in links if link.startswith("socket:")], [])

    def test_signals(self):
        p = self.start()
        p.handshake()
        p.child.send_signal(signal.SIGINT)
        self.assertEqual(p.call("/grpc.health.v1.Health/Check", b"\n\x06plugin"), b"\x08\x01")
        p.child.send_signal(signal.SIGTERM)
        self.assertEqual(p.wait(), 0, p.errors())

    def test_sigterm_is_not_lost(self):
        """A handler in Python that woke the main thread by an Event hung one process in five."""
        processes = [self.start() for _ in range(6)]
        for p in processes:
            p.handshake()
            p.stream("Session", iter(threading.Event().wait, True))
            p.child.send_signal(signal.SIGTERM)
        for p in processes:
            self.assertEqual(p.wait(), 0, p.errors())

    def test_frames(self):
        p = self.start("fatal")
        p.handshake()
        m = Memory(4096)
        self.addCleanup(m.close)
        p.control.send(b"nonsense!")
        fds = m.descriptors()
        socket.send_fds(p.control, [(5).to_bytes(8, "little")], fds)
        for fd in fds:
            os.close(fd)
        gate = threading.Event()
        self.addCleanup(gate.set)

        def requests():
            yield pb.HostFrame(
                events=[pb.HostEvent(region_add=pb.RegionAdd(region=5, kind=1, size=4096, no_canary=True))]
            )
            gate.wait(PATIENCE)

        kinds = [e.WhichOneof("event") for frame in p.stream("Session", requests()) for e in frame.events]
        self.assertIn("log", kinds)  # about the nonsense
        self.assertIn("fault", kinds)
        self.assertEqual(p.wait(), 1)
        self.assertIn("modes: the backend gave up: the device fell off the bus", p.errors())

    def test_close_that_raises(self):
        p = self.start("close-raises")
        p.handshake()
        p.child.send_signal(signal.SIGTERM)
        self.assertEqual((p.wait(), p.errors()), (1, "modes: cannot close\n"))

    def test_close_of_a_call_that_does_not_return(self):
        """The reason is said before the host loses its patience and kills."""
        self.assertLess(CLOSE_BOUND + 2 * STOP_GRACE, 2)
        p = self.start("stuck")
        p.handshake()
        m = Memory(4096)
        self.addCleanup(m.close)
        fds = m.descriptors()
        socket.send_fds(p.control, [(5).to_bytes(8, "little")], fds)
        for fd in fds:
            os.close(fd)
        gate = threading.Event()
        self.addCleanup(gate.set)

        def requests():
            yield pb.HostFrame(
                events=[pb.HostEvent(region_add=pb.RegionAdd(region=5, kind=1, size=4096, no_canary=True))]
            )
            gate.wait(PATIENCE)

        call = p.stream("Session", requests())  # dropped, it would be cancelled
        deadline = time.monotonic() + PATIENCE
        while "registering" not in p.errors():
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)
        p.call("/plugin.GRPCController/Shutdown")
        self.assertEqual(p.wait(), 1)
        call.cancel()
        self.assertIn("modes: close: calls of backend modes did not return within 1.5 s", p.errors())

    def test_wrong_start(self):
        cases = (
            ({COOKIE_KEY: ""}, 2, "modes 1.0.0 is a Terminus transfer plugin: an engine starts it"),
            ({"ENGINE_CTRL_FD": ""}, 2, "modes: ENGINE_CTRL_FD is ''"),
            ({"ENGINE_CTRL_FD": "1"}, 2, "modes: ENGINE_CTRL_FD is '1'"),
            ({"ENGINE_CTRL_FD": "99"}, 2, "modes: ENGINE_CTRL_FD=99 is no socket"),
            ({"PLUGIN_CLIENT_CERT": "-----BEGIN"}, 2, "remove mtls: true from plugins.modes"),
        )
        processes = [self.start("", connect=False, **env) for env, _, _ in cases]
        for p, (_, code, says) in zip(processes, cases):
            with self.subTest(says):
                self.assertEqual((p.read_line(), p.wait()), ("", code))
                self.assertIn(says, p.errors())

    def test_version(self):
        with open(os.path.join(ROOT, "pyproject.toml")) as f:
            self.assertIn(f'\nversion = "{SDK_VERSION}"\n', f.read())

    def test_info(self):
        script = os.path.join(ROOT, "example", "copy_backend.py")
        out = subprocess.run(
            [sys.executable, script, "info"], env=environment(), capture_output=True, check=True, timeout=PATIENCE
        )
        d = json.loads(out.stdout)
        self.assertEqual((d["name"], d["contract_versions"], d["sdk"]["language"]), ("copy", [1], "python"))
        self.assertEqual(d["limits"]["max_ops"], 8192)
        self.assertEqual(out.stderr, b"")
