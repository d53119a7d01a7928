"""docs/worker-api-vectors.json: the client reads these bytes, and what it writes is compared after parsing."""
import array
import fcntl
import json
import mmap
import os
import shutil
import socket
import tempfile
import unittest
from unittest import mock

import support
from fake_engine import FakeEngine, Page, frame
from terminus_client import BadFrame, Client, KVPoll, Layout, NotReusable, Tensor, frames
from terminus_client.errors import from_answer
from terminus_client.status import SEALS, StatusPage

VECTORS = os.path.join(support.ROOT, "..", "..", "docs", "worker-api-vectors.json")
LAYOUT = Layout("bfloat16", 2, 8, 128, 16, order="nhd")


def load():
    with open(VECTORS, encoding="utf-8") as f:
        return json.load(f)


def payload(vector):
    return array.array("i", vector.get("ids", [])).tobytes() + bytes.fromhex(vector.get("aux", ""))


class Vectors(support.Case):
    @classmethod
    def setUpClass(cls):
        cls.vectors = load()

    def setUp(self):
        self.dir = tempfile.mkdtemp(prefix="t")
        self.engine = FakeEngine(os.path.join(self.dir, "w"))
        self.wrong = []

    def tearDown(self):
        self.engine.close()
        shutil.rmtree(self.dir)

    def play(self, exchanges):
        """Makes the fake engine answer with the vectors' bytes, in order, and compare what it is asked."""
        rest = iter(exchanges)

        def answer(session, header, got, fds):
            x = next(rest)
            want = x["request"]
            if (header, got, len(fds)) != (want["header"], payload(want), want.get("descriptors", 0)):
                self.wrong.append((x["name"], header, got, len(fds)))
            if header["t"] == "hello":
                self.engine.make_page = lambda slots: Page(slots, x["answer"]["header"]["incarnation"])
                _, _, handed = session.do_hello(header, got, fds)
                raw = bytes.fromhex(x["answer"]["frame"])
                socket.send_fds(session.conn, [raw], handed)
                return
            if header["t"] == "region_add":
                session.do_region_add(header, got, fds)
            if header["t"] == "open":
                session.page.set(x["answer"]["header"]["slot"], 1, 0, tag=x["answer"]["header"]["opener"])
            session.conn.sendall(bytes.fromhex(x["answer"]["frame"]))
        for t in ("hello", "region_add", "pool_add", "open", "register", "send", "abort", "release", "failure", "aux"):
            self.engine.on[t] = answer

    def begin(self, canary, *args, **kw):
        with mock.patch("terminus_client.memory.secrets.randbits", lambda bits: canary):
            client = Client(self.engine.path, *args, layout=LAYOUT, slots=8, **kw)
            region = client.create_region(65600)
        tensors = [Tensor(region, 0, 4096, 4096, 0), Tensor(region, 32768, 4096, 4096, 1)]
        self.assertEqual(client.add_pool(8, tensors), 0)
        return client

    def test_source_session(self):
        exchanges = self.vectors["source_session"]
        self.play(exchanges)
        with self.begin((1 << 64) - 1, "prefill-0", "source", notify=False) as c:
            self.assertEqual((c.node, c.incarnation), ("node-a", (1 << 63) - 1))
            self.assertEqual(c.limits, exchanges[0]["answer"]["header"]["limits"])
            room = c.open((1 << 63) - 1, priority=-1, deadline=60)
            self.assertEqual((room.slot, room.poll()), (0, KVPoll.Bootstrapping))
            aux = bytes.fromhex(exchanges[5]["request"]["aux"])
            self.assertIsNone(room.send([(0, [0, 1, 7])]))
            self.assertIsNone(room.send([(0, [4, 2]), (0, [6])], last=True, aux=aux, layers=(0, 2)))
            self.assertEqual(room.failure(), (3, 1, "none", "The room has not ended.", ""))
            with self.assertRaises(NotReusable) as e:
                room.release()
            self.assertEqual(e.exception.rule, "R4")
            room.release()
        self.assertEqual(self.wrong, [])

    def test_destination_session(self):
        self.play(self.vectors["destination_session"])
        with self.begin(1, "decode-0", "destination", rank=1, size=2, notify=True) as c:
            room = c.open(7, "prefill-0", attempt=3)
            self.assertEqual(room.slot, 5)
            self.assertIsNone(room.register([(0, array.array("i", [3, 0, 1, 2]), 1)]))
            self.assertEqual(room.aux(), bytes.fromhex(self.vectors["destination_session"][5]["answer"]["aux"]))
            self.assertEqual(room.abort(), "success")
            self.assertEqual(c.add_pool(8, c._pools[0][1], state=True), 1)
        self.assertEqual(self.wrong, [])

    def test_every_frame_is_read(self):
        v = self.vectors
        for vector in [x[side] for s in ("source_session", "destination_session") for x in v[s]
                       for side in ("request", "answer")] + v["more_answers"]:
            with self.subTest(vector["header"]):
                raw = bytes.fromhex(vector["frame"])
                decoder = frames.Decoder()
                got = [m for i in range(len(raw)) for m in decoder.feed(raw[i:i + 1])]
                self.assertEqual(got, [(vector["header"], payload(vector))])
                self.assertEqual(list(frames.Decoder().feed(frame(vector["header"], payload(vector)))), got)
        self.assertIsInstance(from_answer("bad_frame", "header", "W1", ""), BadFrame)

    def test_page(self):
        v = self.vectors["status_page"]
        fd = os.memfd_create("page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, v["size"])
            os.pwrite(fd, bytes.fromhex(v["bytes"]), 0)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            page = StatusPage(fd)
        finally:
            os.close(fd)
        self.assertEqual((page.counter, page.beat, page.incarnation, page.slots),
                         (v["counter"], v["beat"], v["incarnation"], len(v["slots"])))
        statuses = page.statuses(page.map)
        for s in v["slots"]:
            word = page.word(s["slot"])
            self.assertEqual((word >> 16, word & 7, word >> 3 & 7), (s["tag"], s["status"], s["residency"]))
            self.assertEqual(page.map[page.plane_at + s["slot"]], word & 0xFF)
            self.assertEqual(statuses[s["slot"]], s["status"])
        self.assertEqual(page.changed(5), (None, v["counter"]))  # 7 of 8 entries: inside the margin, scan
        with mock.patch("terminus_client.status._MARGIN", 0):
            for in_order in (True, False):  # the two ways to read the ring
                with self.subTest(in_order), mock.patch("terminus_client.status.LOADS_IN_ORDER", in_order):
                    self.assertEqual(page.changed(5), (v["changed_after_5"], v["counter"]))
                    self.assertEqual(page.changed(v["counter"]), ([], v["counter"]))
                    self.assertEqual(page.changed(3)[0], None)
        self.assertIsInstance(page.map, mmap.mmap)


if __name__ == "__main__":
    unittest.main()
