"""Texts that go into events."""

from __future__ import annotations

MAX_DETAIL = 256


def cut(text: str, n: int = MAX_DETAIL) -> str:
    """Shorten text to at most n bytes of valid UTF-8."""
    encoded = text.encode("utf-8", "replace")
    if len(encoded) <= n:
        return encoded.decode()
    return encoded[:n].decode("utf-8", "ignore")
