"""Puts the package on the path, and polls for conditions: this machine's clock proves nothing."""
import os
import sys
import threading
import time
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)


def descriptors():
    """Open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def start(target):
    """A thread that runs target."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


class Case(unittest.TestCase):
    def eventually(self, condition, seconds=20.0):
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                self.fail("the condition never held")
            time.sleep(0.002)
