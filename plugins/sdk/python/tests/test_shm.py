import os
import socket
import tempfile
import threading
import time
import unittest
from unittest import mock

import terminus_plugin as tp
from terminus_plugin import contract_pb2 as pb
from terminus_plugin.shm import Share, share, wire
from terminus_plugin.shm.wire import Hello, Record

from .host import PATIENCE, TOKEN, Host


class Copy(Share, tp.Backend):
    def info(self):
        return tp.Info("copy", "1", [tp.BYTE_PROGRESS, tp.STRIDED, tp.LAYER_RANGE])

    def start(self, s):
        self.listen(s)
        self.hold = None
        return self.endpoint

    def transfer(self, op):
        try:
            for c in op.copies():
                with op.peer.data.acquire(c.dst_region, op) as m:
                    if self.hold is not None:
                        self.hold.wait(PATIENCE)
                    tp.copy(m, c.dst_off, c.src, c.src_off, c.len)
            op.done(tp.Lane.SHM)
        except tp.Error as e:
            op.fail_error(e, quiet=True)


class Pair(unittest.TestCase):
    """Two engines' plugins in one process: a writes into b."""

    def setUp(self):
        self.a, self.b = self.start("a", 3), self.start("b", 4)
        self.size = 2 * 16 * 4096 + 64
        self.region, self.theirs = self.b.region(self.size)

    def start(self, node, incarnation):
        d = tempfile.TemporaryDirectory()
        self.addCleanup(d.cleanup)
        h = Host(Copy(), node=node, incarnation=incarnation, runtime_dir=d.name)
        self.assertEqual(h.response.error, "")
        self.addCleanup(h.close)
        return h

    def connect(self, accept=True):
        if accept:
            self.b.send(
                peer_accept=pb.PeerAccept(peer=1, node="a", incarnation=3, epoch=1, same_host=True, token=TOKEN)
            )
        peer = self.a.peer(endpoint=self.b.response.endpoint)
        _, peer, self.mine = self.a.plan(peer=peer)
        for e in list(self.a.session._remote.values()):
            for t in e.pool.tensors:
                t.region_id = self.region
        self.a.stats()
        for e in list(self.a.session._remote.values()):
            for t in e.pool.tensors:
                t.region_id = self.region
        return peer


class TestShare(Pair):
    def test_bytes(self):
        self.connect()
        self.mine.map[:] = os.urandom(self.size)
        runs = pb.Runs(start=[0], count=[16])
        kind, e = self.a.end(self.a.submit(source=runs, destination=runs, bytes=16 * 8192))
        self.assertEqual((kind, e.lane), ("done", pb.LANE_SHM), e)
        self.assertEqual(self.theirs.map[: 2 * 16 * 4096], self.mine.map[: 2 * 16 * 4096])

    def test_removed_region_is_let_go(self):
        self.connect()
        self.assertEqual(self.a.end(self.a.submit())[0], "done")
        self.b.send(region_remove=pb.RegionRemove(region=self.region))
        self.b.kind("region_removed", region=self.region)
        self.assertTrue(self.theirs.lease_ended())
        kind, e = self.a.end(self.a.submit())
        self.assertEqual((kind, e.cause), ("failed", pb.CAUSE_REFUSED))

    def test_removal_waits_for_copies(self):
        self.a.session.backend.hold = threading.Event()
        self.connect()
        op = self.a.submit(layer_to=1, bytes=4096)  # one copy
        deadline = time.monotonic() + PATIENCE
        while not any(c._mapped for c in list(self.b.session.backend._inbound)) and time.monotonic() < deadline:
            time.sleep(0.001)
        self.b.send(region_remove=pb.RegionRemove(region=self.region))
        time.sleep(0.05)
        self.assertFalse(self.theirs.lease_ended())
        self.a.session.backend.hold.set()
        self.assertEqual(self.a.end(op)[0], "done")
        self.b.kind("region_removed", region=self.region)
        self.assertTrue(self.theirs.lease_ended())

    def test_dismissed_writer_lets_go(self):
        self.connect()
        self.assertEqual(self.a.end(self.a.submit())[0], "done")
        self.b.send(peer_remove=pb.PeerRemove(peer=1))
        self.b.kind("peer_removed", peer=1)
        self.assertEqual(list(self.b.session.backend._inbound), [])

    def test_removed_peer_is_let_go(self):
        peer = self.connect()
        self.assertEqual(self.a.end(self.a.submit())[0], "done")
        self.a.send(peer_remove=pb.PeerRemove(peer=peer))
        self.a.kind("peer_removed", peer=peer)
        self.b.send(peer_remove=pb.PeerRemove(peer=1))
        self.b.kind("peer_removed", peer=1)

    def test_writer_that_is_not_admitted(self):
        with mock.patch.object(share, "ADMIT_BOUND", 1):
            self.connect(accept=False)
            kind, e = self.a.end(self.a.submit())
        self.assertEqual((kind, e.cause), ("failed", pb.CAUSE_REFUSED), e)
        self.assertEqual(self.b.stats().counters["shm.refused"], 1)

    def test_writer_that_is_admitted_late(self):
        self.connect(accept=False)
        op = self.a.submit()
        self.a.stats()
        self.b.send(peer_accept=pb.PeerAccept(peer=1, node="a", incarnation=3, epoch=1, same_host=True, token=TOKEN))
        self.assertEqual(self.a.end(op)[0], "done")

    def test_abort_while_it_waits(self):
        self.connect(accept=False)
        op = self.a.submit()
        self.a.stats()
        self.a.control(abort=pb.AbortOp(op=op))
        kind, e = self.a.end(op)
        self.assertEqual((kind, e.quiet), ("aborted", True))

    def test_owner_that_is_gone(self):
        self.connect()
        self.assertEqual(self.a.end(self.a.submit())[0], "done")
        self.b.session.backend.close()
        kind, e = self.a.end(self.a.submit())
        self.assertEqual(kind, "failed")
        self.assertIn(e.cause, (pb.CAUSE_TRANSPORT, pb.CAUSE_PEER_UNREACHABLE))
        self.assertFalse(os.path.exists(self.b.session.backend._path), "the socket file is left behind")
        self.b.session.backend.close()

    def test_connects_anew(self):
        self.connect()
        self.assertEqual(self.a.end(self.a.submit())[0], "done")
        for c in list(self.b.session.backend._inbound):
            wire.hang_up(c.conn, socket.SHUT_WR)
            self.assertTrue(c.over.wait(PATIENCE))
        deadline = time.monotonic() + PATIENCE
        while self.a.end(self.a.submit())[0] != "done":
            self.assertLess(time.monotonic(), deadline)

    def test_bounds(self):
        self.connect()
        for e in self.a.session._remote.values():
            e.pool.tensors[0].offset = 1 << 40
        kind, e = self.a.end(self.a.submit())
        self.assertEqual((kind, e.cause), ("failed", pb.CAUSE_BOUNDS))

    def test_peers_that_are_no_good(self):
        for changes, says in (
            (dict(same_host=False), "another machine"),
            (dict(endpoint=b"tcp:1.2.3.4"), "not one of this backend"),
            (dict(endpoint=b"shm1:/nowhere/at/all"), "its plugin has ended"),
            (dict(endpoint=b"shm1:/" + b"x" * 200), "not one of this backend"),
        ):
            f = self.a.kind("peer_failed", peer=self.a.peer(**{"endpoint": self.b.response.endpoint, **changes}))
            self.assertEqual(f.cause, pb.CAUSE_PEER_UNREACHABLE)
            self.assertIn(says, f.detail)


