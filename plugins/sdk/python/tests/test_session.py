import dataclasses
import threading
import time
from unittest import mock

import terminus_plugin as tp
from terminus_plugin import contract_pb2 as pb
from terminus_plugin import session
from terminus_plugin.session import OutOfOrder, Session

from .host import CANARY, PATIENCE, TOKEN, Case, Fake, Host, Memory, sealed_memfd


class TestHandshake(Case):
    def answer(self, backend, versions=(1,), config=b""):
        s = Session(backend)
        return s.handshake(pb.HandshakeRequest(versions=versions, config_json=config))

    def test_good(self):
        r = self.answer(Fake())
        self.assertEqual((r.version, r.name, r.endpoint, r.error), (1, "fake", b"endpoint", ""))
        self.assertEqual((list(r.kinds), r.limits.max_ops, r.sdk.language), ([pb.KIND_TRANSFER], 8192, "python"))

    def test_errors(self):
        class Options(Fake):
            config = dataclasses.make_dataclass("Opts", [("lanes", int, 4)])()

        class Broken(Fake):
            def start(self, s):
                raise RuntimeError("no device; load the driver")

        class Exits(Fake):
            def start(self, s):
                raise SystemExit(4)

        class Text(Fake):
            def start(self, s):
                return "endpoint"

        class Checked(Fake):
            features = [tp.RECEIVER_CHECKED]

        for backend, says, request in (
            (Fake(), "speaks contract version 1, the engine [3, 2]", dict(versions=[3, 2])),
            (Fake(), 'unknown option "x": this backend has no options', dict(config=b'{"x":1}')),
            (
                Options(),
                'plugins.fake.options: unknown option "lane": did you mean "lanes"?',
                dict(config=b'{"lane":1}'),
            ),
            (Options(), 'option "lanes" must be an integer, not a string', dict(config=b'{"lanes":"1"}')),
            (Broken(), "start backend fake: no device; load the driver", {}),
            (Exits(), "start backend fake: 4", {}),
            (Text(), "the endpoint is bytes", {}),
            (Checked(), "built wrong: feature receiver_checked needs the methods accept", {}),
        ):
            with self.subTest(says):
                r = self.answer(backend, **request)
                self.assertIn(says, r.error)
                self.assertEqual(r.endpoint, b"")

    def test_order_of_calls(self):
        s = Session(Fake())
        with self.assertRaises(OutOfOrder):
            s.serve_session(iter(()))
        with self.assertRaises(OutOfOrder):
            s.serve_control(iter(()))
        s.handshake(pb.HandshakeRequest(versions=[1]))
        with self.assertRaises(OutOfOrder):
            s.handshake(pb.HandshakeRequest(versions=[1]))


