"""An in-process host for tests: real memory, frames encoded and decoded as on a stream."""

import fcntl
import mmap
import os
import queue
import socket
import threading
import time
import unittest

import terminus_plugin as tp
from terminus_plugin import contract_pb2 as pb
from terminus_plugin.session import Session

PATIENCE = 30.0  # bounds every wait; nothing should come near it
CANARY = 0xC0FFEE0DDF00D5
TOKEN = b"t" * 32
SEALS = 0x1 | 0x2 | 0x4


def sealed_memfd(size, seals=SEALS):
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, 1033, seals)
    return fd


class Memory:
    """Worker memory: the test holds the worker's mapping."""

    def __init__(self, size):
        self.fd = sealed_memfd(size)
        self.map = mmap.mmap(self.fd, size)
        self.lease, self.plugins_lease = socket.socketpair()

    def descriptors(self):
        """What the plugin gets, and owns."""
        return os.open(f"/proc/self/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC), self.plugins_lease.detach()

    def lease_ended(self):
        self.lease.setblocking(False)
        try:
            return self.lease.recv(1) == b""
        except BlockingIOError:
            return False

    def close(self):
        self.map.close()
        os.close(self.fd)
        self.lease.close()
        self.plugins_lease.close()


class Host:
    """One session with its streams. Close it."""

    def __init__(self, backend, node="n0", incarnation=3, config=b"", runtime_dir="/nowhere"):
        self.session = Session(backend)
        self.response = self.session.handshake(
            pb.HandshakeRequest(
                versions=[1],
                node=node,
                incarnation=incarnation,
                epoch=1,
                config_json=config,
                runtime_dir=runtime_dir,
                host_id="h",
            )
        )
        self.events, self.beats = [], []
        self._grew = threading.Condition()
        self._to = queue.SimpleQueue()
        self._to_control = queue.SimpleQueue()
        self._threads = []
        self.memories = []
        self.seq = 0
        self.ids = iter(range(100, 1 << 30))
        if self.response.error:
            return
        self._pump(self.session.serve_session(iter(self._to.get, None)), self.events)
        self._pump(self.session.serve_control(iter(self._to_control.get, None)), self.beats)

    def _pump(self, frames, into):
        def run():
            for frame in frames:
                decoded = pb.PluginFrame.FromString(frame.SerializeToString())
                with self._grew:
                    into.extend(decoded.events)
                    self._grew.notify_all()

        t = threading.Thread(target=run, daemon=True)
        t.start()
        self._threads.append(t)

    def send(self, **event):
        """One event in a frame of its own."""
        self.send_frame(pb.HostEvent(**event))

    def send_frame(self, *events):
        self._to.put(pb.HostFrame.FromString(pb.HostFrame(events=events).SerializeToString()))

    def control(self, **event):
        self._to_control.put(pb.HostFrame(events=[pb.HostEvent(**event)]))

    def until(self, what, fits, events=None):
        """The first event that fits."""
        events = self.events if events is None else events
        deadline = time.monotonic() + PATIENCE
        with self._grew:
            while True:
                for e in events:
                    if fits(e):
                        return e
                if not self._grew.wait(deadline - time.monotonic()):
                    raise AssertionError(f"no {what}; seen: {events}")

    def kind(self, kind, **fields):
        """The first event of a kind with these fields."""

        def fits(e):
            m = getattr(e, kind)
            return e.WhichOneof("event") == kind and all(getattr(m, k) == v for k, v in fields.items())

        return getattr(self.until(f"{kind} {fields}", fits), kind)

    def stats(self):
        """A barrier: everything that was sent has been handled."""
        n = next(self.ids)
        self.send(stats=pb.StatsRequest(id=n))
        return self.kind("stats", id=n)

    def region(self, length, **changes):
        """Make memory known: id and Memory."""
        m = Memory(length)
        self.memories.append(m)
        n = next(self.ids)
        m.map[length - 8 : length] = CANARY.to_bytes(8, "little")
        self.session.descriptors(n, *m.descriptors())
        self.send(
            region_add=pb.RegionAdd(
                **{
                    "region": n,
                    "kind": pb.MEMORY_KIND_HOST_SHM,
                    "size": length,
                    "canary_offset": length - 8,
                    "canary": CANARY,
                    **changes,
                }
            )
        )
        self.until("answer", lambda e: n in (e.region_ready.region, e.region_failed.region))
        return n, m

    def peer(self, **changes):
        n = next(self.ids)
        self.send(
            peer_add=pb.PeerAdd(
                **{
                    "peer": n,
                    "node": "n1",
                    "incarnation": 4,
                    "epoch": 1,
                    "same_host": True,
                    "require_lane": pb.LANE_ANY,
                    "token": TOKEN,
                    **changes,
                }
            )
        )
        self.until("answer", lambda e: n in (e.peer_ready.peer, e.peer_failed.peer))
        return n

    def plan(self, pages=16, page=4096, layers=2, region=None, peer=None):
        """A region, a peer, pools of `layers` tensors at both ends and a plan: (plan, peer, memory)."""
        size = layers * pages * page + 64
        memory = None
        if region is None:
            region, memory = self.region(size)
        peer = self.peer() if peer is None else peer
        tensors = [
            pb.Tensor(region=region, offset=i * pages * page, page_stride=page, page_bytes=page, layer=i)
            for i in range(layers)
        ]
        src, dst, plan = next(self.ids), next(self.ids), next(self.ids)
        remote = pb.PoolAdd(pool=dst, pages=pages, tensors=tensors)
        for t in remote.tensors:
            t.region = 7
        self.send(pool_add=pb.PoolAdd(pool=src, pages=pages, tensors=tensors))
        self.send(remote_pool_add=pb.RemotePoolAdd(peer=peer, pool=remote))
        self.send(
            plan_add=pb.PlanAdd(
                plan=plan,
                src_pool=src,
                peer=peer,
                dst_pool=dst,
                src_pages=1,
                dst_pages=1,
                slices=[pb.Slice(src_tensor=i, dst_tensor=i, len=page, count=1) for i in range(layers)],
            )
        )
        self.default = dict(plan=plan, peer=peer, layer_from=0, layer_to=layers, bytes=layers * page)
        return plan, peer, memory

    def op(self, **changes):
        """A Submit of one page of the last plan, not sent yet."""
        self.seq += 1
        g = pb.Generation(source=pb.Opener(incarnation=3, sequence=9), destination=pb.Opener(incarnation=4, sequence=9))
        page = pb.Runs(start=[0], count=[1])
        return pb.Submit(
            **{
                "op": next(self.ids),
                "seq": self.seq,
                "generation": g,
                "direction": pb.DIRECTION_WRITE,
                "source": page,
                "destination": page,
                **self.default,
                **changes,
            }
        )

    def submit(self, **changes):
        m = self.op(**changes)
        self.send(submit=m)
        return m.op

    def of(self, op):
        """The kinds of the events of an op so far."""
        with self._grew:
            return [
                e.WhichOneof("event")
                for e in self.events
                if getattr(getattr(e, e.WhichOneof("event")), "op", None) == op
            ]

    def end(self, op):
        """The end of an op: kind and event."""
        kinds = ("done", "failed", "skipped", "aborted")
        e = self.until(
            f"end of op {op}", lambda e: e.WhichOneof("event") in kinds and getattr(e, e.WhichOneof("event")).op == op
        )
        return e.WhichOneof("event"), getattr(e, e.WhichOneof("event"))

    def close(self):
        try:
            self.session.close()
        finally:
            self._to.put(None)
            self._to_control.put(None)
            for t in self._threads:
                t.join(PATIENCE)
                assert not t.is_alive(), "a stream does not end"
            for m in self.memories:
                m.close()


class Fake(tp.Backend):
    """Does what the test says."""

    features = [tp.BYTE_PROGRESS, tp.STRIDED, tp.LAYER_RANGE]
    limits = tp.Limits()
    config = None

    def __init__(self, transfer=None):
        self.do = transfer or (lambda op: op.done(tp.Lane.SHM))
        self.calls = []

    def info(self):
        return tp.Info("fake", "1.0.0", list(self.features), self.limits, self.config, op_concurrency=4)

    def start(self, s):
        self.s = s
        return b"endpoint"

    def add_region(self, r):
        self.calls.append(("add_region", r.id))

    def remove_region(self, r):
        self.calls.append(("remove_region", r.id))

    def add_peer(self, p):
        self.calls.append(("add_peer", p.handle))
        return tp.Lane.SHM

    def remove_peer(self, p):
        self.calls.append(("remove_peer", p.handle))

    def transfer(self, op):
        self.do(op)

    def close(self):
        self.calls.append(("close",))


class Case(unittest.TestCase):
    def host(self, transfer=None, backend=None, **options):
        h = Host(backend or Fake(transfer), **options)
        self.addCleanup(h.close)
        return h

    def order(self, h, op, *kinds):
        h.stats()
        self.assertEqual(h.of(op), list(kinds))
