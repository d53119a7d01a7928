"""The client against the fake engine in this process: session, memory, rooms, polling, waiting."""
import array
import ctypes
import fcntl
import gc
import os
import shutil
import struct
import tempfile
import threading
import time
import unittest
from unittest import mock

import support
from fake_engine import FakeEngine, Page
from terminus_client import (BadField, BadMemory, BadState, Client, ConnectFailed, KVPoll, Layout,
                             LimitExceeded, NotReusable, ProtocolError, Refused, Region, RequestTimeout, Residency,
                             Tensor, TerminusError)

LAYOUT = Layout("bfloat16", 2, 8, 64, 16)


class EngineCase(support.Case):
    def setUp(self):
        self.before = support.descriptors()
        self.dir = tempfile.mkdtemp(prefix="t")
        self.path = os.path.join(self.dir, "w")
        self.engine = FakeEngine(self.path)
        self.clients = []

    def tearDown(self):
        for c in self.clients:
            c.close()
        self.engine.close()
        shutil.rmtree(self.dir)
        self.clients = self.engine = None
        self.assertFalse([t for t in threading.enumerate() if t.name == "terminus-client"])

    def client(self, role="source", **kw):
        kw.setdefault("layout", LAYOUT)
        c = Client(self.path, "g0", role, **kw)
        self.clients.append(c)
        return c

    def unanswered(self, session, header, payload, fds):
        return None


class Hello(EngineCase):
    def test_fields(self):
        c = self.client(rank=1, size=2, slots=64)
        self.assertEqual(self.engine.session.requests[0][0], {
            "t": "hello", "seq": 1, "v": 1, "group": "g0", "role": "source", "rank": 1, "size": 2, "slots": 64,
            "notify": True, "layout": {"dtype": "bfloat16", "layers": 2, "kv_heads": 8, "head_dim": 64,
                                       "page_tokens": 16, "kind": "mha"}})
        self.assertEqual((c.node, c.incarnation, c.limits), ("n0", 7, {"inflight": 4096}))
        self.assertTrue(c.provable)
        self.assertIsNone(c.lost)

    def test_no_engine(self):
        for path in (os.path.join(self.dir, "none"), "/tmp/" + "x" * 200):
            with self.assertRaises(ConnectFailed) as e:
                Client(path, "g", "source")
            self.assertEqual(e.exception.field, "socket")
            self.assertIn(path, str(e.exception))

    def test_refused(self):
        self.engine.on["hello"] = lambda s, h, p, f: s.error("bad_field", "role", "W3", "role is source or destination")
        before = support.descriptors()
        with self.assertRaises(BadField) as e:
            self.client(role="prefill")
        self.assertEqual((e.exception.code, e.exception.field, e.exception.rule),
                         ("bad_field", "role", "W3"))
        self.assertEqual(str(e.exception), "bad_field: role: role is source or destination (W3)")
        self.eventually(lambda: support.descriptors() <= before)

    def test_refused_before_hello(self):
        def say(s, h, p, f):
            s.write({"t": "error", "seq": 0, "code": "limit", "field": "sessions", "message": "64 workers"})
            s.conn.shutdown(2)
        self.engine.on["hello"] = say
        with self.assertRaises(LimitExceeded):
            self.client()

    def test_pages_refused(self):
        """A page that could shrink would be a SIGBUS; one that lies would be read past its end."""
        def lying(offset, value):
            def make(slots):
                page = Page(slots)
                struct.pack_into("<I", page.map, offset, value)
                return page
            return make
        cases = {"unsealed": lambda slots: Page(slots, seals=0), "growable": lambda slots: Page(slots, seals=0x12)}
        for offset, value in ((0, 1), (4, 2), (8, 9), (12, 5), (40, 0), (40, 68), (44, 1 << 31), (48, 1 << 20),
                              (48, 65), (52, 1 << 30)):
            cases[f"{value} at {offset}"] = lying(offset, value)
        before = support.descriptors()
        for name, make in cases.items():
            self.engine.make_page = make
            with self.subTest(name), self.assertRaises(ProtocolError):
                self.client(slots=16)
        for s in self.engine.sessions:
            os.close(s.event)
            os.close(s.page.fd)
            s.page = s.event = None
        self.eventually(lambda: support.descriptors() <= before)

    def test_no_descriptors(self):
        self.engine.on["hello"] = lambda s, h, p, f: {"slots": 16}
        with self.assertRaises(ProtocolError):
            self.client()

    def test_silence(self):
        self.engine.on["hello"] = self.unanswered
        with self.assertRaises(RequestTimeout):
            self.client(timeout=0.05)

    def test_descriptors_are_given_back(self):
        before = support.descriptors()
        with self.client() as c:
            c.open(1)
        self.clients = []
        del c
        gc.collect()  # client and rooms refer to each other
        s = self.engine.session
        self.eventually(lambda: s.conn.fileno() < 0)
        for fd in (s.event, s.page.fd):
            os.close(fd)
        s.page = s.event = None
        self.eventually(lambda: support.descriptors() <= before)


