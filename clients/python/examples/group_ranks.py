"""Tensor-parallel ranks that act on one verdict in one tick: a prefill and a decode group, each rank a process.

    python3 clients/python/examples/group_ranks.py PREFILL_SOCKET DECODE_SOCKET

A socket is the worker socket of an engine; several, joined by commas, are given to the ranks in turn. Every tick,
rank 0 broadcasts the new requests and its `poll_group()` list, all ranks `apply_group` the list, and all run one
batch together, as a forward pass does: here they compare what they are about to run. With --each-polls every rank
reads its own rooms instead. Then a verdict that falls between the looks of two ranks gives them different batches,
which in a server is a collective that never ends; here it is an error, exit code 1.
"""
from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.connection
import os
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from terminus_client import Client, GroupChange, KVPoll, Layout, Tensor  # noqa: E402

PAGE = 4096  # bytes: K and V of 16 tokens, one head a rank, 64 elements of 2 bytes
LAYERS = 2
PAGES = 2  # of a request
DECODE_TICKS = 3
BOUND = 120.0  # seconds for everything


class Diverged(Exception):
    """The ranks were about to run different batches."""


class Ranks:
    """How the ranks of one group talk: rank 0 has a pipe to every other. In a server this is its broadcast of
    requests and its collectives."""

    def __init__(self, rank, pipes):
        self.rank, self.pipes = rank, pipes

    @staticmethod
    def receive(pipe):
        if not pipe.poll(BOUND):
            raise TimeoutError("another rank says nothing")
        return pipe.recv()

    def broadcast(self, value=None):
        """What rank 0 gives, on every rank."""
        if self.rank > 0:
            return self.receive(self.pipes[0])
        for pipe in self.pipes:
            pipe.send(value)
        return value

    def forward(self, tick, batch):
        """One step of the model. All ranks must run the same batch."""
        if self.rank > 0:
            self.pipes[0].send(batch)
            error = self.receive(self.pipes[0])
        else:
            error = None
            for other, pipe in enumerate(self.pipes, 1):
                theirs = self.receive(pipe)
                if theirs != batch and error is None:
                    error = f"tick {tick}: rank 0 runs {batch}, rank {other} runs {theirs}"
            self.broadcast(error)
        if error is not None:
            raise Diverged(error)


