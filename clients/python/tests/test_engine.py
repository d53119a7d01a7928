"""Against a real engine. TERMINUS_TEST_SOCKET=SOCKET: one session, without a counterpart.
TERMINUS_TEST_SOCKET=SOURCE,DESTINATION: also pages from a source at the first to a destination at the second."""
import array
import os
import subprocess
import sys
import unittest

import support
from terminus_client import (BadField, BadState, Client, KVPoll, Layout, NotReusable, Residency, Tensor, TerminusError)

SOCKETS = [s for s in os.environ.get("TERMINUS_TEST_SOCKET", "").split(",") if s]
LAYOUT = Layout("bfloat16", 2, 8, 128, 16)
PAGES, PAGE = 64, 4096


@unittest.skipUnless(SOCKETS, "TERMINUS_TEST_SOCKET names no engine")
class RealEngine(support.Case):
    def worker(self, socket, group, role):
        c = Client(socket, group, role, layout=LAYOUT, slots=32)
        self.addCleanup(c.close)
        region = c.create_region(2 * PAGES * PAGE)
        pool = c.add_pool(PAGES, [Tensor(region, layer * PAGES * PAGE, PAGE, PAGE, layer) for layer in range(2)])
        return c, region, pool

    def test_session(self):
        tag = os.getpid()
        c, region, pool = self.worker(SOCKETS[0], f"py-source-{tag}", "source")
        self.assertTrue(c.node)
        self.assertEqual(bytes(region.buf), bytes(region.size))
        room = c.open(tag, deadline=30.0)
        self.assertEqual(room.poll(), KVPoll.Bootstrapping)
        self.assertEqual(c.poll_all()[room.slot], KVPoll.Bootstrapping)
        self.assertIn(room, c.changes())
        self.assertIsNone(room.send([(pool, array.array("i", [0, 5, 6]))]))
        with self.assertRaises(BadField):
            room.send([(pool, [PAGES])])
        with self.assertRaises(BadField):
            room.send([(pool + 1, [0])])
        with self.assertRaises(BadState):
            room.register([(pool, [0])])
        with self.assertRaises(TerminusError):
            c.open(tag + 1, "x" * 1000)
        self.assertIsNone(room.abort())
        self.assertEqual(room.wait(20), KVPoll.Failed)
        self.assertEqual(room.abort(), "aborted")
        self.assertEqual(room.send([(pool, [1])]), "aborted")
        failure = room.failure()
        self.assertEqual((failure.status, failure.reason), (KVPoll.Failed, "aborted"))
        self.assertTrue(failure.doc)
        self.assertTrue(room.wait_reusable(20))
        room.release()
        self.assertEqual((room.poll(), room.residency()), (KVPoll.Failed, Residency.RELEASED))
        rooms = [c.open(1 << 40 | i, wait=False) for i in range(32)]
        self.assertEqual([r.wait(0.0) for r in rooms], [KVPoll.Bootstrapping] * 32)
        for r in rooms:
            r.abort(wait=False)
        self.assertEqual([r.wait(20) for r in rooms], [KVPoll.Failed] * 32)
        for r in rooms:
            self.assertTrue(r.wait_reusable(20))
            r.release()
        self.assertIsNone(c.lost)

    @unittest.skipUnless(len(SOCKETS) > 1, "TERMINUS_TEST_SOCKET names one engine")
    def test_pages(self):
        tag = os.getpid()
        source, there, pool = self.worker(SOCKETS[0], f"py-source-{tag}", "source")
        destination, here, target = self.worker(SOCKETS[1], f"py-destination-{tag}", "destination")
        for i in range(2 * PAGES):
            there.buf[i * PAGE:(i + 1) * PAGE] = bytes([i % 251 + 1]) * PAGE
        for n in range(8):
            ids, into = [n, 40 + n, 9 + 2 * n], array.array("i", [63 - n, 3 * n, 3 * n + 1])
            a = source.open(tag << 20 | n)
            b = destination.open(tag << 20 | n, f"py-source-{tag}")
            self.assertIsNone(b.register([(target, into)]))
            self.assertIsNone(a.send([(pool, ids[:1])]))
            self.assertIsNone(a.send([(pool, ids[1:])], last=True, aux=b"aux %d" % n))
            self.assertEqual((a.wait(60), b.wait(60)), (KVPoll.Success, KVPoll.Success), (a.failure(), b.failure()))
            self.assertEqual(b.aux(), b"aux %d" % n)
            for layer in range(2):
                for i, k in zip(ids, into):
                    at = (layer * PAGES + k) * PAGE
                    self.assertEqual(bytes(here.buf[at:at + PAGE]), bytes([(layer * PAGES + i) % 251 + 1]) * PAGE)
            for room in (a, b):
                if not room.reusable:
                    self.assertRaises(NotReusable, room.release)
                self.assertTrue(room.wait_reusable(60))
                room.release()
        for client, region in ((source, there), (destination, here)):
            client.close()
            self.eventually(region.released, 60)


@unittest.skipUnless(len(SOCKETS) > 1, "TERMINUS_TEST_SOCKET does not name two engines")
class GroupRanks(support.Case):
    """The example: two groups of two rank processes, in lockstep as the ranks of a model are."""

    def run_example(self, *more):
        return subprocess.run([sys.executable, os.path.join(support.ROOT, "examples", "group_ranks.py"), *SOCKETS[:2],
                               "--skew", "0.02", *more], capture_output=True, text=True, timeout=180)

    def test_list_keeps_the_ranks_together(self):
        done = self.run_example("--requests", "24")
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        for side in ("prefill", "decode"):
            self.assertRegex(done.stdout, f"{side} rank 0: 24 requests, 21 Success, 3 Failed, .* same batch")

    def test_ranks_that_poll_by_themselves_diverge(self):
        done = self.run_example("--each-polls")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertRegex(done.stderr, r"rank \d: Diverged: tick \d+: rank 0 runs \[.*\], rank 1 runs \[.*\]")


if __name__ == "__main__":
    unittest.main()
