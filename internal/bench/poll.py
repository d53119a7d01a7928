"""The Python side of `engine bench poll`: what polling costs a scheduler that uses terminus_client.

usage: poll.py SOCKET ROOMS CHANGED SECONDS CHURN

Asks on standard output, one byte each: "c" change CHANGED rooms (answered by one byte on standard input when it is
done), "b" change them again and again, "e" stop that (both answered as well). At the end one line of JSON follows."""
import array
import ctypes
import gc
import json
import os
import resource
import signal
import sys
import time
import warnings

from terminus_client import Client, Layout

clock = time.perf_counter_ns
QUIET = 0.01  # the quantile of samples that neighbours on the machine did not disturb


def ask(what):
    os.write(1, what)
    if not os.read(0, 1):
        sys.exit("the benchmark is gone")


def quantile(samples, q):
    samples = sorted(samples)
    return samples[int(q * (len(samples) - 1))]


def passes(few, seconds, work):
    """Times work once after every change: nanoseconds of each. It is the first thing that the scheduler does after it
    slept in a read, so little of what it needs is in a cache."""
    out = array.array("q")
    end = clock() + int(seconds * 1e9)
    while clock() < end or not out:
        ask(b"c")
        began = clock()
        seen = work()
        out.append(clock() - began)
        if seen != few:
            sys.exit(f"a pass saw {seen} changes, want {few}")
    return out


def slices(work, seconds):
    """Runs work(n) in slices of some 100 µs: nanoseconds of one turn in each, its loop included."""
    out = array.array("d")
    loops = 1
    while True:
        began = clock()
        work(loops)
        took = clock() - began
        if took > 100_000 or loops >= 1 << 20:
            break
        loops *= 2
    end = clock() + int(seconds * 1e9)
    while clock() < end or not out:
        began = clock()
        work(loops)
        out.append((clock() - began) / loops)
    return out


EXIT_GROUP = {"x86_64": 231, "aarch64": 94}
KILL, ALLOW = 0x80000000, 0x7FFF0000
CLEAN, UNCHANGED, NO_FILTER = 7, 8, 9


class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte), ("k", ctypes.c_uint)]


class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.POINTER(Filter))]


def forbid_system_calls(exit_group):
    """From here on any system call but exit_group kills this process with SIGSYS. False where that is refused."""
    program = (Filter * 4)(Filter(0x20, 0, 0, 0), Filter(0x15, 1, 0, exit_group), Filter(0x06, 0, 0, KILL),
                           Filter(0x06, 0, 0, ALLOW))
    libc = ctypes.PyDLL(None)
    none = ctypes.c_ulong(0)
    if libc.prctl(38, ctypes.c_ulong(1), none, none, none) != 0:  # PR_SET_NO_NEW_PRIVS
        return False
    return libc.prctl(22, ctypes.c_ulong(2), ctypes.byref(Program(4, program)), none, none) == 0  # PR_SET_SECCOMP


def apart(client, body):
    """Runs body in a copy of this process and returns how that ended: an exit code, or minus a signal."""
    with client._ring_lock, client._lock:  # no other thread holds them in the copy
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are other threads
            pid = os.fork()
    if pid == 0:
        code = NO_FILTER
        try:
            gc.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = body()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def system_calls(client, rooms, churn):
    """How many polls ran where a system call is death, and whether one was made. Polls: 0 when it could not be
    checked, with the reason."""
    exit_group = EXIT_GROUP.get(os.uname().machine)
    if exit_group is None:
        return 0, False, f"no filter for {os.uname().machine}"

    def work(least, most):
        found = 0
        for i in range(most):
            for room in client.changes():
                room.poll()
                found += 1
            rooms[i % len(rooms)].poll()
            if found >= least:
                break
        client.poll_all()
        return found

    def polls():
        work(0, 100)  # what is done for the first time
        if not forbid_system_calls(exit_group):
            return NO_FILTER
        return CLEAN if work(churn, 20_000_000) >= churn else UNCHANGED

    def control():  # the same with a system call
        if not forbid_system_calls(exit_group):
            return NO_FILTER
        os.getppid()
        return CLEAN

    end = apart(client, control)
    if end == NO_FILTER:
        return 0, False, "the kernel refuses a seccomp filter"
    if end != -signal.SIGSYS:
        return 0, False, f"a system call was not noticed (control ended with {end})"
    ask(b"b")
    end = apart(client, polls)
    ask(b"e")
    if end == -signal.SIGSYS:
        return churn, True, ""
    if end != CLEAN:
        return 0, False, f"the copy of the process ended with {end}"
    return churn, False, ""


def main():
    socket, count, few, seconds, churn = (sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]),
                                          int(sys.argv[5]))
    with Client(socket, "bench", "source", layout=Layout("bfloat16", 1, 1, 64, 16), slots=count) as client:
        with client.batch():
            rooms = [client.open(i + 1, wait=False) for i in range(count)]
        for room in rooms:
            room.failure()  # its open is answered
        client.changes()
        status = {room.id: room.poll() for room in rooms}
        one, key = rooms[count // 2], rooms[count // 2].id

        def poll(n):
            for _ in range(n):
                one.poll()

        def read(n):
            for _ in range(n):
                status[key]

        def pass_changed():
            changed = client.changes()
            for room in changed:
                room.poll()
            return len(changed)

        def pass_dict():
            for room in rooms:
                status[room.id]
            return few

        def pass_idle(n):
            for _ in range(n):
                for room in client.changes():
                    room.poll()

        def pass_poll(n):
            for _ in range(n):
                for room in rooms:
                    room.poll()

        def pass_all(n):
            for _ in range(n):
                client.poll_all()

        taken, loops = array.array("q"), array.array("q")
        for _ in range(10):  # in turn, so that both see the same machine
            taken += passes(few, seconds / 10, pass_changed)
            loops += passes(few, seconds / 10, pass_dict)
            client.changes()
        report = {"pass": quantile(taken, QUIET), "pass_p50": quantile(taken, 0.5), "passes": len(taken),
                  "dict": quantile(loops, QUIET), "dict_p50": quantile(loops, 0.5)}
        for name, work in (("poll", poll), ("read", read), ("idle", pass_idle), ("each", pass_poll),
                           ("all", pass_all)):
            report[name] = quantile(slices(work, seconds / 4), QUIET)
        report["checked"], report["made"], report["unchecked"] = system_calls(client, rooms, churn)
        report["python"] = sys.version.split()[0]
    os.write(1, json.dumps(report).encode() + b"\n")


if __name__ == "__main__":
    main()
