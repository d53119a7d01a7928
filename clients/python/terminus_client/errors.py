"""Exceptions. Each has a code of docs/worker-api.md (or one of the client's own), a field, a rule and a sentence."""
from __future__ import annotations

from typing import Dict, Type


class TerminusError(Exception):
    """Base of all errors of this package. `field` and `rule` are empty where none applies."""

    code = "error"

    def __init__(self, message: str, *, code: str = "", field: str = "", rule: str = "") -> None:
        super().__init__(message)
        self.code = code or type(self).code
        self.field = field
        self.rule = rule
        self.message = message

    def __str__(self) -> str:
        where = f" {self.field}:" if self.field else ""
        why = f" ({self.rule})" if self.rule else ""
        return f"{self.code}:{where} {self.message}{why}"


class BadFrame(TerminusError):
    """The engine could not parse a message of ours; it closes the connection."""

    code = "bad_frame"


class BadField(TerminusError):
    """A field of a request has a value that is not allowed."""

    code = "bad_field"


class BadState(TerminusError):
    """The request does not fit the state of the session or the room."""

    code = "bad_state"


class BadMemory(TerminusError):
    """The memory cannot be shared: wrong kind, not sealed, or a private mapping."""

    code = "bad_memory"


class BadDescriptor(TerminusError):
    """A file descriptor is missing or of the wrong kind."""

    code = "bad_fd"


class NotReusable(TerminusError):
    """Somebody may still touch the room's pages."""

    code = "not_reusable"


class Refused(TerminusError):
    """The engine does not do this, or not for this pair of groups."""

    code = "refused"


class LimitExceeded(TerminusError):
    """A limit that the message names was reached."""

    code = "limit"


class NoBackend(TerminusError):
    """No transfer backend can serve the request."""

    code = "no_backend"


class Draining(TerminusError):
    """The engine is draining and takes no new rooms."""

    code = "draining"


class ConnectFailed(TerminusError, ConnectionError):
    """No engine answers at the socket."""

    code = "connect_failed"


class EngineLost(TerminusError, ConnectionError):
    """The session is over: the engine is gone, the connection broke, or the client was closed."""

    code = "engine_lost"


class ProtocolError(TerminusError):
    """The engine sent something that docs/worker-api.md does not allow. The client gives the session up."""

    code = "protocol"


class RequestTimeout(TerminusError, TimeoutError):
    """The engine did not answer in time. The request may still take effect."""

    code = "timeout"


_BY_CODE: Dict[str, Type[TerminusError]] = {
    c.code: c
    for c in (BadFrame, BadField, BadState, BadMemory, BadDescriptor, NotReusable, Refused, LimitExceeded, NoBackend,
              Draining)
}


def from_answer(code: str, field: str, rule: str, message: str) -> TerminusError:
    """The exception for an error answer; an unknown code gives the base class."""
    return _BY_CODE.get(code, TerminusError)(message, code=code, field=field, rule=rule)
