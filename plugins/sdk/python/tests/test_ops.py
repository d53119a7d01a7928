import threading
import time

import terminus_plugin as tp
from terminus_plugin import contract_pb2 as pb
from terminus_plugin import ops

from .host import PATIENCE, TOKEN, Case, Fake


class TestOps(Case):
    def test_order(self):
        def transfer(op):
            op.progress(10)
            time.sleep(0.002)
            op.progress(4096)
            op.done(tp.Lane.SHM)

        h = self.host(transfer)
        h.plan()
        op = h.submit()
        kind, e = h.end(op)
        self.assertEqual((kind, e.bytes, e.quiet, e.lane), ("done", 8192, True, pb.LANE_SHM))
        h.stats()
        kinds = h.of(op)
        self.assertEqual((kinds[0], kinds[-1]), ("accepted", "done"))
        self.assertEqual(set(kinds[1:-1]) | {"progress"}, {"progress"})
        moved = [e.progress.bytes for e in h.events if e.WhichOneof("event") == "progress"]
        self.assertEqual(moved, sorted(set(moved)))

    def test_progress_rate(self):
        def transfer(op):
            until = time.monotonic() + 0.05
            n = 0
            while time.monotonic() < until:
                n += 1
                op.progress(n)
            op.done(tp.Lane.SHM)

        h = self.host(transfer)
        h.plan()
        op = h.submit()
        h.end(op)
        self.assertLessEqual(h.of(op).count("progress"), 52)

    def test_submit_that_is_wrong(self):
        h = self.host()
        plan, peer, _ = h.plan(pages=16, page=4096, layers=2)
        h.send(plan_add=pb.PlanAdd(plan=50, src_pool=1, peer=peer, dst_pool=2, src_pages=1, dst_pages=1))
        other = h.peer()
        h.send(peer_accept=pb.PeerAccept(peer=60, token=TOKEN))
        runs = pb.Runs
        for changes, cause, says in (
            (dict(direction=0), pb.CAUSE_PROTOCOL, "Submit.direction is 0"),
            (dict(direction=5), pb.CAUSE_PROTOCOL, "Submit.direction is 5"),
            (dict(direction=pb.DIRECTION_READ), pb.CAUSE_UNSUPPORTED, "Submit.direction READ"),
            (dict(generation=pb.Generation()), pb.CAUSE_PROTOCOL, "Submit.generation.source is 0.0"),
            (dict(peer=999), pb.CAUSE_PROTOCOL, "Submit.peer 999"),
            (dict(peer=60), pb.CAUSE_PROTOCOL, "Submit.peer 60"),
            (dict(peer=other), pb.CAUSE_PROTOCOL, f"Submit.plan {plan} belongs to peer {peer}"),
            (dict(plan=999), pb.CAUSE_PROTOCOL, "Submit.plan 999 is unknown"),
            (dict(plan=50), pb.CAUSE_PROTOCOL, "Submit.plan 50 is bad: PlanAdd.src_pool 1 is unknown"),
            (dict(layer_from=1, layer_to=1), pb.CAUSE_PROTOCOL, "Submit.layer_to 1 is not above layer_from 1"),
            (dict(bytes=1), pb.CAUSE_PROTOCOL, "Submit.bytes is 1; 1 groups of 8192 bytes"),
            (dict(source=runs(start=[16], count=[1])), pb.CAUSE_PROTOCOL, "Submit.source: run 0"),
            (dict(source=runs(start=[0], count=[0])), pb.CAUSE_PROTOCOL, "Submit.source.count[0] is 0"),
            (
                dict(destination=runs(start=[0], count=[1], stride=[0])),
                pb.CAUSE_PROTOCOL,
                "Submit.destination.stride[0] is 0",
            ),
            (
                dict(destination=runs(start=[0, 1], count=[1])),
                pb.CAUSE_PROTOCOL,
                "Submit.destination: 2 starts, 1 counts",
            ),
            (dict(destination=runs(start=[0], count=[2])), pb.CAUSE_PROTOCOL, "names 1 pages, Submit.destination 2"),
            (
                dict(source=runs(start=[(1 << 32) - 1], count=[(1 << 32) - 1], stride=[(1 << 32) - 1])),
                pb.CAUSE_PROTOCOL,
                "leaves the pool",
            ),
        ):
            with self.subTest(says):
                op = h.submit(**changes)
                kind, e = h.end(op)
                self.assertEqual((kind, e.cause, e.quiet), ("failed", cause, True), e.detail)
                self.assertIn(says, e.detail)
                self.order(h, op, "accepted", "failed")
        self.assertEqual(h.end(h.submit())[0], "done")

    def test_sequence(self):
        h = self.host()
        h.plan()
        first = h.submit()
        h.end(first)
        h.seq += 1
        self.assertIn("Submit.seq is 3 after 1", h.end(h.submit())[1].detail)
        h.send(submit=h.op(op=first))
        self.assertEqual(h.stats().counters["sdk.host_breaches"], 1)
        self.order(h, first, "accepted", "done")

    def test_features_and_limits(self):
        class Plain(Fake):
            features = []
            limits = tp.Limits(max_op_bytes=8192 * 4, max_runs=2)

        h = self.host(backend=Plain())
        h.plan()
        runs = pb.Runs
        for changes, cause, says in (
            (
                dict(
                    source=runs(start=[0], count=[2], stride=[2]), destination=runs(start=[0], count=[2]), bytes=16384
                ),
                pb.CAUSE_UNSUPPORTED,
                "strided",
            ),
            (dict(layer_to=1, bytes=4096), pb.CAUSE_UNSUPPORTED, "layer_range"),
            (
                dict(source=runs(start=[0], count=[5]), destination=runs(start=[0], count=[5]), bytes=8192 * 5),
                pb.CAUSE_LIMIT,
                "max_op_bytes",
            ),
            (
                dict(
                    source=runs(start=[0, 2, 4], count=[1] * 3), destination=runs(start=[0], count=[3]), bytes=8192 * 3
                ),
                pb.CAUSE_LIMIT,
                "max_runs",
            ),
        ):
            with self.subTest(says):
                kind, e = h.end(h.submit(**changes))
                self.assertEqual((kind, e.cause), ("failed", cause), e.detail)
                self.assertIn(says, e.detail)

    def test_max_ops(self):
        class One(Fake):
            limits = tp.Limits(max_ops=1)

        gate = threading.Event()
        backend = One(lambda op: (gate.wait(PATIENCE), op.done(tp.Lane.SHM)))
        h = self.host(backend=backend)
        h.plan()
        first, second = h.submit(), h.submit()
        self.assertEqual(h.end(second)[1].cause, pb.CAUSE_LIMIT)
        gate.set()
        self.assertEqual(h.end(first)[0], "done")

    def test_forgotten_end(self):
        """R1: what returns, raises or drops the handle without an end is ended for the author."""

        def raises(op):
            raise SystemExit(3)

        for name, transfer, says in (
            ("returns", lambda op: None, "returned without an end"),
            ("raises", raises, "transfer raised SystemExit(3)"),
            ("drops", lambda op: op.keep(), "dropped without an end"),
        ):
            with self.subTest(name):
                h = self.host(transfer)
                h.plan()
                kind, e = h.end(h.submit())
                self.assertEqual((kind, e.cause, e.quiet), ("failed", pb.CAUSE_NO_TERMINAL, False))
                self.assertIn(says, e.detail)
                self.assertEqual(list(h.stats().open_ops), [e.op])

    def test_kept(self):
        kept = []
        h = self.host(lambda op: (op.keep(), kept.append(op)))
        h.plan()
        op = h.submit()
        h.until("accepted", lambda e: e.accepted.op == op)
        while not kept:
            time.sleep(0.001)
        self.assertEqual(list(h.stats().open_ops), [op])
        kept[0].done(tp.Lane.SHM, quiet=False)
        h.end(op)
        self.assertEqual(list(h.stats().open_ops), [op])
        kept[0].quiesced()
        kept[0].quiesced()
        kept[0].fail(tp.Cause.INTERNAL, "late", quiet=True)
        self.assertEqual(list(h.stats().open_ops), [])
        self.order(h, op, "accepted", "done", "quiesced")
        c = h.stats().counters
        self.assertEqual((c["sdk.stray_quiesced"], c["sdk.second_ends"]), (1, 1))

    def test_ends(self):
        for end, kind, cause in (
            (lambda op: op.fail(tp.Cause.TRANSPORT, "é" * 200, quiet=True), "failed", pb.CAUSE_TRANSPORT),
            (lambda op: op.fail(0, "what", quiet=True), "failed", pb.CAUSE_INTERNAL),
            (lambda op: op.skip(tp.Cause.EMPTY, "nothing", quiet=True), "skipped", pb.CAUSE_EMPTY),
            (lambda op: op.done(tp.Lane.ANY), "failed", pb.CAUSE_INTERNAL),
            (lambda op: op.done(None), "failed", pb.CAUSE_INTERNAL),
        ):
            h = self.host(end)
            h.plan()
            got, e = h.end(h.submit())
            self.assertEqual((got, e.cause, e.quiet), (kind, cause, True))
            self.assertLessEqual(len(e.detail.encode()), 256)

    def test_slow_lane(self):
        h = self.host(lambda op: op.done(tp.Lane.TCP))
        h.plan(peer=h.peer(require_lane=pb.LANE_SHM))
        kind, e = h.end(h.submit())
        self.assertEqual((kind, e.cause), ("failed", pb.CAUSE_LANE))

    def test_abort(self):
        going = threading.Event()

        def transfer(op):
            going.set()
            self.assertTrue(op.stopped.wait(PATIENCE))
            op.aborted(quiet=False)
            op.quiesced()

        h = self.host(transfer)
        h.plan()
        op = h.submit()
        self.assertTrue(going.wait(PATIENCE))
        h.control(abort=pb.AbortOp(op=op))
        h.control(abort=pb.AbortOp(op=op))
        self.assertEqual(h.end(op)[0], "aborted")
        self.order(h, op, "accepted", "aborted", "quiesced")

    def test_abort_of_an_op_that_waits(self):
        gate = threading.Event()
        ran = []
        h = self.host(lambda op: (ran.append(op.id), gate.wait(PATIENCE), op.done(tp.Lane.SHM)))
        h.plan()
        ops = [h.submit() for _ in range(6)]  # four threads
        h.stats()
        h.control(abort=pb.AbortOp(op=ops[5]))
        kind, e = h.end(ops[5])
        self.assertEqual((kind, e.quiet), ("aborted", True))
        gate.set()
        for op in ops[:5]:
            self.assertEqual(h.end(op)[0], "done")
        self.assertNotIn(ops[5], ran)

    def test_abort_that_overtakes(self):
        h = self.host()
        h.plan()
        m = h.op()
        h.control(abort=pb.AbortOp(op=m.op))
        deadline = time.monotonic() + PATIENCE
        while m.op not in h.session.early:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.001)
        h.send(submit=m)
        kind, e = h.end(m.op)
        self.assertEqual((kind, e.quiet), ("aborted", True))
        self.order(h, m.op, "accepted", "aborted")

    def test_early_aborts_are_bounded(self):
        r = ops.Recent(3)
        for i in range(5):
            r.add(i)
        r.add(3)  # again
        self.assertEqual([i in r for i in range(5)], [False, False, True, True, True])

    def test_recent_costs_the_same_whatever_its_size(self):
        def once(n):
            r = ops.Recent(n)
            for i in range(n):
                r.add(i)
            began = time.thread_time()
            for i in range(n, n + 20_000):
                r.add(i)
            return time.thread_time() - began

        def cost(n):
            return min(once(n) for _ in range(3))

        self.assertLess(cost(1 << 14), 5 * cost(1 << 6))

    def test_drain(self):
        gate = threading.Event()
        h = self.host(lambda op: (gate.wait(PATIENCE), op.done(tp.Lane.SHM)))
        h.plan()
        before = h.submit()
        h.send(drain=pb.Drain(deadline_ns=int(PATIENCE * 1e9)))
        kind, e = h.end(h.submit())
        self.assertEqual((kind, e.cause), ("skipped", pb.CAUSE_SHUTDOWN))
        gate.set()
        h.end(before)
        self.assertEqual(h.kind("drained").open_ops, 0)

    def test_drain_that_is_late(self):
        gate = threading.Event()
        h = self.host(lambda op: (gate.wait(PATIENCE), op.done(tp.Lane.SHM)))
        h.plan()
        h.submit()
        h.send(drain=pb.Drain(deadline_ns=1000))
        self.assertEqual(h.kind("drained").open_ops, 1)
        gate.set()

    def test_region_is_held_by_an_op(self):
        gate = threading.Event()
        h = self.host(lambda op: (gate.wait(PATIENCE), op.done(tp.Lane.SHM)))
        n, m = h.region(2 * 16 * 4096 + 64)
        h.plan(region=n)
        op = h.submit()
        h.send(region_remove=pb.RegionRemove(region=n))
        h.stats()
        self.assertFalse(m.lease_ended())
        self.assertIn("is gone", h.end(h.submit())[1].detail)
        gate.set()
        h.end(op)
        h.kind("region_removed", region=n)
        self.assertTrue(m.lease_ended())

    def test_counters_that_are_no_numbers(self):
        """A slip of the author must not end the epoch."""

        class Counts(Fake):
            def counters(self):
                return {"mine": "many"}

        h = self.host(backend=Counts())
        self.assertNotIn("mine", h.stats().counters)
        self.assertIn("invalid literal", h.kind("log").message)

    def test_calls_that_exit(self):
        """sys.exit in a call of the backend ends that call only."""

        class Exits(Fake):
            def add_region(self, r):
                raise SystemExit(1)

            def add_peer(self, p):
                raise SystemExit(2)

        h = self.host(backend=Exits())
        for _ in range(6):  # more than there are threads
            self.assertEqual(h.kind("region_failed", region=h.region(4096)[0]).cause, pb.CAUSE_INTERNAL)
        self.assertEqual(h.kind("peer_failed", peer=h.peer()).cause, pb.CAUSE_PEER_UNREACHABLE)

    def test_counters(self):
        class Counts(Fake):
            def counters(self):
                return {tp.LATE_REFUSED: 3, "mine": 4}

        h = self.host(backend=Counts())
        s = h.stats()
        self.assertEqual((s.late_refused, s.counters["mine"]), (3, 4))