class TestWire(Pair):
    """A writer that does not keep the protocol harms itself."""

    def dial(self):
        c = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.addCleanup(c.close)
        c.settimeout(PATIENCE)
        c.connect(self.b.session.backend._path)
        return c

    def welcome(self):
        self.b.send(peer_accept=pb.PeerAccept(peer=1, node="a", incarnation=3, epoch=1, same_host=True, token=TOKEN))
        c = self.dial()
        c.send(Hello(3, 1, TOKEN).encode())
        self.assertEqual(Record.decode(c.recv(100)), Record(wire.WELCOME))
        return c

    def test_layout(self):
        self.assertEqual(
            Hello(0x0102, 3, b"k" * 32).encode(),
            b"TSHM1\0\0\0" + b"\x02\x01" + b"\0" * 6 + b"\x03\0\0\0" + b"\0" * 4 + b"k" * 32,
        )
        self.assertEqual(
            Record(3, 1, 2, 0x0500).encode(),
            b"\x03\0\0\0" + b"\x01\0\0\0" + b"\x02" + b"\0" * 7 + b"\0\x05" + b"\0" * 6,
        )

    def test_bad_hello(self):
        for b in (b"x", b"TSHM2\0\0\0" + b"\0" * 48, b"\0" * 60):
            c = self.dial()
            c.send(b)
            self.assertEqual(c.recv(100), b"")

    def test_map(self):
        c = self.welcome()
        c.send(Record(wire.MAP, 0, 999).encode())
        self.assertEqual(Record.decode(c.recv(100)), Record(wire.MAPPED, wire.UNKNOWN, 999))
        c.send(Record(wire.MAP, 0, self.region).encode())
        data, fds, _, _ = socket.recv_fds(c, 100, 4)
        self.assertEqual(Record.decode(data), Record(wire.MAPPED, 0, self.region, self.size))
        self.assertEqual(len(fds), 2)
        for fd in fds:
            os.close(fd)
        c.send(Record(wire.UNMAPPED, 0, self.region).encode())

    def test_breaches_end_the_connection(self):
        for b in (b"short", Record(77).encode(), Record(wire.UNMAPPED, 0, 5).encode(), b"\0" * 99):
            with self.subTest(b):
                c = self.welcome()
                c.send(b)
                self.assertEqual(c.recv(100), b"")
                c.close()
                self.b.send(peer_remove=pb.PeerRemove(peer=1))
                self.b.until("removal", lambda e: e.peer_removed.peer == 1)
                self.b.events.clear()

    def test_hung_writer_delays_removal_by_a_bound(self):
        c = self.welcome()
        c.send(Record(wire.MAP, 0, self.region).encode())
        for fd in socket.recv_fds(c, 100, 4)[1]:
            self.addCleanup(os.close, fd)
        with mock.patch.object(share, "WITHDRAW_BOUND", 0.1):
            self.b.send(region_remove=pb.RegionRemove(region=self.region))
            self.b.kind("region_removed", region=self.region)
        self.assertFalse(self.theirs.lease_ended())
        self.assertEqual(self.b.stats().counters["shm.withdraw_late"], 1)

    def test_crowd(self):
        conns = [self.welcome()]
        for _ in range(share.MAX_OF_WRITER - 1):
            c = self.dial()
            c.send(Hello(3, 1, TOKEN).encode())
            self.assertEqual(Record.decode(c.recv(100)).code, wire.OK)
            conns.append(c)
        c = self.dial()
        c.send(Hello(3, 1, TOKEN).encode())
        self.assertEqual(Record.decode(c.recv(100)).code, wire.CROWDED)
        self.assertEqual(c.recv(100), b"")