class TestRegions(Case):
    def test_life(self):
        h = self.host()
        n, m = h.region(1 << 16)
        self.assertEqual(int.from_bytes(m.map[-8:], "little"), CANARY ^ (1 << 64) - 1)
        h.send(region_remove=pb.RegionRemove(region=n))
        h.kind("region_removed", region=n)
        self.assertTrue(m.lease_ended())
        self.assertEqual(h.session.backend.calls, [("add_region", n), ("remove_region", n)])

    def test_no_canary(self):
        h = self.host()
        n, m = h.region(1 << 16, no_canary=True, canary=0, canary_offset=0)
        h.kind("region_ready", region=n)
        self.assertEqual(int.from_bytes(m.map[-8:], "little"), CANARY)

    def test_refused(self):
        h = self.host()
        for changes, cause, says in (
            (dict(kind=pb.MEMORY_KIND_CUDA_IPC), pb.CAUSE_UNSUPPORTED, "RegionAdd.kind MEMORY_KIND_CUDA_IPC"),
            (dict(kind=0), pb.CAUSE_PROTOCOL, "RegionAdd.kind is 0"),
            (dict(kind=9), pb.CAUSE_PROTOCOL, "RegionAdd.kind is 9"),
            (dict(size=7), pb.CAUSE_PROTOCOL, "RegionAdd.size is 7"),
            (dict(size=1 << 20), pb.CAUSE_PROTOCOL, "RegionAdd.size is 1048576, the memfd has 65536"),
            (dict(canary_offset=1 << 16), pb.CAUSE_PROTOCOL, "RegionAdd.canary_offset 65536 leaves"),
            (dict(canary_offset=(1 << 64) - 4), pb.CAUSE_PROTOCOL, "leaves the region"),
            (dict(canary=CANARY + 1), pb.CAUSE_PROTOCOL, "a private mapping"),
        ):
            with self.subTest(says):
                n, m = h.region(1 << 16, **changes)
                f = h.kind("region_failed", region=n)
                self.assertEqual(f.cause, cause)
                self.assertIn(says, f.detail)
                h.stats()
                self.assertTrue(m.lease_ended())

    def test_unsealed(self):
        h = self.host()
        m = Memory(4096)
        h.memories.append(m)
        fd = sealed_memfd(4096, 0x2)
        h.send(region_add=pb.RegionAdd(region=5, kind=1, size=4096, no_canary=True))
        h.session.descriptors(5, fd, m.descriptors()[1])
        self.assertIn("seals 0x2", h.kind("region_failed", region=5).detail)

    def test_slice_that_is_kept_ends_the_process(self):
        """Memory that can still be written to must not be called unmapped."""

        class Keeps(Fake):
            def add_region(self, r):
                self.slice = r.bytes[:8]

        with mock.patch("terminus_plugin.memory.CLOSE_BOUND", 0.1):
            h = self.host(backend=Keeps())
            n, m = h.region(4096)
            h.send(region_remove=pb.RegionRemove(region=n))
            self.assertIn("keeps a slice", h.kind("fault").detail)
            self.assertTrue(h.session.over.wait(PATIENCE))
            self.assertFalse(m.lease_ended())
            self.assertNotIn("region_removed", [e.WhichOneof("event") for e in h.events])
            h.session.backend.slice.release()

    def test_add_region_that_raises_with_a_slice(self):
        """The frames of a traceback must not keep a mapping alive."""

        class Raises(Fake):
            def add_region(self, r):
                part = r.bytes[:8]
                raise tp.Error(tp.Cause.LIMIT, f"no room for {len(part)}")

        h = self.host(backend=Raises())
        n, m = h.region(4096)
        f = h.kind("region_failed", region=n)
        self.assertEqual((f.cause, f.detail), (pb.CAUSE_LIMIT, "no room for 8"))
        self.assertTrue(m.lease_ended())
        self.assertFalse(h.session.over.is_set())


