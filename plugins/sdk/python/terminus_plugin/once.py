"""A thing that happens once, to be waited for together with another."""

from __future__ import annotations

import threading
from typing import Callable


class Once:
    """Happens once; then calls who asked."""

    def __init__(self) -> None:
        self._mu = threading.Lock()
        self._happened = False
        self._calls: "list[Callable[[], None]]" = []

    def __bool__(self) -> bool:
        return self._happened

    def set(self) -> None:
        """Let it happen."""
        with self._mu:
            self._happened, calls, self._calls = True, self._calls, []
        for call in calls:
            call()

    def then(self, call: "Callable[[], None]") -> None:
        """Call when it happens, or now. call must not block."""
        with self._mu:
            if not self._happened:
                self._calls.append(call)
                return
        call()

    def wait(self, timeout: float) -> bool:
        """Wait at most timeout seconds; whether it happened."""
        return wait_any(timeout, self) or self._happened


def wait_any(timeout: float, *many: Once) -> bool:
    """Wait until one of many has happened, at most timeout seconds; whether one has."""
    if any(many):
        return True
    event = threading.Event()
    for once in many:
        once.then(event.set)
    return event.wait(timeout)
