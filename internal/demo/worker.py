"""The demo's decode worker in Python: the same rooms, the same counting as the Go worker's.

    python3 worker.py --socket PATH --schedule FILE [--orders] [--group decode] [--peer-group prefill] [--quiet 60]

It needs the package terminus_client beside it and nothing else. Reports are JSON lines on standard output.
One thread: due rooms are opened in order as pages become free, changes are taken from the status page, timers
end holds and abort rooms. A page is given back only when the engine says that nobody can write to it any more, or,
once the engine is lost, when the kernel proves it; then the next engine gets the same memory. With --orders the
rooms do not come at their moments but as standard input says (orders.go).
"""
import argparse
import array
import collections
import heapq
import json
import os
import random
import select
import signal
import struct
import sys
import time

from terminus_client import Client, EngineLost, KVPoll, Layout, Refused, Tensor, TerminusError

MASK = (1 << 64) - 1
TILE = 64 << 10
HEADER = struct.Struct("<QIIQ")
CANARY = 0xC5
MAX_LIVE = 512
PROGRESS = 0.2
DIAL = 30.0
PROOF = 20.0  # seconds from the loss of the engine until the kernel proves that no page is written any more
REDIAL = 60.0  # from then on until the next engine has the worker's memory
REDIAL_STEP = 5.0  # between two looks at what else there is to do
OPEN = 20.0  # as long as the engine says that it takes no room now, for it may later
OPEN_PAUSE = 0.1
ABORT = 12.0  # from being told to stop until the open rooms have ended and their pages are back
WAITING = 10.0  # without a change: say once what is waited for
STATUS = {1: "Bootstrapping", 2: "WaitingForInput", 3: "Transferring"}  # of a room that is given up


def mix(x):
    """The finalizer of splitmix64."""
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


