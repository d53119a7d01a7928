"""Framing of docs/worker-api.md: two little-endian u32 lengths, a JSON header, a payload."""
from __future__ import annotations

import array
import json
import operator
import struct
from typing import Any, Dict, Iterator, Sequence, Tuple, Union

from .errors import BadField, LimitExceeded, ProtocolError

MAX_HEADER = 65536
MAX_PAYLOAD = 8 << 20
MAX_AUX = 1 << 20

Buffer = Union[bytes, bytearray, memoryview]
PageIds = Any  # a buffer of int32, or a sequence of int

_lengths = struct.Struct("<II")
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_decode = json.JSONDecoder(parse_constant=_no_constant).decode


def fields(header: Dict[str, Any]) -> str:
    """A header as JSON text without its closing brace: where more fields can follow."""
    return _encode(header)[:-1]


def index(value: Any, field: str) -> int:
    """An integer of any library as an int. Raises BadField for anything else."""
    try:
        return operator.index(value)
    except TypeError as e:
        raise BadField(f"{value!r} is not an integer", field=field) from e


def quote(value: str) -> str:
    """A string as JSON text."""
    return _encode(value)


def encode(header: str, payload: Sequence[Buffer] = ()) -> bytes:
    """One message of a header in JSON text. Raises LimitExceeded when it is longer than a message may be."""
    head = header.encode()
    size = sum(len(p) for p in payload)
    if len(head) > MAX_HEADER:
        raise LimitExceeded(f"the header has {len(head)} bytes, at most {MAX_HEADER} fit; use fewer parts",
                            field="header")
    if size > MAX_PAYLOAD:
        raise LimitExceeded(f"page ids and aux have {size} bytes, at most {MAX_PAYLOAD} fit; send several chunks",
                            field="payload")
    return b"".join((_lengths.pack(len(head), size), head, *payload))


def page_ids(pages: PageIds, field: str = "pages") -> memoryview:
    """The ids as contiguous bytes, int32 little-endian; a buffer is not copied where it is contiguous."""
    if isinstance(pages, (list, tuple, range)):
        try:
            return memoryview(array.array("i", pages)).cast("B")
        except (TypeError, OverflowError) as e:
            raise BadField(f"page ids must be integers of 32 bits: {e}", field=field) from e
    try:
        view = memoryview(pages)
    except TypeError as e:
        raise BadField(f"page ids must be a buffer of int32 or a list, not {type(pages).__name__}", field=field) from e
    if view.itemsize != 4 or view.format.lstrip("@=<") not in ("i", "l"):
        raise BadField(f"page ids have the format {view.format!r} of {view.itemsize} bytes, want int32", field=field)
    if view.nbytes == 0:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


class Decoder:
    """Cuts a byte stream into messages. Holds at most one message and one read."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Tuple[Dict[str, Any], bytes]]:
        """Yields every message that data completes. Raises ProtocolError; the stream is of no use after that."""
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= 8:
                head, size = _lengths.unpack_from(buffer, at)
                if not 2 <= head <= MAX_HEADER or size > MAX_PAYLOAD:
                    raise ProtocolError(f"a message claims a header of {head} and a payload of {size} bytes")
                end = at + 8 + head + size
                if len(buffer) < end:
                    break
                header = _parse(bytes(buffer[at + 8:at + 8 + head]))
                payload = bytes(buffer[at + 8 + head:end])
                at = end
                yield header, payload
        finally:
            del buffer[:at]


def _parse(raw: bytes) -> Dict[str, Any]:
    try:
        header = _decode(raw.decode())
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"a header is not JSON: {e}") from e
    if not isinstance(header, dict):
        raise ProtocolError("a header is not a JSON object")
    return header


def integer(header: Dict[str, Any], name: str, low: int = 0, high: int = (1 << 63) - 1) -> int:
    """An integer field of an answer, within [low, high]."""
    value = header.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"the answer's {name} is {value!r}", field=name)
    return value


def text(header: Dict[str, Any], name: str) -> str:
    """A string field of an answer; absent is empty."""
    value = header.get(name, "")
    if not isinstance(value, str):
        raise ProtocolError(f"the answer's {name} is {value!r}", field=name)
    return value