class Memory(EngineCase):
    def test_region(self):
        c = self.client()
        region = c.create_region(10001)
        self.assertEqual((region.size, len(region.buf)), (10001, 10001))
        self.assertEqual(bytes(region.buf), bytes(10001))
        shared, lease = self.engine.session.regions[1]
        region.buf[100] = 42
        shared[200] = 43
        self.assertEqual((shared[100], region.buf[200]), (42, 43))
        self.assertEqual(fcntl.fcntl(region._fd, fcntl.F_GET_SEALS), 7)
        self.assertFalse(region.released())
        pid = os.fork()
        if pid == 0:  # MADV_DONTFORK: a child has no such memory, and the session is not its own
            code = 1
            try:
                c.close()
                c.open(5)
            except BadState:
                code = 0
            os._exit(code)
        self.assertEqual(os.waitpid(pid, 0)[1], 0)
        self.assertIsNone(c.lost)
        self.assertIn("dc", self.flags_of(region))  # "do not copy on fork"

    def flags_of(self, region):
        address = ctypes.addressof(ctypes.c_char.from_buffer(region.buf))
        inside = False
        with open("/proc/self/smaps") as f:
            for line in f:
                head = line.split()[0]
                if "-" in head and not head.endswith(":"):
                    low, high = (int(x, 16) for x in head.split("-"))
                    inside = low <= address < high
                elif inside and head == "VmFlags:":
                    return line.split()[1:]

    def test_private_mapping(self):
        def blind(s, h, payload, fds):
            for fd in fds:
                os.close(fd)
            return {}
        self.engine.on["region_add"] = blind
        with self.assertRaises(BadMemory):
            self.client().create_region(4096)

    def test_refusal_leaves_content(self):
        c = self.client()
        region = Region(4096)
        region.buf[-8:] = b"precious"
        self.engine.on["region_add"] = lambda s, h, p, fds: [os.close(fd) for fd in fds] and s.error("bad_memory")
        with self.assertRaises(BadMemory):
            c.add_region(region)
        self.assertEqual(bytes(region.buf[-8:]), b"precious")
        del self.engine.on["region_add"]
        other = Region(4096)
        other.buf[-8:] = b"precious"
        c.add_region(other)
        self.assertEqual(bytes(other.buf[-8:]), b"precious")

    def test_pool(self):
        c = self.client()
        region = c.create_region(1 << 16)
        tensors = [Tensor(region, 0, 4096, 4096, 0), Tensor(region, 1 << 15, 4096, 2048, 1)]
        self.assertEqual([c.add_pool(8, tensors), c.add_pool(4, tensors)], [0, 1])
        self.assertEqual(self.engine.session.requests[-2][0]["tensors"][1],
                         {"region": 1, "offset": 32768, "page_stride": 4096, "page_bytes": 2048, "layer": 1})
        with self.assertRaises(BadField):
            c.add_pool(8, [Tensor(Region(4096), 0, 4096, 4096)])
        self.engine.on["pool_add"] = lambda s, h, p, f: s.error("limit", "pool", "W10", "16 pools")
        self.assertRaises(LimitExceeded, c.add_pool, 8, tensors)
        del self.engine.on["pool_add"]
        self.assertEqual(c.add_pool(8, tensors), 2)  # the refused number is used again

    def test_staging(self):
        c = self.client()
        k, v = bytearray(range(64)) * 4, bytearray(8 * 16)
        staging = c.create_staging([k, v], [32, 16], pages=5, layers=[0, 0])  # 8 private pages
        self.assertEqual([t["layer"] for t in self.engine.session.requests[-1][0]["tensors"]], [0, 0])
        shared = self.engine.session.regions[1][0]
        room = c.open(1)
        staged = staging.put([6, 1])
        self.assertIsInstance(staged, array.array)
        self.assertEqual(shared[staged[1] * 32:staged[1] * 32 + 32], k[32:64])
        room.send([(staging.pool, staged)])
        self.assertEqual(self.engine.session.rooms[0]["ids"], [list(staged)])
        with self.assertRaises(NotReusable):
            staging.free(staged, room)
        self.assertEqual(staging.available, 3)
        self.assertRaises(LimitExceeded, staging.take, 4)
        room.send(last=True)
        self.assertTrue(room.wait_reusable(10))
        staging.free(staged, room)
        self.assertRaises(BadField, staging.free, staged)
        taken = staging.take(2)
        shared[5 * 32 + taken[0] * 16:5 * 32 + taken[0] * 16 + 16] = b"v" * 16
        staging.get(taken, array.array("i", [7, 0]))
        self.assertEqual(v[7 * 16:], b"v" * 16)
        for bad in ([8], [-1]):
            self.assertRaises(BadField, staging.put, bad)
        self.assertRaises(BadField, staging.get, taken, [1])
        self.assertRaises(BadField, c.create_staging, [bytearray(10)], [3], 1)