class Content:
    """What a page holds: a function of seed, room, page of the prompt and tensor (content.go)."""

    def __init__(self, seed, page_bytes):
        self.seed = mix(seed & MASK)
        self.size = page_bytes
        words = array.array("Q", bytes(TILE))
        x = self.seed
        for i in range(TILE // 8):
            x = (x + 0x9E3779B97F4A7C15) & MASK
            words[i] = mix(x)
        tile = words.tobytes()
        self.tile = tile * (2 + page_bytes // TILE)

    def room(self, room):
        """The part of a page's hash that depends on the room."""
        return mix(self.seed ^ room)

    def expected(self, base, room, page, tensor):
        h = mix((base + (page << 8) + tensor) & MASK)
        at = (h >> 16 & TILE // 8 - 1) * 8
        return HEADER.pack(room, page, tensor, h) + self.tile[at + HEADER.size:at + self.size]

    def aux(self, room):
        return struct.pack("<QQ", room, mix(self.seed ^ room))


class Pages:
    """The allocator: hands out pages in the order in which they came back, with a canary in between."""

    def __init__(self, buf, head):
        self.buf = buf
        self.size = head["page_bytes"]
        self.total = head["pool_pages"]
        self.starts = [t * self.total * self.size for t in range(head["tensors"])]
        self.canary = bytes([CANARY]) * self.size
        self.held = bytearray(self.total)
        self.written = 0
        blocks = [range(b, min(b + head["block_pages"], self.total))
                  for b in range(0, self.total, head["block_pages"])]
        random.Random(head["seed"]).shuffle(blocks)
        self.free = [page for block in blocks for page in block]
        self.at = 0  # the front of the queue
        everything = self.total * self.size * head["tensors"]
        for at in range(0, everything, self.total * self.size):
            buf[at:at + self.total * self.size] = self.canary * self.total

    def available(self):
        return len(self.free) - self.at

    def painted(self, page):
        buf, size, canary = self.buf, self.size, self.canary
        for start in self.starts:
            at = start + page * size
            if bytes(buf[at:at + size]) != canary:
                return False
        return True

    def take(self, count):
        ids = self.free[self.at:self.at + count]
        self.at += count
        if self.at > self.total:
            del self.free[:self.at]
            self.at = 0
        for page in ids:
            if not self.painted(page):
                self.written += 1
            self.held[page] = 1
        return ids

    def give(self, ids):
        buf, size, canary = self.buf, self.size, self.canary
        for page in ids:
            if not self.held[page]:
                raise AssertionError(f"page {page} was given back but is not held")
            self.held[page] = 0
            for start in self.starts:
                at = start + page * size
                buf[at:at + size] = canary
            self.free.append(page)

    def finish(self):
        """Checks all free pages; returns pages written after release and pages that did not come back."""
        for page in self.free[self.at:]:
            if not self.painted(page):
                self.written += 1
        return self.written, self.total - self.available()


class Block:
    """A block of shared prefix in the cache."""

    __slots__ = ("pages", "refs", "used")

    def __init__(self, pages):
        self.pages, self.refs, self.used = pages, 1, 0


class Cache:
    """The pages of prefix blocks that later rooms share, by (room that computed it, block)."""

    def __init__(self, pages):
        self.pages = pages
        self.blocks = {}
        self.clock = 0

    def use(self, key):
        block = self.blocks.get(key)
        if block is not None:
            self.clock += 1
            block.refs, block.used = block.refs + 1, self.clock
        return block

    def put(self, key, ids):
        if key in self.blocks:
            return False
        self.clock += 1
        block = self.blocks[key] = Block(ids)
        block.used = self.clock
        return True

    def drop(self, key):
        self.blocks[key].refs -= 1

    def shrink(self, want):
        """Gives back blocks that nobody uses, oldest first, until want pages are free."""
        if self.pages.available() >= want:
            return
        idle = sorted((b.used, key) for key, b in self.blocks.items() if b.refs == 0)
        for _, key in idle:
            if self.pages.available() >= want:
                return
            self.pages.give(self.blocks.pop(key).pages)


class Held:
    """A room that this worker has open."""

    __slots__ = ("plan", "attempt", "room", "ids", "own", "shared", "status", "line", "free_at", "asked")

    def __init__(self, plan, attempt):
        self.plan, self.attempt = plan, attempt
        self.room = None
        self.ids, self.own, self.shared = [], [], []
        self.status = None  # terminal
        self.line = {"t": "room", "room": plan["room"], "attempt": attempt}
        self.free_at = 0.0
        self.asked = False


class Stopped(Exception):
    """The engine is lost for good or SIGTERM came: see the open rooms to their end and report."""


class Orders:
    """The lines on standard input, taken without waiting."""

    def __init__(self):
        os.set_blocking(0, False)
        self.rest = b""
        self.ended = False

    def take(self):
        lines = []
        while not self.ended:
            try:
                data = os.read(0, 1 << 16)
            except BlockingIOError:
                break
            self.ended = not data
            *whole, self.rest = (self.rest + data).split(b"\n")
            lines += whole
        return [json.loads(line) for line in lines]


def report(**line):
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class Worker:
    def __init__(self, client, pool, buf, head, rooms, peer_group, quiet, orders):
        self.client, self.pool, self.buf = client, pool, buf
        self.head, self.peer_group, self.quiet, self.orders = head, peer_group, quiet, orders
        self.content = Content(head["seed"], head["page_bytes"])
        self.pages = Pages(buf, head)
        self.cache = Cache(self.pages)
        self.count = len(rooms)
        self.schedule = {plan["room"]: plan for plan in rooms}
        start = time.monotonic()
        # (moment, plan, attempt) of rooms that are to be opened, in order
        self.turns = collections.deque(() if orders else ((start + r["at_us"] / 1e6, r, 0) for r in rooms))
        self.live = {}  # client room -> Held
        self.refused = set()  # Held that the engine does not take yet
        self.withdrawn = set()  # (room, attempt) that are to be aborted, by order
        self.timers = []
        self.sequence = 0
        self.ended = self.bytes = self.runs = self.listed = 0
        self.moved = time.monotonic()
        self.waiting = False  # what is waited for was said
        self.stopped = False

    def stop(self, *_):
        """On SIGTERM. The loop sees it: what it is in the middle of is done first."""
        self.stopped = True

    # Pages.

    def owners(self, plan):
        """(first page, room whose content it holds, pages) of the blocks of the cached prefix."""
        at, step = 0, self.head["block_pages"]
        for share in plan.get("prefix", ()):
            end = at + share["pages"]
            while at < end:
                n = min(step, end - at)
                yield at, share["owner"], n
                at += n

    def fill(self, page, base, room, index):
        for tensor, start in enumerate(self.pages.starts):
            at = start + page * self.pages.size
            self.buf[at:at + self.pages.size] = self.content.expected(base, room, index, tensor)

    def admit(self, plan, attempt):
        """The room's pages, or None while there are too few. Prefix blocks that are not cached are computed."""
        moved, step = plan["pages"] - plan["cached"], self.head["block_pages"]
        held, need, blocks = Held(plan, attempt), moved, []
        for at, owner, n in self.owners(plan):
            key = (owner, at // step)
            block = self.cache.use(key)
            blocks.append((at, owner, n, key, block))
            if block is None:
                need += n
            else:
                held.shared.append(key)
        self.cache.shrink(need)
        if self.pages.available() < need:
            for key in held.shared:
                self.cache.drop(key)
            return None
        for at, owner, n, key, block in blocks:
            if block is not None:
                held.ids += block.pages
                continue
            ids, base = self.pages.take(n), self.content.room(owner)
            for j, page in enumerate(ids):
                self.fill(page, base, owner, at + j)
            self.cache.put(key, ids)
            held.shared.append(key)
            held.ids += ids
        held.own = self.pages.take(moved)
        held.ids += held.own
        self.listed += len(held.ids)
        self.runs += sum(1 for i, page in enumerate(held.ids) if i == 0 or page != held.ids[i - 1] + 1)
        return held

    def give_back(self, held):
        plan, step, rest = held.plan, self.head["block_pages"], held.own
        for key in held.shared:
            self.cache.drop(key)
        if held.status == KVPoll.Success:
            rest = []
            for at in range(plan["cached"], plan["pages"], step):
                block, key = held.ids[at:at + step], (plan["room"], at // step)
                if at < plan["keep"] and self.cache.put(key, block):
                    self.cache.drop(key)
                else:
                    rest += block
        self.pages.give(rest)

    def mismatched(self, held):
        """How many pages of the prompt do not hold their content."""
        plan, wrong, buf, size = held.plan, 0, self.buf, self.pages.size
        expected, starts = self.content.expected, self.pages.starts
        pieces = [*self.owners(plan), (plan["cached"], plan["room"], plan["pages"] - plan["cached"])]
        for first, owner, n in pieces:
            base = self.content.room(owner)
            for index in range(first, first + n):
                offset = held.ids[index] * size
                for tensor, start in enumerate(starts):
                    at = start + offset
                    if bytes(buf[at:at + size]) != expected(base, owner, index, tensor):
                        wrong += 1
                        break
        return wrong

    # Rooms.

    def after(self, delay, call):
        self.sequence += 1
        heapq.heappush(self.timers, (time.monotonic() + delay, self.sequence, call))

    def open(self, held):
        report(t="open", room=held.plan["room"], attempt=held.attempt)
        held.line["opened_ns"] = time.monotonic_ns()
        self.try_open(held, time.monotonic() + OPEN)

    def try_open(self, held, until):
        plan = held.plan
        self.refused.discard(held)
        try:
            held.room = self.client.open(plan["room"], peer_group=self.peer_group, attempt=held.attempt)
        except EngineLost:  # nothing was armed
            self.give_back(held)
            self.ended += 1
            report(**held.line, status="Failed", reason="engine_lost", ended_ns=time.monotonic_ns())
            return
        except TerminusError as e:  # refused: nothing was armed
            if isinstance(e, Refused) and time.monotonic() < until and not self.stopped:
                self.refused.add(held)
                self.after(OPEN_PAUSE, lambda: self.try_open(held, until))
                return
            self.give_back(held)
            report(**held.line, detail=f"open: {e}")
            return
        self.live[held.room] = held
        aborts, point = plan.get("aborter") == "decode", plan.get("point", 0.0)
        if aborts and point < 0.5:
            self.abort(held)
        if (plan["room"], held.attempt) in self.withdrawn:
            held.room.abort()
        held.room.register([(self.pool, array.array("i", held.ids), plan["cached"])])
        if aborts and point >= 0.75:
            way = plan["pause_us"] * len(plan.get("chunks") or ()) / 1e6
            self.after((point - 0.75) / 0.25 * way, lambda: self.abort(held))
        elif aborts and point >= 0.5:
            self.abort(held)

    def abort(self, held):
        if held.status is None:
            held.asked = True
            held.room.abort()

    def take_orders(self):
        for order in self.orders.take():
            key = order["room"], order.get("attempt", 0)
            if not order.get("abort"):
                self.turns.append((0.0, self.schedule[key[0]], key[1]))
                continue
            self.withdrawn.add(key)
            for held in self.live.values():
                if (held.plan["room"], held.attempt) == key and held.status is None:
                    held.room.abort()

    def look(self, held):
        """Takes a room as far as it goes now."""
        room, line = held.room, held.line
        if held.status is None:
            status = room.poll()
            if not KVPoll.terminal(status):
                return
            held.status = status
            line["ended_ns"] = time.monotonic_ns()
            report(t="ended", room=line["room"], attempt=held.attempt, opened_ns=line["opened_ns"],
                   status="Success" if status == KVPoll.Success else "Failed")
            if held.asked:
                line["asked"] = True
            if status == KVPoll.Success:
                self.succeeded(held)
            else:
                failure = room.failure()
                line.update(status="Failed", reason=failure.reason, detail=failure.detail)
        if time.monotonic() < held.free_at or not room.reusable:
            return
        room.release()
        del self.live[room]
        self.give_back(held)
        self.ended += 1
        report(**line)

    def succeeded(self, held):
        plan, line = held.plan, held.line
        page_bytes = self.head["page_bytes"] * self.head["tensors"]
        line.update(status="Success", reason="success", bytes=(plan["pages"] - plan["cached"]) * page_bytes)
        line["mismatched"] = self.mismatched(held)
        try:
            line["bad_aux"] = held.room.aux() != self.content.aux(plan["room"])
        except EngineLost:
            line.update(no_aux=True, detail="the engine was lost before the aux record was taken")
        self.bytes += line["bytes"] - line["mismatched"] * page_bytes
        held.free_at = time.monotonic() + plan["hold_us"] / 1e6
        self.after(plan["hold_us"] / 1e6, lambda: self.look(held) if held.room in self.live else None)

    def done(self):
        return not (self.turns or self.live or self.refused or self.orders and not self.orders.ended)

    def run(self):
        """All rooms. Raises what ends the worker early."""
        told = 0.0
        while not self.done():
            if self.client.lost is not None:
                self.reconnect()
            if self.stopped:
                raise Stopped(f"told to stop when {self.ended} of {self.count} rooms had ended")
            now = time.monotonic()
            if self.orders:
                self.take_orders()
            while self.turns and len(self.live) < MAX_LIVE and self.client.lost is None:
                due, plan, attempt = self.turns[0]
                if due > now:
                    break
                held = self.admit(plan, attempt)
                if held is None:
                    break
                self.turns.popleft()
                self.open(held)
                self.moved = now
            while self.timers and self.timers[0][0] <= now:
                heapq.heappop(self.timers)[2]()
            for room in self.client.changes():
                held = self.live.get(room)
                if held is not None:
                    self.look(held)
                    self.moved = now
            if now - told > PROGRESS:
                told = now
                self.progress()
                if now - self.moved > WAITING and self.live and not self.waiting:
                    self.waiting = True
                    report(t="waiting", detail=f"{len(self.live)} rooms are open and nothing happened in them for "
                                               f"{WAITING:g} s: waiting for the prefill worker or an engine. The "
                                               f"engine's clocks end them; without a change this worker gives up "
                                               f"after {self.quiet:g} s (--quiet)")
                if now - self.moved > self.quiet:
                    raise TimeoutError(f"nothing happened in any room for {self.quiet:g} s; "
                                       f"{self.ended} of {self.count} rooms had ended")
            wake = now + PROGRESS / 4
            if self.timers:
                wake = min(wake, self.timers[0][0])
            if self.turns and len(self.live) < MAX_LIVE:
                wake = min(wake, max(self.turns[0][0], now + 0.002))
            self.sleep(max(0.0, wake - time.monotonic()))

    def sleep(self, seconds):
        """Until a room changes or an order comes, at most so long."""
        if self.orders is None or self.orders.ended:
            self.client.wait(seconds)
            return
        poller = select.poll()
        event = self.client.fileno()
        poller.register(event, select.POLLIN)
        poller.register(0, select.POLLIN)
        if any(fd == event for fd, _ in poller.poll(seconds * 1000)):
            try:
                os.read(event, 8)
            except BlockingIOError:
                pass

    def progress(self):
        report(t="progress", done=self.ended, bytes=self.bytes, written=self.pages.written)

    def reconnect(self):
        """The engine is lost: its rooms end, and the next engine gets the same memory."""
        why = self.lost_engine(self.client.lost)
        report(t="lost", detail=f"{why}; waiting for the next one")
        end = time.monotonic() + REDIAL
        self.settle()
        if self.live:
            raise why
        while True:
            try:
                self.client = self.client.redial(REDIAL_STEP)
                break
            except TerminusError as e:
                if time.monotonic() >= end:
                    raise Stopped(f"{why}; no engine took this worker within {REDIAL:g} s: {e}") from e
            if self.stopped:
                raise why
            self.progress()
        self.moved = time.monotonic()
        report(t="back", detail="connected to the next engine, with the same memory")

    def lost_engine(self, why):
        return Stopped(f"this worker lost its engine when {self.ended} of {self.count} rooms had ended: {why}")

    def settle(self):
        """The engine is lost, or this worker was told to stop: sees the open rooms to their end."""
        lost, end = self.client.lost, time.monotonic() + (ABORT if self.client.lost is None else PROOF)
        for held in list(self.live.values()):
            held.free_at = 0.0
            if lost is None:
                self.abort(held)
        while True:
            for held in list(self.live.values()):
                self.look(held)
                held.free_at = 0.0
            if lost is None and self.client.lost is not None:
                lost, end = self.client.lost, time.monotonic() + PROOF
            left = end - time.monotonic()
            if not self.live or left <= 0:
                return
            self.client.wait(min(left, 0.05))  # what becomes reusable after a loss is not announced

    def finish(self, error):
        for held in self.refused:
            self.give_back(held)
            report(**held.line, detail="the engine did not take it until the worker stopped")
        for held in self.live.values():  # given up: their pages are not given back, and count as leaked
            if held.status is None:
                held.line["status"] = STATUS.get(held.room.poll(), "")
            elif not held.room.reusable:
                held.line["detail"] = "its pages were not reusable in time"
            report(**held.line)
        self.progress()
        try:
            self.cache.shrink(self.pages.total + 1)
        except AssertionError as e:
            error = error or str(e)
        written, leaked = self.pages.finish()
        end = {"t": "end", "written": written, "leaked": leaked, "pages": self.listed, "runs": self.runs}
        if error:
            end["error"] = error
        report(**end)


def dial(args, layout):
    """A client. The engine may not have noticed yet that the worker before this one is dead, and refuses a second
    process of one rank."""
    until = time.monotonic() + DIAL
    while True:
        try:
            return Client(args.socket, args.group, "destination", layout=layout, slots=2 * MAX_LIVE)
        except Refused as e:
            if e.field != "rank" or time.monotonic() > until:
                raise
        time.sleep(OPEN_PAUSE)


def main():
    args = argparse.ArgumentParser(description="The demo's decode worker.")
    args.add_argument("--socket", required=True)
    args.add_argument("--schedule", required=True)
    args.add_argument("--orders", action="store_true")
    args.add_argument("--group", default="decode")
    args.add_argument("--peer-group", default="prefill")
    args.add_argument("--quiet", type=float, default=60.0)
    args = args.parse_args()
    with open(args.schedule, encoding="utf-8") as f:
        head = json.loads(f.readline())
        if head["version"] != 1:
            raise SystemExit(f"schedule version {head['version']}; this program reads 1")
        rooms = [json.loads(line) for line in f]
    page_bytes, tokens = head["page_bytes"], head["page_tokens"]
    layout = Layout(dtype="bf16", layers=head["tensors"] // 2, kv_heads=1, head_dim=page_bytes // tokens // 2,
                    page_tokens=tokens)
    client = dial(args, layout)
    worker = error = None
    try:
        # A little more memory than the pool: its last bytes are the client's, for a proof when the engine is another.
        region = client.create_region(head["pool_pages"] * page_bytes * head["tensors"] + 4096)
        tensors = [Tensor(region, t * head["pool_pages"] * page_bytes, page_bytes, page_bytes, t // 2)
                   for t in range(head["tensors"])]
        pool = client.add_pool(head["pool_pages"], tensors)
        orders = Orders() if args.orders else None
        worker = Worker(client, pool, region.buf, head, rooms, args.peer_group, args.quiet, orders)
        report(t="ready", language="python")
        signal.signal(signal.SIGTERM, worker.stop)
        try:
            try:
                worker.run()
            except (Stopped, EngineLost) as e:
                error = str(e)
                worker.settle()
        except (TerminusError, TimeoutError, AssertionError, KeyError, ValueError) as e:
            error = f"{type(e).__name__}: {e}"
        worker.finish(error)
    finally:
        (worker.client if worker else client).close()
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