class TestPeers(Case):
    def test_life(self):
        h = self.host()
        p = h.peer()
        self.assertEqual(h.kind("peer_ready", peer=p).lane, pb.LANE_SHM)
        h.send(peer_remove=pb.PeerRemove(peer=p))
        h.kind("peer_removed", peer=p)
        h.send(peer_remove=pb.PeerRemove(peer=99))
        h.kind("peer_removed", peer=99)

    def test_refused(self):
        h = self.host()
        for changes, cause, says in (
            (dict(token=b"short"), pb.CAUSE_PROTOCOL, "5 bytes, not 32"),
            (dict(require_lane=0), pb.CAUSE_PROTOCOL, "PeerAdd.require_lane is 0"),
            (dict(require_lane=77), pb.CAUSE_PROTOCOL, "PeerAdd.require_lane is 77"),
            (dict(require_lane=pb.LANE_RDMA), pb.CAUSE_LANE, "only lane SHM exists, RDMA is demanded"),
        ):
            with self.subTest(says):
                f = h.kind("peer_failed", peer=h.peer(**changes))
                self.assertEqual(f.cause, cause)
                self.assertIn(says, f.detail)

    def test_remove_ends_ops(self):
        going = threading.Event()

        def transfer(op):
            going.set()
            self.assertTrue(op.stopped.wait(PATIENCE))
            self.assertIs(op.stop, tp.Stop.PEER_REMOVED)
            op.aborted(quiet=True)

        h = self.host(transfer)
        _, p, _ = h.plan()
        op = h.submit()
        self.assertTrue(going.wait(PATIENCE))
        h.send(peer_remove=pb.PeerRemove(peer=p))
        kind, e = h.end(op)
        self.assertEqual((kind, e.cause), ("failed", pb.CAUSE_PEER_UNREACHABLE))
        h.kind("peer_removed", peer=p)

    def test_remote_regions(self):
        class Imports(Fake):
            def add_remote_region(self, r):
                if r.size == 1:
                    raise tp.Error(tp.Cause.BOUNDS, "too small")
                self.calls.append(("add", r.id, r.export))

            def remove_remote_region(self, r):
                self.calls.append(("remove", r.id))

        h = self.host(backend=Imports())
        p = h.peer()
        h.send(remote_region_add=pb.RemoteRegionAdd(peer=p, region=7, size=4096, export=b"key"))
        h.kind("remote_region_ready", region=7)
        h.send(remote_region_add=pb.RemoteRegionAdd(peer=p, region=8, size=1, export=b"key"))
        self.assertEqual(h.kind("remote_region_failed", region=8).cause, pb.CAUSE_BOUNDS)
        h.send(remote_region_remove=pb.RemoteRegionRemove(peer=p, region=7))
        h.kind("remote_region_removed", region=7)
        self.assertEqual(h.session.backend.calls[-2:], [("add", 7, b"key"), ("remove", 7)])

    def test_grants(self):
        class Grants(Fake):
            features = [tp.RECEIVER_CHECKED]

            def accept(self, p):
                self.calls.append(("accept", p.handle, p.token))

            def unaccept(self, p):
                self.calls.append(("unaccept", p.handle))

            def grant(self, g):
                self.granted = g

            def revoke(self, g):
                return True

        h = self.host(backend=Grants())
        h.plan(pages=16, page=4096, layers=1)
        h.stats()
        pool = next(iter(h.session.pools))
        h.send(peer_accept=pb.PeerAccept(peer=3, token=TOKEN))
        opener = pb.Opener(incarnation=1, sequence=2)
        part = pb.GrantPart(pool=pool, pages=pb.Runs(start=[1, 8], count=[2, 2], stride=[1, 3]))
        h.send(grant=pb.Grant(grant=1, destination=opener, parts=[part]))
        h.kind("granted", grant=1)
        region = h.session.pools[pool].pool.tensors[0].region_id
        g = h.session.backend.granted
        for off, n, want in (
            (4096, 8192, True),
            (0, 1, False),
            (4096, 8193, False),
            (8 * 4096, 4096, True),
            (9 * 4096, 1, False),
            (11 * 4096, 4096, True),
            (12 * 4096, 1, False),
            (0, 0, True),
        ):
            self.assertEqual(g.covers(region, off, n), want, (off, n))
        self.assertTrue(g.admits("anybody"))
        h.send(grant=pb.Grant(grant=7, destination=opener, parts=[part], writers=["a", "b"]))
        h.kind("granted", grant=7)
        g = h.session.backend.granted
        self.assertEqual([g.admits(n) for n in ("a", "b", "c", "")], [True, True, False, False])
        h.send(grant=pb.Grant(grant=8, destination=opener, writers=["a", ""]))
        self.assertIn("Grant.writers", h.kind("grant_failed", grant=8).detail)
        h.send(revoke=pb.Revoke(grant=1, destination=opener))
        self.assertTrue(h.kind("revoked", grant=1).quiet)
        h.send(revoke=pb.Revoke(grant=2, destination=opener))
        self.assertTrue(h.kind("revoked", grant=2).quiet)
        h.send(grant=pb.Grant(grant=4, destination=opener, parts=[pb.GrantPart(pool=999)]))
        self.assertIn("Grant.parts[0].pool 999", h.kind("grant_failed", grant=4).detail)
        h.send(peer_remove=pb.PeerRemove(peer=3))
        h.kind("peer_removed", peer=3)

    def test_not_served(self):
        h = self.host()
        h.send(grant=pb.Grant(grant=1))
        self.assertEqual(h.kind("grant_failed", grant=1).cause, pb.CAUSE_UNSUPPORTED)
        h.send(revoke=pb.Revoke(grant=1))
        self.assertFalse(h.kind("revoked", grant=1).quiet)
        h.send(fence_peer=pb.FencePeer(fence=3, node="n"))
        self.assertEqual(h.kind("fenced", fence=3).result, pb.FENCE_RESULT_UNKNOWN)
        h.send(comm_create=pb.CommCreate(comm=5, round=1))
        self.assertEqual(h.kind("comm_failed", comm=5).cause, pb.CAUSE_UNSUPPORTED)
        h.send(comm_run=pb.CommRun(op=9, seq=1))
        self.assertEqual(h.end(9)[1].cause, pb.CAUSE_UNSUPPORTED)
        h.send(comm_close=pb.CommClose(comm=5))
        h.kind("comm_closed", comm=5)
        h.send_frame(pb.HostEvent.FromString(b"\xfa\x3e\x02\x08\x01"))  # field 1007: an event of a newer engine
        self.assertEqual(h.stats().counters["sdk.events_ignored"], 1)


