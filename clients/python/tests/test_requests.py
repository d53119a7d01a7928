"""Requests on the wire: pipelining, batches, bounded waits, and garbage in return."""
import array
import json
import os
import random
import struct
import threading
import unittest

from fake_engine import frame
from test_client import EngineCase
from terminus_client import (BadField, EngineLost, KVPoll, LimitExceeded, ProtocolError, RequestTimeout, Residency,
                             TerminusError)


class Pipelining(EngineCase):
    def test_answers_out_of_order(self):
        c = self.client()
        held = []

        def hold(s, h, p, f):
            held.append((h["seq"], s.do_open(h, p, f)))
            if len(held) == 50:
                for seq, answer in reversed(held):
                    s.write({"t": "ok", "seq": seq, **answer})
        self.engine.on["open"] = hold
        rooms = [c.open(i, wait=False) for i in range(50)]
        for room in rooms:
            self.assertEqual(room.wait(0), KVPoll.Bootstrapping)
        self.eventually(lambda: all(r.slot >= 0 for r in rooms))
        self.assertEqual([self.engine.session.rooms[r.slot]["room"] for r in rooms], list(range(50)))

    def test_without_waiting(self):
        c = self.client()
        room = c.open(1, wait=False)
        for i in range(100):
            room.send([(0, [i])], wait=False)
        room.send(last=True, wait=False)
        self.assertEqual(room.wait(20), KVPoll.Success)
        self.assertEqual(self.engine.session.rooms[room.slot]["ids"], [[i] for i in range(100)] + [[]])
        sends = [h for h, _ in self.engine.session.requests if h["t"] == "send"]
        self.assertEqual([h["chunk"] for h in sends], list(range(101)))

    def test_batch(self):
        c = self.client(slots=512)
        requests = self.engine.session.requests
        with c.batch():
            rooms = [c.open(i, wait=False) for i in range(300)]
            self.assertEqual(len(requests), 1)
        self.eventually(lambda: all(r.slot >= 0 for r in rooms))
        with c.batch(), c.batch():
            for room in rooms:
                room.send([(0, [room.id])], last=True, wait=False)
            self.assertIsNone(rooms[0].abort() and None)  # a request that is waited for takes the others with it
            self.assertEqual([r.wait(20) for r in rooms], [KVPoll.Success] * 300)
        with c.batch():
            for room in rooms:
                room.release(wait=False)
            for i in range(1500):  # more than the window: the batch does not wait for itself
                rooms[0] = c.open(i, wait=False) if i < 1 else rooms[0]
                c._connection.submit('{"t":"pool_add"', hold=True)
        self.eventually(lambda: c._rooms == {rooms[0].slot: rooms[0]})
        self.assertEqual([h["seq"] for h, _ in requests], list(range(1, len(requests) + 1)))
        self.assertEqual(self.engine.session.rooms[rooms[0].slot]["room"], 0)

    def test_waiting_inside_a_batch(self):
        c = self.client()
        with c.batch():
            room = c.open(1, wait=False)
            room.send([(0, [1])], wait=False)  # needs the slot, hence the answer to open
            room.send(last=True, wait=False)
            self.assertEqual(room.wait(20), KVPoll.Success)
            other = c.open(2, wait=False)
            self.assertEqual(other.failure().reason, "none")

    def test_batch_of_a_lost_engine(self):
        c = self.client()
        with c.batch():
            room = c.open(1, wait=False)
            self.engine.session.conn.shutdown(2)
            self.eventually(lambda: c.lost is not None)
        self.assertEqual(room.poll(), KVPoll.Failed)

    def test_error_nobody_waited_for(self):
        c = self.client()
        room = c.open(1)
        self.engine.on["send"] = lambda s, h, p, f: s.error("bad_field", "pages", "W7", "out of range")
        self.assertIsNone(room.send([(0, [1])], wait=False))
        self.eventually(lambda: room.error is not None)
        del self.engine.on["send"]
        with self.assertRaises(BadField) as e:
            room.send([(0, [2])])
        self.assertEqual(e.exception.rule, "W7")
        self.assertIsNone(room.send([(0, [2])]))

    def test_pages_count_from_the_request_on(self):
        """Between send and its answer the page still says that no pages are held."""
        c = self.client()
        room = c.open(1)
        gate = threading.Event()

        def slow(s, h, p, f):
            gate.wait(10)
            return s.do_send(h, p, f)
        self.engine.on["send"] = slow
        room.send([(0, [1])], wait=False)
        self.assertEqual(room.residency(), Residency.NONE)
        self.assertFalse(room.reusable)
        gate.set()
        self.eventually(lambda: room.residency() == Residency.ARMED)
        self.assertFalse(room.reusable)

    def test_two_threads(self):
        c = self.client(slots=512)
        failed = []

        def work(base):
            try:
                for i in range(150):
                    room = c.open(base + i)
                    room.send([(0, [i, base])])
                    room.send(last=True)
                    if room.wait(20) != KVPoll.Success:
                        failed.append(room)
                    ids = self.engine.session.rooms[room.slot]["ids"]
                    if ids != [[i, base], []]:
                        failed.append(ids)
                    room.release()
            except Exception as e:
                failed.append(e)
        threads = [threading.Thread(target=work, args=(base,)) for base in (0, 10000)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        self.assertEqual(failed, [])
        self.assertEqual(c._rooms, {})
        seqs = [h["seq"] for h, _ in self.engine.session.requests]
        self.assertEqual(seqs, list(range(1, len(seqs) + 1)))

    def test_window_and_full_socket(self):
        """An engine that answers nothing, then reads nothing: a bounded wait, then a typed error."""
        c = self.client(timeout=0.3)
        room = c.open(1)
        self.engine.on["send"] = self.unanswered
        with self.assertRaises(LimitExceeded):
            for _ in range(2000):
                room.send([(0, [1])], wait=False)
        self.assertIsNone(c.lost)
        d = self.client("destination", timeout=0.3)
        other = d.open(2, "p")
        gate = threading.Event()
        self.engine.on["register"] = lambda s, h, p, f: gate.wait(20) and None
        try:
            with self.assertRaises((RequestTimeout, EngineLost)):
                for _ in range(100):
                    if other.register([(0, array.array("i", bytes(1 << 20)))], wait=False):
                        raise EngineLost("cut")
        finally:
            gate.set()


class Garbage(EngineCase):
    def test_garbage_ends_the_session(self):
        ok = {"t": "ok"}
        cases = {
            "noise": os.urandom(64).replace(b"\0", b"x"),
            "not an object": frame(b"[1]"),
            "unknown answer": frame({**ok, "seq": 10**6}),
            "no seq": frame(ok),
            "seq is text": frame({**ok, "seq": "1"}),
            "seq is true": frame({**ok, "seq": True}),
            "seq is a double": frame(b'{"t":"ok","seq":2.0}'),
            "unknown type": frame({"t": "hm", "seq": 3}),
            "error without text": frame({"t": "error", "seq": 3, "code": 5}),
            "endless header": struct.pack("<II", 1 << 31, 0),
        }
        for name, raw in cases.items():
            with self.subTest(name):
                c = self.client()
                room = c.open(1)
                self.assertEqual(room.poll(), KVPoll.Bootstrapping)
                self.engine.on["failure"] = lambda s, h, p, f, raw=raw: s.conn.sendall(raw)
                failure = room.failure()
                self.assertEqual((failure.status, failure.reason), (KVPoll.Failed, "engine_lost"))
                self.assertIn("protocol", c.lost)
                self.assertEqual(room.poll(), KVPoll.Failed)
                self.assertRaises(EngineLost, c.open, 2)

    def test_slot_out_of_range(self):
        for answer in ({"slot": 4, "opener": 1}, {"slot": -1, "opener": 1}, {"opener": 1}, {"slot": 0},
                       {"slot": 0, "opener": "x"}):
            with self.subTest(answer):
                self.engine.on["open"] = lambda s, h, p, f, answer=answer: dict(answer)
                c = self.client(slots=4)
                self.assertRaises(ProtocolError, c.open, 1)
                c._latched.wait(20)
                self.assertIsNotNone(c.lost)

    def test_fuzz_answers(self):
        """Whatever is answered: a typed error or a result, and the client ends in good order."""
        rng = random.Random(3)
        good = json.dumps({"t": "ok", "seq": 3, "status": 1, "residency": 0, "reason": "none"}).encode()
        for n in range(40):
            raw = bytearray(frame(good))
            for _ in range(rng.randint(1, 3)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            self.engine.on["failure"] = lambda s, h, p, f, raw=bytes(raw): s.conn.sendall(raw)
            with self.subTest(n), self.client(timeout=0.05) as c:
                room = c.open(1)
                try:
                    room.failure()
                except (ProtocolError, RequestTimeout, TerminusError):
                    pass
                self.assertIn(room.poll(), (KVPoll.Bootstrapping, KVPoll.Failed))

    def test_engine_refuses_our_bytes(self):
        def say(s, h, p, f):
            s.write({"t": "error", "seq": 0, "code": "bad_frame", "message": "byte 3"})
            s.conn.shutdown(2)
        self.engine.on["send"] = say
        c = self.client()
        room = c.open(1)
        self.assertEqual(room.send([(0, [1])]), "engine_lost")
        self.assertIn("byte 3", c.lost)

if __name__ == "__main__":
    unittest.main()
