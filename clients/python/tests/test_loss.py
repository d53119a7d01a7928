"""The end of an engine: which rooms fail, and when pages are reusable after it."""
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import unittest

import support
from fake_engine import FakeEngine, Session
from terminus_client import (BadDescriptor, BadState, Client, ConnectFailed, EngineLost, KVPoll, NotReusable, Region,
                             RequestTimeout, Residency, Tensor)
from terminus_client.memory import proof_works, writers_gone

FAKE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fake_engine.py")


class LossCase(support.Case):
    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="t")
        self.path = os.path.join(self.dir, "w")
        self.children = []

    def tearDown(self):
        for p in self.children:
            if p.poll() is None:
                p.kill()
            p.wait()
            p.stdout.close()
            p.stdin.close()
        shutil.rmtree(self.dir)

    def spawn(self, *args):
        """An engine in its own process."""
        p = subprocess.Popen([sys.executable, FAKE, self.path, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.children.append(p)
        self.assertEqual(p.stdout.readline(), b"ready\n")
        return p

    def rooms(self, c):
        """Four rooms: without pages, armed, ended and quiet, ended and not quiet."""
        pool = c.add_pool(4, [Tensor(c.create_region(1 << 16), 0, 4096, 4096)])
        empty, armed, done, aborted = (c.open(i) for i in range(4))
        for room in (armed, done, aborted):
            room.send([(pool, [room.id])])
        done.send(last=True)
        aborted.abort()
        return empty, armed, done, aborted


class Killed(LossCase):
    def test_killed(self):
        engine = self.spawn()
        with Client(self.path, "g", "source") as c:
            empty, armed, done, aborted = rooms = self.rooms(c)
            self.assertEqual([r.poll() for r in rooms], [1, 3, 4, 0])
            c.changes()
            waited = []
            sleeper = threading.Thread(target=lambda: waited.append(armed.wait(20)))
            sleeper.start()
            engine.kill()
            sleeper.join(20)
            self.assertEqual(waited, [KVPoll.Failed])
            self.assertEqual([r.poll() for r in rooms], [0, 0, 4, 0])
            statuses = c.poll_all()
            self.assertEqual([statuses[r.slot] for r in rooms], [0, 0, 4, 0])
            self.assertEqual((empty.reusable, done.reusable), (True, True))
            self.assertEqual([r.failure().reason for r in rooms],
                             ["engine_lost", "engine_lost", "success", "engine_lost"])
            self.assertEqual(set(c.changes()), set(rooms))
            for room in (armed, aborted):
                self.assertTrue(room.wait_reusable(20))
                self.assertEqual((room.poll(), room.residency()), (KVPoll.Failed, Residency.FENCED))
            self.assertEqual(armed.send([(0, [1])]), "engine_lost")
            self.assertEqual(armed.abort(), "engine_lost")
            self.assertRaises(EngineLost, c.open, 9)
            self.assertRaises(EngineLost, c.create_region, 4096)
            self.assertRaises(EngineLost, done.aux)
            for room in rooms:
                room.release()
                self.assertEqual(room.residency(), Residency.RELEASED)
            self.assertEqual([r.poll() for r in rooms], [0, 0, 4, 0])

    def test_stopped_process_keeps_pages(self):
        """The socket ends, yet a child of the engine has its descriptors and mapping: no page is reusable."""
        engine = self.spawn("hold")
        with Client(self.path, "g", "source") as c:
            empty, armed, done, aborted = self.rooms(c)
            engine.stdin.write(b"\n")
            engine.stdin.flush()
            child = int(engine.stdout.readline())
            try:
                engine.kill()  # the child holds the socket: only the pidfd tells
                self.assertEqual(armed.wait(20), KVPoll.Failed)
                self.assertIn("exited", c.lost)
                self.assertFalse(armed.wait_reusable(0.3))
                self.assertEqual(armed.residency(), Residency.QUARANTINED)
                self.assertRaises(NotReusable, armed.release)
                self.assertTrue(done.reusable)
            finally:
                os.kill(child, signal.SIGKILL)
            self.assertTrue(armed.wait_reusable(20))
            self.assertTrue(aborted.reusable)
            self.assertEqual(armed.residency(), Residency.FENCED)

    def test_stopped_engine(self):
        """A stopped engine is unresponsive, not lost; one that goes on in time has lost nothing."""
        engine = self.spawn()
        with Client(self.path, "g", "source", suspect_after=0.3, lost_after=3.0) as c:
            empty, armed, done, aborted = self.rooms(c)
            engine.send_signal(signal.SIGSTOP)
            self.eventually(lambda: c.unresponsive)
            self.assertEqual((armed.poll(), c.lost), (KVPoll.Transferring, None))
            engine.send_signal(signal.SIGCONT)
            self.eventually(lambda: not c.unresponsive)
            self.assertIsNone(armed.send([(0, [1])]))
            engine.send_signal(signal.SIGSTOP)
            self.assertEqual(armed.wait(20), KVPoll.Failed)
            self.assertIn("no sign of life", c.lost)
            engine.send_signal(signal.SIGCONT)
            self.assertEqual((armed.poll(), armed.residency()), (KVPoll.Failed, Residency.QUARANTINED))

    def test_redial(self):
        """The next engine gets the same memory under the same pool numbers; old rooms keep what they were."""
        engine = self.spawn()
        c = Client(self.path, "g", "source", slots=8, timeout=5.0)
        self.addCleanup(c.close)
        empty, armed, done, aborted = rooms = self.rooms(c)
        staging = c.create_staging([bytearray(b"s" * 4096)], [4096], 1)
        closed = c.create_region(4096)
        closed.close()
        with self.assertRaisesRegex(BadState, "alive"):
            c.redial(1)
        engine.kill()
        self.assertEqual(armed.wait(20), KVPoll.Failed)
        with self.assertRaises(ConnectFailed):  # nobody listens, and nothing is lost by the try
            c.redial(0.2)
        os.unlink(self.path)
        threading.Timer(0.1, self.spawn).start()
        n = c.redial(20)
        self.addCleanup(n.close)
        self.assertEqual((n.lost, n.timeout, len(n.poll_all())), (None, 5.0, 8))
        self.assertEqual([r.poll() for r in rooms], [0, 0, 4, 0])
        self.assertTrue(all(r.reusable for r in rooms))
        self.assertEqual(armed.failure().reason, "engine_lost")
        armed.release()
        again = n.open(1, attempt=1)
        self.assertIsNone(again.send([(0, [1]), (staging.pool, staging.put([0]))], last=True))
        self.assertEqual(again.wait(20), KVPoll.Success)
        self.assertEqual(staging.pool, 1)
        self.assertEqual(n.add_pool(1, [Tensor(staging.region, 0, 4096, 4096)]), 2)
        with self.assertRaisesRegex(BadState, "closed"):
            c.redial(1)

    def test_redial_waits_for_the_proof(self):
        """A child of the dead engine maps the memory: the next engine does not get it."""
        engine = self.spawn("hold")
        c = Client(self.path, "g", "source")
        self.addCleanup(c.close)
        empty, armed, done, aborted = self.rooms(c)
        engine.stdin.write(b"\n")
        engine.stdin.flush()
        child = int(engine.stdout.readline())
        try:
            engine.kill()
            self.assertEqual(armed.wait(20), KVPoll.Failed)
            os.unlink(self.path)
            self.spawn()
            self.assertRaises(NotReusable, c.redial, 1.5)
            c.provable = False
            self.assertRaises(NotReusable, c.redial, 20)
            c.provable = True
        finally:
            os.kill(child, signal.SIGKILL)
        n = c.redial(20)
        self.addCleanup(n.close)
        self.assertEqual(armed.residency(), Residency.FENCED)
        self.assertIsNone(n.open(1).send([(0, [1])], last=True))

    def test_region_goes_to_the_next_engine(self):
        engine = self.spawn()
        with Client(self.path, "g", "source") as c:
            region = c.create_region(4096)
            region.buf[:3] = b"abc"
            with self.assertRaises(NotReusable):
                c.add_region(region)
            engine.kill()
            self.eventually(lambda: c.lost is not None and region.released())
        os.unlink(self.path)
        self.spawn()
        with Client(self.path, "g", "source") as c:
            c.add_region(region)
            self.assertEqual(bytes(region.buf[:3]), b"abc")
            self.assertEqual(c.add_pool(1, [Tensor(region, 0, 4096, 4096)]), 0)
            self.assertFalse(region.released())
        region.close()
        region.close()


class InProcess(LossCase):
    def setUp(self):
        super().setUp()
        self.engine = FakeEngine(self.path)

    def tearDown(self):
        self.engine.close()
        super().tearDown()

    def test_frozen_beat(self):
        with Client(self.path, "g", "source", suspect_after=0.3, lost_after=1.5) as c:
            room = c.open(1)
            self.engine.beating = False
            self.eventually(lambda: c.unresponsive)
            self.assertEqual((room.poll(), c.lost), (KVPoll.Bootstrapping, None))
            self.engine.beating = True
            self.eventually(lambda: not c.unresponsive)
            self.engine.beating = False
            at_latch = []
            connection = c._connection
            fail = connection.fail
            connection.fail = lambda: (at_latch.append(connection.fileno()), fail())
            self.assertEqual(room.wait(20), KVPoll.Failed)
            self.assertIn("no sign of life", c.lost)
            self.eventually(lambda: at_latch == [-1])  # the socket was closed first
            self.engine.session.page.set(0, 4, 4)  # it wakes up and says Success: too late
            self.assertEqual((room.poll(), c.poll_all()[0]), (KVPoll.Failed, KVPoll.Failed))
            self.assertEqual(room.failure().reason, "engine_lost")

    def test_unanswered_pages_are_not_free(self):
        """The engine may have read the request whose answer never came."""
        with Client(self.path, "g", "destination") as c:
            c.create_region(4096)
            room = c.open(1, "p")
            self.engine.on["register"] = lambda s, h, p, f: s.conn.shutdown(socket.SHUT_RDWR)
            self.assertEqual(room.register([(0, [1])]), "engine_lost")
            self.assertEqual((room.poll(), room.residency(), room.reusable),
                             (KVPoll.Failed, Residency.QUARANTINED, False))
            self.assertFalse(room.wait_reusable(0.05))
            mapped, lease = self.engine.session.regions[1]
            os.close(lease)  # the end of the lease alone is no proof: the mapping is still there
            self.assertFalse(room.wait_reusable(0.1))
            mapped.close()
            self.engine.session.regions = {}
            self.assertTrue(room.wait_reusable(20))
            self.assertEqual(room.residency(), Residency.FENCED)

    def test_redial_that_timed_out_keeps_the_bytes_under_the_canary(self):
        """The next redial puts back what the worker had, not the canary that the one before left there."""
        for answers, write, proof, want in ((False, False, False, b"KVCACHE!"), (True, False, False, b"KVCACHE!"),
                                            (True, False, True, b"KVCACHE!"), (False, True, False, b"newbytes")):
            with self.subTest(answers=answers, write=write, proof=proof):
                c = Client(self.path, "g", "source")
                self.addCleanup(c.close)
                region = c.create_region(4096)
                c.add_pool(1, [Tensor(region, 0, 4096, 4096)])
                region.buf[-8:] = b"KVCACHE!"
                self.lose(c)
                held = []
                self.engine.on["region_add"] = lambda *request: held.append(request)
                patience = 0.2
                while bytes(region.buf[-8:]) == b"KVCACHE!":  # the hello may take as long
                    self.assertRaises((RequestTimeout, ConnectFailed), c.redial, patience)
                    patience *= 2
                self.eventually(lambda: held)
                self.assertFalse(region.released())
                del self.engine.on["region_add"]
                session, header, payload, fds = held[0]
                if answers:
                    Session.do_region_add(session, header, payload, fds)
                else:
                    for fd in fds:
                        os.close(fd)
                if write:
                    region.buf[-8:] = b"newbytes"
                self.drop(session)
                if proof:
                    self.eventually(region.released)
                    self.assertEqual(bytes(region.buf[-8:]), want)
                n = c.redial(20)
                self.addCleanup(n.close)
                self.assertEqual(bytes(region.buf[-8:]), want)
                self.assertIsNone(n.open(1).send([(0, [0])], last=True))

    def test_add_region_that_timed_out_puts_the_bytes_back(self):
        """With the late answer; and a region that is ready late follows a redial, too."""
        for refused in (False, True):
            with self.subTest(refused=refused), Client(self.path, "g", "source") as c:
                held = []
                self.engine.on["region_add"] = lambda *request: held.append(request)
                region = Region(4096)
                region.buf[-8:] = b"KVCACHE!"
                self.assertRaises(RequestTimeout, c.add_region, region, 0.05)
                self.assertNotEqual(bytes(region.buf[-8:]), b"KVCACHE!")
                self.eventually(lambda: held)
                del self.engine.on["region_add"]
                session, header, payload, fds = held[0]
                answer = Session.do_region_add(session, header, payload, fds)
                if refused:
                    answer = session.error("no_backend", "region")
                session.write({"t": "ok", **answer, "seq": header["seq"]})
                self.eventually(lambda: bytes(region.buf[-8:]) == b"KVCACHE!")
                if not refused:
                    self.assertEqual(c.add_pool(1, [Tensor(region, 0, 4096, 4096)]), 0)
                    self.lose(c)
                    n = c.redial(20)
                    self.addCleanup(n.close)
                    self.assertEqual(bytes(region.buf[-8:]), b"KVCACHE!")

    def test_add_region_that_was_not_sent_puts_the_bytes_back(self):
        with Client(self.path, "g", "source") as c:
            region = Region(4096)
            region.buf[-8:] = b"KVCACHE!"

            def submit(*args, **kwargs):
                raise RequestTimeout("nothing was sent")
            c._connection.submit = submit
            self.assertRaises(RequestTimeout, c.add_region, region)
            self.assertEqual(bytes(region.buf[-8:]), b"KVCACHE!")

    def drop(self, session):
        """The engine gives the memory of a session back."""
        for mapped, lease in session.regions.values():
            mapped.close()
            os.close(lease)
        session.regions = {}

    def lose(self, c):
        """The engine is gone, with its memory; the listener stays for the next session."""
        session = self.engine.session
        session.conn.shutdown(socket.SHUT_RDWR)
        self.eventually(lambda: c.lost is not None)
        self.drop(session)

    def test_no_proof_here(self):
        with Client(self.path, "g", "source") as c:
            c.provable = False
            room = c.open(1)
            room.send([(0, [1])])
            self.engine.session.conn.shutdown(socket.SHUT_RDWR)
            self.assertEqual(room.wait(20), KVPoll.Failed)
            self.assertFalse(room.wait_reusable(0.1))

    def test_close(self):
        c = Client(self.path, "g", "source")
        region = c.create_region(4096)
        live, done = c.open(1), c.open(2)
        live.send([(0, [1])])
        done.send(last=True)
        pending = []
        self.engine.on["failure"] = lambda s, h, p, f: pending.append(1)
        asker = threading.Thread(target=lambda: pending.append(live.failure()))
        asker.start()
        self.eventually(lambda: pending)
        c.close()
        c.close()
        asker.join(20)
        self.assertEqual(pending[1][:3], (KVPoll.Failed, Residency.QUARANTINED, "worker_lost"))
        self.assertEqual((live.poll(), done.poll()), (KVPoll.Failed, KVPoll.Success))
        self.assertEqual(live.failure().reason, "worker_lost")
        self.assertRaises(EngineLost, c.open, 3)
        self.assertEqual((live.wait(0), c.wait(0.01), c.wait(0.01)), (KVPoll.Failed, True, False))
        self.assertFalse(region.released() or live.wait_reusable(0.01))
        mapped, lease = self.engine.session.regions.pop(1)
        mapped.close()
        os.close(lease)
        self.assertTrue(live.wait_reusable(20) and region.released())
        region.buf[0] = 1

    def test_requests_in_flight(self):
        with Client(self.path, "g", "source") as c:
            self.engine.on["open"] = lambda s, h, p, f: h["room"] == 3 and s.conn.shutdown(socket.SHUT_RDWR) or None
            rooms = []
            try:
                for i in range(1, 6):
                    rooms.append(c.open(i, wait=False))
            except EngineLost:
                pass  # the socket may be gone before the last of them
            for room in rooms:
                self.assertEqual(room.wait(20), KVPoll.Failed)
                self.assertTrue(room.reusable)
                self.assertEqual(room.failure().reason, "engine_lost")

    def test_watcher_fault_is_a_loss(self):
        """Whatever breaks the client's own thread, rooms do not stay as they are for ever."""
        with Client(self.path, "g", "source") as c:
            room = c.open(1)
            c._connection.pump = lambda: 1 // 0
            self.assertEqual(room.failure().reason, "engine_lost")
            self.assertIn("ZeroDivisionError", c.lost)
            self.assertEqual(room.poll(), KVPoll.Failed)


class Proof(support.Case):
    def test_self_test(self):
        self.assertTrue(proof_works())

    def test_writers(self):
        region = Region(4096)
        self.assertTrue(writers_gone(region._fd))
        out = os.open(f"/proc/self/fd/{region._fd}", os.O_RDWR)
        self.assertFalse(writers_gone(region._fd))
        mapped = __import__("mmap").mmap(out, 4096)
        os.close(out)
        self.assertFalse(writers_gone(region._fd))
        mapped.close()
        self.assertTrue(writers_gone(region._fd))
        self.assertTrue(region.released())
        region.close()

    def test_codes(self):
        self.assertEqual(BadDescriptor("x").code, "bad_fd")


if __name__ == "__main__":
    unittest.main()