class TestLife(Case):
    def setUp(self):
        beat = mock.patch.object(session, "BEAT_EVERY", 0.1)
        beat.start()
        self.addCleanup(beat.stop)

    def test_beats_and_busy(self):
        h = self.host()
        done = h.session.backend.s.busy(tp.BusyKind.FIRST_POST, 7)
        e = h.until("busy beat", lambda e: e.beat.busy, h.beats)
        self.assertEqual((e.beat.busy[0].kind, e.beat.busy[0].subject), (pb.BUSY_KIND_FIRST_POST, 7))
        done()
        seq = len(h.beats)
        h.until("beat without busy", lambda e: e.beat.seq > seq and not e.beat.busy, h.beats)

    def test_loop_that_hangs_is_silent(self):
        """Beats prove that ops are dispatched."""
        h = self.host()
        h.until("first beat", lambda e: e.HasField("beat"), h.beats)
        gate, hangs = threading.Event(), threading.Event()
        h.session.result(lambda: (hangs.set(), gate.wait(PATIENCE)))
        self.assertTrue(hangs.wait(PATIENCE))
        time.sleep(0.2)  # for a beat that was under way
        n = len(h.beats)
        time.sleep(0.5)
        self.assertEqual(len(h.beats), n)
        gate.set()
        h.until("beats again", lambda e: e.beat.seq > n, h.beats)

    def test_fatal(self):
        h = self.host()
        h.session.backend.s.fatal("the device fell off the bus")
        f = h.kind("fault")
        self.assertEqual((f.rule, f.detail), ("backend", "the device fell off the bus"))
        self.assertTrue(h.session.over.wait(PATIENCE))
        self.assertIn("gave up", str(h.session.over_error))

    def test_fault_of_the_session_is_told(self):
        """R12: the loop does not die silently."""
        h = self.host()
        h.session.result(lambda: 1 // 0)
        self.assertIn("ZeroDivisionError", h.kind("fault").detail)

    def test_logs_are_bounded(self):
        h = self.host()
        h.session.log(0, "of no level")
        for i in range(1000):
            h.session.log(tp.Level.INFO, "x" * 5000)
        self.assertGreater(h.stats().counters["sdk.logs_dropped"], 0)
        self.assertLessEqual(max(len(e.log.message) for e in h.events), 4096)

    def test_end_stops_ops(self):
        seen = []
        going = threading.Event()

        def transfer(op):
            going.set()
            op.stopped.wait(PATIENCE)
            seen.append(op.stop)
            op.aborted(quiet=True)

        h = Host(Fake(transfer))
        h.plan()
        h.submit()
        self.assertTrue(going.wait(PATIENCE))
        h.close()
        self.assertEqual(seen, [tp.Stop.SESSION_OVER])
        self.assertEqual(h.session.backend.calls[-1], ("close",))

    def test_close_does_not_unmap_under_a_copy(self):
        gate, going = threading.Event(), threading.Event()
        h = Host(Fake(lambda op: (going.set(), gate.wait(PATIENCE))))
        _, _, m = h.plan()
        h.submit()
        self.assertTrue(going.wait(PATIENCE))
        with mock.patch.object(session, "CLOSE_BOUND", 0.1), self.assertRaises(TimeoutError):
            h.session.close()
        self.assertFalse(m.lease_ended())
        gate.set()
        h.session.unmap_all()
        h.close()

    def test_many_ops(self):
        h = self.host()
        h.plan()
        n = 3000
        for _ in range(n // 100):
            h.send_frame(*(pb.HostEvent(submit=h.op()) for _ in range(100)))
        h.until("the last end", lambda e: e.done.op and h.session.bytes_done == n * 8192)
        self.assertEqual(list(h.stats().open_ops), [])
        ends = [e.done.op for e in h.events if e.HasField("done")]
        self.assertEqual((len(ends), len(set(ends))), (n, n))
