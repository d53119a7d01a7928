"""Threads that do the calls of the backend beside the loop."""

from __future__ import annotations

import collections
import threading
import time
from typing import Any, Callable


class Crew:
    """At most `limit` threads, started when there is work for them, that call work(item) in the order of
    put. work does not raise."""

    def __init__(self, name: str, limit: int, work: Callable[[Any], None]):
        self._name, self._limit, self._work = name, limit, work
        self._changed = threading.Condition()
        self._items: "collections.deque[Any]" = collections.deque()
        self._threads = 0
        self._idle = 0
        self._closed = False

    def put(self, item: Any) -> None:
        """Queue an item. After close it is dropped."""
        with self._changed:
            if self._closed:
                return
            self._items.append(item)
            if len(self._items) <= self._idle:
                self._changed.notify()
            elif self._threads < self._limit:
                self._threads += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def remove(self, item: Any) -> None:
        """Drop an item that no thread has taken yet."""
        with self._changed:
            try:
                self._items.remove(item)
            except ValueError:
                pass

    def __len__(self) -> int:
        """Items that wait."""
        return len(self._items)

    def close(self, deadline: float) -> bool:
        """Drop what waits and wait for what runs until the deadline (time.monotonic). False when a thread
        still runs then."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._threads == 0, max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._items:
                    if self._closed:
                        self._threads -= 1
                        self._changed.notify_all()
                        return
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                item = self._items.popleft()
            self._work(item)
