"""A small engine for the tests: the other side of docs/worker-api.md, written from the text and not from the client.

As a program: fake_engine.py SOCKET [hold]; with hold, a child keeps copies of all descriptors after it was killed.
"""
import array
import ctypes
import fcntl
import json
import mmap
import os
import socket
import struct
import sys
import threading
import time

LIBC = ctypes.CDLL(None, use_errno=True)


def eventfd():
    fd = LIBC.eventfd(0, 0o2000000)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "eventfd")
    return fd


def frame(header, payload=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<II", len(raw), len(payload)) + raw + payload


class Page:
    """The writer's side of a status page."""

    def __init__(self, slots, incarnation=7, seals=0x17):
        self.slots, self.ring = slots, 2 * slots
        self.words, self.plane = 64, 64 + 8 * slots
        self.entries = -(-(self.plane + slots) // 8) * 8
        self.size = self.entries + 8 * self.ring
        self.fd = os.memfd_create("page", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size)
        self.map = mmap.mmap(self.fd, self.size)
        struct.pack_into("<IIIIQQQIIII", self.map, 0, 0x31505354, 1, slots, self.ring, incarnation, 0, 0, self.words,
                         self.plane, self.entries, self.size)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.view = memoryview(self.map).cast("Q")
        self.lock = threading.Lock()

    def beat(self):
        self.view[3] = time.monotonic_ns()

    def set(self, slot, status, residency=0, tag=None):
        with self.lock:
            word = self.view[self.words // 8 + slot]
            tag = word >> 16 if tag is None else tag
            low = status | residency << 3
            self.view[self.words // 8 + slot] = low | tag << 16
            self.map[self.plane + slot] = low
            n = self.view[4] + 1
            self.view[self.entries // 8 + (n - 1) % self.ring] = (n & 0xFFFFFFFF) << 32 | slot
            self.view[4] = n


class Session:
    def __init__(self, engine, conn):
        self.engine, self.conn = engine, conn
        self.page = self.event = None
        self.rooms = {}  # slot -> dict
        self.regions = {}  # number -> (map, lease fd)
        self.requests = []
        self.buffer, self.fds = b"", []
        self.opener = 100

    def read(self, n):
        while len(self.buffer) < n:
            data, ancillary, _, _ = self.conn.recvmsg(1 << 20, 1024, socket.MSG_CMSG_CLOEXEC)
            for _, _, raw in ancillary:
                got = array.array("i")
                got.frombytes(raw)
                self.fds += got
            if not data:
                raise EOFError
            self.buffer += data
        out, self.buffer = self.buffer[:n], self.buffer[n:]
        return out

    def write(self, header, payload=b"", fds=()):
        data = frame(header, payload)
        if fds:
            socket.send_fds(self.conn, [data[:8]], fds)
            data = data[8:]
        self.conn.sendall(data)

    def set(self, slot, status, residency=0, **fields):
        self.rooms[slot].update(status=status, residency=residency, **fields)
        self.page.set(slot, status, residency)
        self.wake()

    def wake(self):
        if self.event is not None:
            os.write(self.event, (1).to_bytes(8, "little"))

    def serve(self):
        try:
            while True:
                head, size = struct.unpack("<II", self.read(8))
                header = json.loads(self.read(head))
                payload = self.read(size)
                fds, self.fds = self.fds, []
                self.requests.append((header, payload))
                handle = self.engine.on.get(header["t"]) or getattr(Session, "do_" + header["t"])
                answer = handle(self, header, payload, fds)
                if answer is None:
                    continue
                if isinstance(answer, dict):
                    answer = (answer,)
                answer[0].setdefault("t", "ok")
                answer[0].setdefault("seq", header["seq"])
                self.write(*answer)
        except (EOFError, OSError):
            pass
        finally:
            self.conn.close()

    def error(self, code, field="", rule="", message="because"):
        return {"t": "error", "code": code, "field": field, "rule": rule, "message": message}

    def do_hello(self, h, payload, fds):
        self.page = self.engine.make_page(h["slots"])
        self.page.beat()
        out = [self.page.fd]
        if h["notify"]:
            self.event = eventfd()
            out.append(self.event)
        return {"node": "n0", "incarnation": 7, "slots": h["slots"], "page_bytes": self.page.size,
                "limits": {"inflight": 4096}}, b"", out

    def do_region_add(self, h, payload, fds):
        memory, lease = fds
        m = mmap.mmap(memory, h["size"])
        os.close(memory)
        at = h["canary_offset"]
        seen = int.from_bytes(m[at:at + 8], "little")
        if seen != h["canary"]:
            return self.error("bad_memory", "canary", "W5", "the canary is not there")
        m[at:at + 8] = (seen ^ (1 << 64) - 1).to_bytes(8, "little")
        self.regions[h["region"]] = [m, lease]
        return {}

    def do_pool_add(self, h, payload, fds):
        return {}

    def do_open(self, h, payload, fds):
        slot = next((i for i in range(self.page.slots) if i not in self.rooms), None)
        if slot is None:
            return self.error("limit", "slots", "W10", "no slot is free")
        self.opener += 1
        self.rooms[slot] = {"room": h["room"], "status": 1, "residency": 0, "reason": "none", "aux": b"", "ids": []}
        self.page.set(slot, 1, 0, tag=self.opener)
        self.wake()
        return {"slot": slot, "opener": self.opener}

    def end(self, slot, status, residency, reason):
        self.set(slot, status, residency, reason=reason)

    def ended(self, slot):
        room = self.rooms[slot]
        return {"ended": True, "reason": room["reason"]} if room["status"] in (0, 4) else None

    def do_register(self, h, payload, fds):
        slot = h["slot"]
        if self.ended(slot):
            return self.ended(slot)
        self.rooms[slot]["ids"].append(array.array("i", payload).tolist())
        self.set(slot, 1, 1)
        return {}

    def do_send(self, h, payload, fds):
        slot = h["slot"]
        if self.ended(slot):
            return self.ended(slot)
        ids = 4 * sum(p["pages"] for p in h["parts"])
        self.rooms[slot]["ids"].append(array.array("i", payload[:ids]).tolist())
        self.rooms[slot]["aux"] = payload[ids:]
        if h.get("last"):
            self.end(slot, 4, 4, "success")
        else:
            self.set(slot, 3, 1)
        return {}

    def do_abort(self, h, payload, fds):
        if self.ended(h["slot"]):
            return self.ended(h["slot"])
        self.end(h["slot"], 0, 2, "aborted")
        return {}

    def do_release(self, h, payload, fds):
        slot = h["slot"]
        if self.rooms[slot]["residency"] not in (0, 4, 5):
            return self.error("not_reusable", "slot", "R4", "an op is not quiet")
        del self.rooms[slot]
        self.page.set(slot, 0, 6, tag=0)
        return {}

    def do_failure(self, h, payload, fds):
        room = self.rooms[h["slot"]]
        return {"status": room["status"], "residency": room["residency"], "reason": room["reason"],
                "doc": "A sentence.", "detail": "more"}

    def do_aux(self, h, payload, fds):
        aux = self.rooms[h["slot"]]["aux"]
        return {"aux": len(aux)}, aux


class FakeEngine:
    """Serves in threads of this process. on[type] = f(session, header, payload, fds) replaces a handler; it may
    return None for no answer."""

    def __init__(self, path):
        self.path, self.on, self.sessions = path, {}, []
        self.beating = True
        self.make_page = Page
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.threads = [threading.Thread(target=f, daemon=True) for f in (self.accept, self.beats)]
        self.closed = threading.Event()
        for t in self.threads:
            t.start()

    @property
    def session(self):
        return self.sessions[-1]

    def accept(self):
        while True:
            try:
                conn, _ = self.listener.accept()
            except OSError:
                return
            session = Session(self, conn)
            self.sessions.append(session)
            t = threading.Thread(target=session.serve, daemon=True)
            self.threads.append(t)
            t.start()

    def beats(self):
        while not self.closed.wait(0.05):
            for s in list(self.sessions):
                if s.page is not None and self.beating:
                    s.page.beat()

    def close(self):
        self.closed.set()
        for s in [self.listener] + [s.conn for s in self.sessions]:
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.listener.close()
        for t in self.threads:
            t.join(10)
        for s in self.sessions:
            for fd in [s.event] + ([s.page.fd] if s.page else []) + [r[1] for r in s.regions.values()]:
                if fd is not None and fd >= 0:
                    os.close(fd)
            for m, _ in s.regions.values():
                m.close()
            s.regions = {}


if __name__ == "__main__":
    engine = FakeEngine(sys.argv[1])
    print("ready", flush=True)
    if "hold" in sys.argv:
        sys.stdin.readline()  # the client has its session now
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
    time.sleep(60)
