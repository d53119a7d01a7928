"""What polling costs: ns a poll() and µs a pass over 1,024 rooms, against one dict read a room (what a status table in
the process itself would cost). Serves its own page; needs no engine.  usage: python3 bench_poll.py [ROOMS]"""
import os
import shutil
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(HERE, "tests")]

from fake_engine import FakeEngine  # noqa: E402
from terminus_client import Client, Layout  # noqa: E402


def best(f, rounds=400, slice_ns=200000):
    """The least time of one loop, in ns, less that of an empty one: of many slices, each too short to be disturbed
    on a machine that others use too."""
    def least(g):
        t = time.perf_counter_ns()
        g(1)
        loops = max(1, slice_ns // max(time.perf_counter_ns() - t, 30))
        out = float("inf")
        for _ in range(rounds):
            t = time.perf_counter_ns()
            g(loops)
            out = min(out, (time.perf_counter_ns() - t) / loops)
        return out

    def empty(n):
        for _ in range(n):
            pass
    return max(least(f) - least(empty), 0.0)


class Table:
    """The baseline: statuses in a dict, behind a method."""

    def __init__(self, status):
        self.status = status

    def check(self, room):
        return self.status[room]


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    directory = tempfile.mkdtemp(prefix="t")
    engine = FakeEngine(os.path.join(directory, "w"))
    with Client(engine.path, "bench", "source", layout=Layout("bfloat16", 1, 1, 64, 16), slots=count) as client:
        rooms = [client.open(i, wait=False) for i in range(count)]
        for room in rooms:
            room.failure()
        table = Table({room.id: 3 for room in rooms})
        status, page, one = table.status, engine.session.page, rooms[0]
        few = max(count // 100, 1)
        client.changes()

        def dict_read(n):
            for _ in range(n):
                status[5]

        def dict_method(n):
            for _ in range(n):
                table.check(5)

        def poll(n):
            for _ in range(n):
                one.poll()

        def pass_dict(n):
            for _ in range(n):
                [status[room.id] for room in rooms]

        def pass_dict_method(n):
            for _ in range(n):
                [table.check(room.id) for room in rooms]

        def pass_poll(n):
            for _ in range(n):
                [room.poll() for room in rooms]

        def pass_all(n):
            for _ in range(n):
                client.poll_all()

        def pass_unchanged(n):
            for _ in range(n):
                client.changes()

        def pass_changed(n):
            for _ in range(n):
                client._cursor = page.view[4] - few
                client.changes()

        print(f"one room, ns: dict read {best(dict_read):.0f}, dict read in a method "
              f"{best(dict_method):.0f}, Room.poll {best(poll):.0f}")
        for room in rooms[:few]:
            page.set(room.slot, 3, 1)
        print(f"a pass over {count} rooms, us:")
        for name, f in (("dict read of each", pass_dict), ("dict read in a method of each", pass_dict_method),
                        ("Room.poll of each", pass_poll), ("Client.poll_all", pass_all),
                        ("Client.changes, nothing changed", pass_unchanged),
                        (f"Client.changes, {few} changed", pass_changed)):
            print(f"  {name:33s}{best(f) / 1000:8.2f}")
    engine.close()
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
