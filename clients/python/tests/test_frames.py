"""Framing and page ids, without an engine."""
import array
import json
import random
import struct
import unittest

import support
from fake_engine import frame
from terminus_client import BadField, LimitExceeded, ProtocolError
from terminus_client import frames


class Framing(support.Case):
    def test_encode(self):
        raw = frames.encode(frames.fields({"t": "x", "n": (1 << 63) - 1}) + "}", [b"ab", memoryview(b"c")])
        head, size = struct.unpack_from("<II", raw)
        self.assertEqual(size, 3)
        self.assertEqual(json.loads(raw[8:8 + head]), {"t": "x", "n": (1 << 63) - 1})
        self.assertEqual(raw[8 + head:], b"abc")

    def test_encode_limits(self):
        with self.assertRaises(LimitExceeded) as e:
            frames.encode("x" * (frames.MAX_HEADER + 1))
        self.assertEqual(e.exception.field, "header")
        with self.assertRaises(LimitExceeded) as e:
            frames.encode("{}", [bytes(frames.MAX_PAYLOAD), b"1"])
        self.assertEqual(e.exception.field, "payload")

    def test_decode_any_cut(self):
        messages = [({"seq": i, "s": "é" * i}, bytes(range(i))) for i in range(20)]
        stream = b"".join(frame(h, p) for h, p in messages)
        for seed in range(20):
            rng, decoder, at, got = random.Random(seed), frames.Decoder(), 0, []
            while at < len(stream):
                n = rng.randint(1, 60)
                got += decoder.feed(stream[at:at + n])
                at += n
            self.assertEqual(got, messages)

    def test_decode_refuses(self):
        ok = struct.pack("<II", 2, 0)
        deep = b"[" * 30000
        for name, raw in {
            "short header": struct.pack("<II", 1, 0) + b"{",
            "no header": struct.pack("<II", 0, 0),
            "long header": struct.pack("<II", frames.MAX_HEADER + 1, 0),
            "long payload": struct.pack("<II", 2, frames.MAX_PAYLOAD + 1),
            "not JSON": ok + b"{]",
            "not an object": ok + b"[]",
            "not UTF-8": ok + b"\xff\xfe",
            "NaN": struct.pack("<II", 9, 0) + b'{"a":NaN}',
            "deep": struct.pack("<II", len(deep), 0) + deep,
        }.items():
            with self.subTest(name), self.assertRaises(ProtocolError):
                list(frames.Decoder().feed(raw))

    def test_decode_noise(self):
        """Whatever comes: messages, patience or ProtocolError, and never much memory."""
        rng = random.Random(1)
        valid = frame({"t": "ok", "seq": 1, "slot": 3}, b"12345678")
        for _ in range(3000):
            raw = bytearray(valid * 2)
            for _ in range(rng.randint(1, 6)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            decoder = frames.Decoder()
            try:
                for header, _ in decoder.feed(bytes(raw)):
                    self.assertIsInstance(header, dict)
            except ProtocolError:
                pass


class PageIds(support.Case):
    def test_accepted(self):
        want = array.array("i", [5, 0, -1, 2**31 - 1]).tobytes()
        a = array.array("i", [5, 0, -1, 2**31 - 1])
        strided = memoryview(array.array("i", [5, 9, 0, 9, -1, 9, 2**31 - 1, 9]))[::2]
        for name, ids in {"list": list(a), "tuple": tuple(a), "array": a, "memoryview": memoryview(a),
                          "read-only": memoryview(bytes(a)).cast("i"), "strided": strided,
                          "two dimensions": memoryview(bytes(a)).cast("i", (2, 2))}.items():
            with self.subTest(name):
                self.assertEqual(bytes(frames.page_ids(ids)), want)
        self.assertEqual(bytes(frames.page_ids(range(3))), array.array("i", [0, 1, 2]).tobytes())
        for empty in ([], array.array("i"), memoryview(b"").cast("i")):
            self.assertEqual(len(frames.page_ids(empty)), 0)

    def test_no_copy(self):
        a = array.array("i", [1, 2])
        view = frames.page_ids(a)
        a[0] = 7
        self.assertEqual(bytes(view), a.tobytes())

    def test_numpy(self):
        try:
            import numpy
        except ImportError:
            self.assertRaises(BadField, frames.page_ids, array.array("q", [1]))  # what numpy has by default
            return
        ids = numpy.arange(10, dtype=numpy.int32)
        self.assertEqual(bytes(frames.page_ids(ids[::3])), array.array("i", [0, 3, 6, 9]).tobytes())
        self.assertRaises(BadField, frames.page_ids, numpy.arange(3, dtype=numpy.int64))

    def test_refused(self):
        for name, ids in {"too big": [2**31], "not integers": [1.5], "int64": array.array("q", [1]),
                          "uint32": array.array("I", [1]), "floats": array.array("f", [1]), "bytes": b"1234",
                          "a number": 7, "text": "1"}.items():
            with self.subTest(name), self.assertRaises(BadField) as e:
                frames.page_ids(ids)
            self.assertEqual(e.exception.field, "pages")


if __name__ == "__main__":
    unittest.main()
