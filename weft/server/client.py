"""The client that sent a request, as the authentication middleware identified it.

Owns: how clients are kept apart in the prefix cache. Does not know: keys themselves.
"""

import hashlib
import re
from dataclasses import dataclass

from weft.errors import RequestError

_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The client's span (W3C Trace Context), with ids in hexadecimal. Bit 0 of ``flags`` is set if it is sampled."""

    trace_id: str
    span_id: str
    flags: int


@dataclass(frozen=True, slots=True)
class Client:
    """Attributes:
    identity: a text per API key, from which the key cannot be found; None: the server has no keys.
    is_admin: the admin key was presented.
    trace: the span that this request belongs to, from the ``traceparent`` header.
    connection: the other end's address.
    """

    identity: str | None = None
    is_admin: bool = False
    trace: TraceParent | None = None
    connection: str = ""

    @property
    def queue(self) -> str:
        """The queue of the client's calls when calls have to wait: one per key, or without keys one per connection."""
        return self.identity or self.connection

    @property
    def trace_id(self) -> str | None:
        return None if self.trace is None else self.trace.trace_id

    def cache_salt(self, given: str | None) -> str | None:
        """Clients with different keys share no cached prefixes, nor do calls of one key with different salts. Raises
        RequestError for an empty one, which could be taken for none."""
        if given == "":
            message = "cache_salt='' is not a non-empty text; leave it out to share cached prefixes"
            raise RequestError(message, "cache_salt")
        if self.identity is None:
            return given
        return self.identity if given is None else f"{self.identity}:{given}"


def identity_of(key: bytes) -> str:
    return hashlib.blake2b(key, digest_size=16, person=b"weft cache salt").hexdigest()


def read_traceparent(header: bytes | None) -> TraceParent | None:
    """The client's span, or None if the header is absent or malformed."""
    match = _TRACEPARENT.fullmatch(header) if header is not None else None
    if match is None:
        return None
    trace_id, span_id, flags = (part.decode() for part in match.groups())
    return TraceParent(trace_id, span_id, int(flags, 16))