class Rooms(EngineCase):
    def test_source(self):
        c = self.client()
        room = c.open(2**63 - 1, attempt=3, priority=-1, deadline=1.0004)
        self.assertEqual(self.engine.session.requests[-1][0],
                         {"t": "open", "seq": 2, "room": 2**63 - 1, "attempt": 3, "priority": -1, "deadline_ms": 1001})
        self.assertEqual((room.poll(), room.residency(), room.slot), (KVPoll.Bootstrapping, Residency.NONE, 0))
        self.assertIsNone(room.send([(0, array.array("i", [3, 1])), (1, [9])], layers=(0, 2)))
        header, payload = self.engine.session.requests[-1]
        self.assertEqual(header, {"t": "send", "seq": 3, "slot": 0, "room": 2**63 - 1, "chunk": 0,
                                  "parts": [{"pool": 0, "pages": 2}, {"pool": 1, "pages": 1}], "layers": [0, 2]})
        self.assertEqual(payload, struct.pack("<3i", 3, 1, 9))
        self.assertEqual((room.poll(), room.residency(), room.reusable), (KVPoll.Transferring, Residency.ARMED, False))
        room.send([(0, [4])], last=True, aux=b"first token")
        header, payload = self.engine.session.requests[-1]
        self.assertEqual((header["chunk"], header["last"], header["aux"]), (1, True, 11))
        self.assertEqual(payload, struct.pack("<i", 4) + b"first token")
        self.assertEqual(room.wait(10), KVPoll.Success)
        self.assertEqual(room.failure().reason, "success")
        self.assertEqual(room.send([(0, [1])]), "success")
        self.assertEqual(room.abort(), "success")
        room.release()
        self.assertEqual((room.poll(), room.residency()), (KVPoll.Success, Residency.RELEASED))
        room.release()
        again = c.open(2)
        self.assertEqual(again.slot, 0)
        self.assertEqual((room.poll(), again.poll()), (KVPoll.Success, KVPoll.Bootstrapping))

    def test_destination(self):
        c = self.client("destination", notify=False)
        room = c.open(5, "prefill-0")
        self.assertEqual(self.engine.session.requests[-1][0]["peer_group"], "prefill-0")
        room.register([(0, [1, 2, 3], 1)])
        self.assertEqual(self.engine.session.requests[-1][0]["parts"], [{"pool": 0, "pages": 3, "prefix": 1}])
        self.assertFalse(room.reusable)
        self.engine.session.rooms[0]["aux"] = b"\0\1aux"
        self.engine.session.end(0, 4, 4, "success")
        self.assertEqual(room.wait(10), KVPoll.Success)
        self.assertEqual(room.aux(), b"\0\1aux")
        room.release()

    def test_abort(self):
        c = self.client()
        room = c.open(5)
        room.send([(0, [1])])
        self.assertIsNone(room.abort())
        self.assertEqual(room.abort(), "aborted")
        self.assertEqual((room.poll(), room.residency()), (KVPoll.Failed, Residency.QUIESCING))
        with self.assertRaises(NotReusable) as e:
            room.release()
        self.assertEqual((e.exception.code, e.exception.rule), ("not_reusable", "R4"))
        self.assertEqual((room.poll(), room.residency()), (KVPoll.Failed, Residency.QUIESCING))
        self.assertFalse(room.wait_reusable(0.01))
        self.engine.session.end(0, 0, 5, "aborted")
        self.assertTrue(room.wait_reusable(10))
        failure = room.failure()
        self.assertEqual((failure.status, failure.residency, failure.reason, failure.doc, failure.detail),
                         (0, 5, "aborted", "A sentence.", "more"))
        room.release()

    def test_open_refused(self):
        c = self.client()
        self.engine.on["open"] = lambda s, h, p, f: s.error("refused", "room", "R3", "the key is live")
        self.assertRaises(Refused, c.open, 1)
        room = c.open(1, wait=False)
        self.assertEqual(room.wait(10), KVPoll.Failed)
        self.assertEqual(room.failure()[2:], ("refused", "R3", "the key is live"))
        self.assertEqual(room.slot, -1)
        self.assertTrue(room.reusable)
        self.assertRaises(Refused, room.send, [(0, [1])])
        self.assertRaises(BadField, c.open, 2**63)
        self.assertRaises(BadField, c.open, -1)
        self.assertRaises(BadField, c.open, "1")
        self.assertRaises(BadField, c.open, 1, attempt=0.5)

    def test_open_of_an_ended_attempt(self):
        c = self.client()
        self.engine.on["open"] = lambda s, h, p, f: {"ended": True, "reason": "peer_aborted"}
        room = c.open(1)
        self.assertEqual(room.poll(), KVPoll.Failed)
        self.assertEqual(room.failure().reason, "peer_aborted")
        self.assertEqual(room.send([(0, [1])]), "peer_aborted")
        self.assertEqual(room.abort(), "peer_aborted")
        room.release()

    def test_errors_by_code(self):
        c = self.client()
        room = c.open(1)
        for code in ("bad_frame", "bad_field", "bad_state", "bad_memory", "bad_fd", "not_reusable", "refused", "limit",
                     "no_backend", "draining", "of_the_future"):
            self.engine.on["send"] = lambda s, h, p, f, code=code: s.error(code, "pages", "R7", "why")
            with self.subTest(code), self.assertRaises(TerminusError) as e:
                room.send([(0, [1])])
            error = e.exception
            self.assertEqual((error.code, error.field, error.rule, error.message), (code, "pages", "R7", "why"))
            self.assertEqual(type(error) is TerminusError, code == "of_the_future")
        self.assertIsNone(c.lost)

    def test_limits(self):
        room = self.client().open(1)
        self.assertRaises(LimitExceeded, room.send, [], True, bytes((1 << 20) + 1))
        self.assertRaises(LimitExceeded, room.send, [(0, array.array("i", bytes(9 << 20)))])
        self.assertRaises(BadField, room.send, [(0, [1], 1)])
        self.assertRaises(BadField, room.send, [(0,)])
        self.assertIsNone(room.send([(0, [1])]))
        self.assertEqual(self.engine.session.requests[-1][0]["chunk"], 0)  # what was refused here took no number

    def test_request_timeout(self):
        c = self.client(timeout=0.1)
        room = c.open(1)
        self.engine.on["failure"] = self.unanswered
        self.assertRaises(RequestTimeout, room.failure)
        self.assertIsNone(c.lost)
        self.assertIsNone(room.send(last=True))