class Worker:
    """One rank of one side."""

    def __init__(self, arguments, side, rank, socket, pipes):
        self.arguments, self.side, self.rank = arguments, side, rank
        self.ranks = Ranks(rank, pipes)
        self.client = Client(socket, f"{side}-{arguments.tag}", "source" if side == "prefill" else "destination", rank,
                             arguments.ranks, Layout("bfloat16", LAYERS, arguments.ranks, 64, 16),
                             group_list=not arguments.each_polls)
        pages = PAGES * arguments.requests
        self.region = self.client.create_region(LAYERS * pages * PAGE)
        self.pool = self.client.add_pool(pages, [Tensor(self.region, k * pages * PAGE, PAGE, PAGE, k)
                                                 for k in range(LAYERS)])
        self.base = arguments.tag << 20  # a room is used once: other runs have other numbers
        self.rooms = {}  # by number of the request, not ended
        self.ended = {}  # verdicts, by number
        self.over = []  # rooms to be released
        self.decoding = {}  # ticks to go, by number

    def run(self):
        """Ticks until every request has ended, and been decoded. Returns a sentence."""
        requests, tick = self.arguments.requests, 0
        while len(self.ended) < requests or self.decoding:
            message = None
            if self.rank == 0:
                new = range(2 * tick, min(2 * tick + 2, requests))
                message = list(new), [] if self.arguments.each_polls else self.client.poll_group()
            new, items = self.ranks.broadcast(message)
            time.sleep(self.rank * self.arguments.skew)  # ranks are never at the same point
            changes = self.own_rooms() if self.arguments.each_polls else self.client.apply_group(items)
            finished = self.act(changes)
            self.admit(new)
            self.ranks.forward(tick, finished if self.side == "prefill" else sorted(self.decoding))
            self.decode()
            tick += 1
        for room in self.over:
            if not room.wait_reusable(BOUND):
                raise TimeoutError(f"the pages of room {room.id} are not reusable: {room.failure()}")
            room.release()
        good = list(self.ended.values()).count(KVPoll.Success)
        return (f"{requests} requests, {good} Success, {requests - good} Failed, "
                f"{tick} ticks with the same batch on every rank")

    def admit(self, new):
        """Opens the rooms of new requests. This happens on all ranks in one tick."""
        for number in new:
            pages = self.pages(number)
            if self.side == "prefill":
                for page in pages:
                    for k in range(LAYERS):
                        self.page(k, page)[:] = bytes([(number * 7 + page + self.rank) % 251 + 1]) * PAGE
                room = self.client.open(self.base + number)
                room.send([(self.pool, pages)], last=True)
            else:
                room = self.client.open(self.base + number, f"prefill-{self.arguments.tag}")
                if number % 7 == 3 and self.rank == self.arguments.ranks - 1:
                    room.abort(wait=False)  # something is wrong on this rank only: the list tells the others
                else:
                    room.register([(self.pool, pages)])
            self.rooms[number] = room

    def own_rooms(self):
        """What apply_group returns, from this rank's own rooms."""
        return [GroupChange(r.id, 0, r.poll(), "", r) for r in self.rooms.values() if KVPoll.terminal(r.poll())]

    def act(self, changes):
        """Takes the verdicts of this tick; returns the rooms that have ended."""
        finished = []
        for change in changes:
            if not KVPoll.terminal(change.status):
                continue
            number = change.room - self.base
            room = self.rooms.pop(number)
            finished.append(number)
            self.ended[number] = change.status
            if self.side == "decode" and change.status == KVPoll.Success:
                self.check(number)
                self.decoding[number] = DECODE_TICKS
            self.over.append(room)  # its pages are not used again here, so they are given back at the end
        return sorted(finished)

    def decode(self):
        for number in list(self.decoding):
            self.decoding[number] -= 1
            if self.decoding[number] == 0:
                del self.decoding[number]
        time.sleep(0.002)

    def pages(self, number):
        return list(range(PAGES * number, PAGES * number + PAGES))

    def page(self, layer, page):
        at = (layer * PAGES * self.arguments.requests + page) * PAGE
        return self.region.buf[at:at + PAGE]

    def check(self, number):
        for page in self.pages(number):
            for k in range(LAYERS):
                want = (number * 7 + page + self.rank) % 251 + 1
                if self.page(k, page) != bytes([want]) * PAGE:
                    raise ValueError(f"request {number}: page {page} of layer {k} does not hold what was sent")


def work(arguments, side, rank, socket, pipes, result):
    """The process of one rank."""
    try:
        worker = Worker(arguments, side, rank, socket, pipes)
        with worker.client:
            result.send((0, worker.run()))
    except Exception as e:
        result.send((1 if isinstance(e, Diverged) else 2, f"{type(e).__name__}: {e}"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prefill", help="worker sockets of the prefill engines")
    parser.add_argument("decode", help="worker sockets of the decode engines")
    parser.add_argument("--ranks", type=int, default=2, help="of each group (default 2)")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--skew", type=float, default=0.005,
                        help="seconds by which each rank is behind the one before (default 0.005)")
    parser.add_argument("--each-polls", action="store_true", help="every rank reads its own rooms")
    arguments = parser.parse_args()
    arguments.tag = os.getpid()  # names the groups
    context = multiprocessing.get_context("spawn")
    processes, results = [], {}
    for side, sockets in (("prefill", arguments.prefill.split(",")), ("decode", arguments.decode.split(","))):
        pipes = [context.Pipe() for _ in range(1, arguments.ranks)]
        for rank in range(arguments.ranks):
            mine = [a for a, _ in pipes] if rank == 0 else [pipes[rank - 1][1]]
            ours, theirs = context.Pipe(duplex=False)
            socket = sockets[rank % len(sockets)]
            process = context.Process(target=work, args=(arguments, side, rank, socket, mine, theirs))
            process.start()
            theirs.close()
            processes.append(process)
            results[ours] = side, rank
        for pair in pipes:
            pair[0].close()
            pair[1].close()
    worst, deadline = 0, time.monotonic() + BOUND
    while results and not worst:
        ready = multiprocessing.connection.wait(results, max(deadline - time.monotonic(), 0))
        if not ready:
            worst = report(2, *next(iter(results.values())), "says nothing")
        for result in ready:
            try:
                code, said = result.recv()
            except EOFError:
                code, said = 2, "ended without a word"
            worst = worst or report(code, *results.pop(result), said)
    for process in processes:
        if worst:
            process.terminate()
        process.join()
    return worst


def report(code, side, rank, said):
    if code or rank == 0:
        print(f"{side} rank {rank}: {said}", file=sys.stderr if code else sys.stdout, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