class Polling(EngineCase):
    def test_foreign_tag_reads_not_yet(self):
        c = self.client(slots=4)
        page = self.engine.session.page
        page.set(2, 4, 4, tag=999)  # another room's Success

        def late(s, h, p, f):
            s.rooms[2] = {"room": h["room"], "status": 1, "residency": 0, "ids": [], "reason": "none"}
            return {"slot": 2, "opener": 55}
        self.engine.on["open"] = late
        room = c.open(1)
        self.assertEqual((room.poll(), room.residency()), (KVPoll.Bootstrapping, Residency.NONE))
        self.assertEqual(c.poll_all()[2], KVPoll.Bootstrapping)
        page.view[page.words // 8 + 2] = 55 << 16 | 3  # the word is there, the plane still is the other room's
        self.assertEqual((room.poll(), c.poll_all()[2]), (KVPoll.Transferring, KVPoll.Transferring))
        page.set(2, 0, 2, tag=55)
        self.assertEqual((room.poll(), c.poll_all()[2]), (KVPoll.Failed, KVPoll.Failed))
        self.assertEqual(c._unseen, {})
        page.set(2, 4, 4)
        self.assertEqual((room.poll(), c.poll_all()[2]), (KVPoll.Success, KVPoll.Success))

    def test_poll_all(self):
        c = self.client(slots=100)
        rooms = [c.open(i) for i in range(20)]
        for i, room in enumerate(rooms):
            self.engine.session.set(room.slot, i % 5, i % 6)
        statuses = c.poll_all()
        self.assertEqual(len(statuses), 100)
        self.assertEqual([statuses[r.slot] for r in rooms], [i % 5 for i in range(20)])
        self.assertEqual([r.poll() for r in rooms], [i % 5 for i in range(20)])

    def test_changes(self):
        c = self.client(slots=256)
        session = self.engine.session
        rooms = [c.open(i) for i in range(200)]
        self.assertEqual(set(c.changes()), set(rooms))
        self.assertEqual(c.changes(), [])
        session.set(7, 3, 1)
        session.set(9, 2, 0)
        self.assertEqual(c.changes(), [rooms[7], rooms[9]])
        for n in range(30 * 200):  # many times round the ring of 512
            session.page.set(n % 200, 1 + n % 3, 1)
            if n % 100 == 99:
                self.assertEqual({r.id for r in c.changes()}, {k % 200 for k in range(n - 99, n + 1)})
        for n in range(5000):
            session.page.set(n % 200, 4, 1)
        self.assertEqual(set(c.changes()), set(rooms))  # overrun: look at all
        self.assertEqual(c.changes(), [])
        session.page.set(5, 3, 1)
        self.assertEqual(c.changes(), [rooms[5]])

    @mock.patch("terminus_client.status.LOADS_IN_ORDER", False)
    def test_changes_entry_not_visible_yet(self):
        c = self.client(slots=256)
        room, page = c.open(1), self.engine.session.page
        c.changes()
        n = page.view[4] + 1
        at = page.entries // 8 + (n - 1) % page.ring
        kept, page.view[at] = page.view[at], 0
        page.view[4] = n
        self.assertEqual(c.changes(), [])
        page.view[at] = n << 32 | room.slot
        self.assertEqual(c.changes(), [room])
        self.assertEqual(kept, 0)

    def test_changes_of_a_ring_that_cannot_be_trusted(self):
        for in_order in (True, False):
            with self.subTest(in_order), mock.patch("terminus_client.status.LOADS_IN_ORDER", in_order):
                c = self.client(slots=256)
                room, page = c.open(1), self.engine.session.page
                c.changes()
                n = page.view[4] + 1
                page.view[page.entries // 8 + (n - 1) % page.ring] = n << 32 | 4000  # no such slot
                page.view[4] = n
                self.assertEqual(c.changes(), [room])
                page.view[4] = 1  # backwards
                self.assertEqual(c.changes(), [room])
                c.close()

    def test_nothing_is_lost(self):
        """A writer without pause; the reader's mirror equals the page at rest."""
        c = self.client(slots=128)
        page = self.engine.session.page
        rooms = {c.open(i): 1 for i in range(128)}
        stop = threading.Event()

        def write():
            n = 0
            while not stop.is_set():
                for _ in range(1 + n * 7919 % 400):
                    n += 1
                    page.set(n * 31 % 128, n % 5, n % 7)
                time.sleep(0.0005)
        writer = threading.Thread(target=write)
        writer.start()
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            for room in c.changes():
                rooms[room] = room.poll()
        stop.set()
        writer.join()
        for room in c.changes():
            rooms[room] = room.poll()
        self.assertEqual([rooms[r] for r in rooms], [r.poll() for r in rooms])
        self.assertEqual([c.poll_all()[r.slot] for r in rooms], [r.poll() for r in rooms])

    def test_released_room_keeps_its_status(self):
        """Its slot may be another room's before the answer to release is read."""
        c = self.client(slots=1)
        room = c.open(1)
        room.send(last=True)
        gate = threading.Event()

        def slow(s, h, p, f):
            answer = s.do_release(h, p, f)
            s.rooms[0] = {"room": 2, "status": 3, "residency": 1, "reason": "none"}
            s.page.set(0, 3, 1, tag=777)
            gate.wait(10)
            return answer
        self.engine.on["release"] = slow
        room.release(wait=False)
        self.eventually(lambda: self.engine.session.page.view[8] >> 16 == 777)
        self.assertEqual(room.poll(), KVPoll.Success)
        gate.set()
        self.eventually(lambda: room.residency() == Residency.RELEASED)
        self.assertEqual(room.poll(), KVPoll.Success)


class Waiting(EngineCase):
    def test_wait(self):
        for notify in (True, False):
            with self.subTest(notify=notify):
                c = self.client(notify=notify)
                session = self.engine.session
                room = c.open(1)
                self.assertTrue(c.wait(10))  # the open
                c.changes()
                self.assertFalse(c.wait(0.01))
                threading.Timer(0.05, session.set, (0, 2, 0)).start()
                self.assertTrue(c.wait(10))
                self.assertEqual(c.changes(), [room])
                self.assertEqual(room.wait(0.01), KVPoll.WaitingForInput)
                if notify:
                    self.assertGreaterEqual(c.fileno(), 0)
                else:
                    self.assertRaises(BadState, c.fileno)

    def test_many_sleepers(self):
        """Each sees its own room's end, whoever took the wake."""
        c = self.client()
        session = self.engine.session
        rooms = [c.open(i) for i in range(8)]
        got = {}
        threads = [threading.Thread(target=lambda r=r: got.update({r.id: r.wait(20)})) for r in rooms]
        for t in threads:
            t.start()
        for i in (5, 0, 7, 3, 1, 6, 2, 4):
            time.sleep(0.005)
            session.set(rooms[i].slot, 4 if i % 2 else 0, 4)
        for t in threads:
            t.join(20)
        self.assertEqual(got, {i: 4 if i % 2 else 0 for i in range(8)})

if __name__ == "__main__":
    unittest.main()
