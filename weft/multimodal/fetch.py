"""Download of media over HTTP, from hosts that the operator allowed and from no others.

Job: download one URL within limits on bytes, seconds and redirects. Owns: the rules for hosts and addresses. Does not
know: images.

Each hop is checked alike: the scheme, the host and port against the allowed ones, then every address that the name
resolves to. The connection goes to a checked address, so a name that resolves differently a moment later gains nothing.
Proxies of the environment are not used.
"""

import contextlib
import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from weft.errors import RequestError

MAX_REDIRECTS = 3

_PORTS = {"http": 80, "https": 443}
_REDIRECTS = (301, 302, 303, 307, 308)
_CHUNK = 1 << 16
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_REMEDY = "send it as a data: URI"

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class FetchPolicy:
    """The rules for downloads.

    Attributes:
        domains: host names, or ``name:port`` for a port other than the scheme's. A name that resolves to an address
            that is not public is refused. An address in the list may be private.
        max_bytes: upper bound on the size of a body.
        timeout_s: upper bound on the time of a download, redirects included.
    """

    domains: tuple[str, ...]
    max_bytes: int
    timeout_s: float


def fetch(url: str, policy: FetchPolicy, param: str) -> bytes:
    """Download the body at a URL. Blocks. ``param``: the request's field that errors blame.

    Raises:
        RequestError: the URL is not allowed, or gave no body within the limits.
    """
    deadline = time.monotonic() + policy.timeout_s
    for _ in range(MAX_REDIRECTS + 1):
        parts = _checked(url, policy.domains, param)
        try:
            answer = _get(parts, policy, deadline, param)
        except RequestError:
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:  # TimeoutError and ssl's are OSErrors
            if time.monotonic() >= deadline:
                raise _refusal(url, f"did not come within {policy.timeout_s:g} s", param) from error
            raise _refusal(url, f"could not be fetched ({type(error).__name__})", param) from error
        if isinstance(answer, bytes):
            return answer
        url = urljoin(url, answer)
    raise _refusal(url, f"is behind more than {MAX_REDIRECTS} redirects", param)


def _refusal(url: str, what: str, param: str) -> RequestError:
    return RequestError(f"{url[:200]!r} {what}; {_REMEDY}", param)


def _checked(url: str, domains: Sequence[str], param: str) -> SplitResult:
    """Split and check a URL. Raises RequestError if it is not allowed."""
    if not domains:
        raise _refusal(
            url, "is not fetched: this server fetches no media unless --allowed-media-domains names its host", param
        )
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _refusal(url, "is not a valid URL", param) from error
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise _refusal(url, "is not a valid URL (only printable ASCII characters, no spaces)", param)
    if parts.scheme not in _PORTS or not host or parts.username is not None or parts.password is not None:
        raise _refusal(url, "is not fetched: allowed are http:// and https:// URLs without a user name", param)
    if not _is_allowed(host, port, parts.scheme, domains):
        raise _refusal(
            url, f"is not fetched: --allowed-media-domains of this server names {', '.join(domains)} only", param
        )
    return parts


def _is_allowed(host: str, port: int | None, scheme: str, domains: Sequence[str]) -> bool:
    name = f"[{host}]" if ":" in host else host
    names = {name.lower()} if port is None or port == _PORTS[scheme] else set()
    names.add(f"{name.lower()}:{port or _PORTS[scheme]}")
    return any(domain.lower() in names for domain in domains)


def _addresses(host: str, port: int) -> Iterator[str]:
    """The checked addresses of a host. Raises OSError if the host is unknown, or an address is not public."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        pass
    else:  # an address in --allowed-media-domains needs no resolver
        yield host
        return
    found = list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
    for address in found:
        if not is_public(ipaddress.ip_address(address.partition("%")[0])):
            raise PrivateAddressError(host)
    yield from found


class PrivateAddressError(OSError):
    """A name resolves to an address of this machine or of a private network."""


def is_public(address: Address) -> bool:
    """Whether an address is on the public internet. An IPv6 address that stands for an IPv4 address counts as that."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast


def _get(parts: SplitResult, policy: FetchPolicy, deadline: float, param: str) -> bytes | str:
    """Return the body, or the new location. Raises RequestError, OSError, HTTPException."""
    url = parts.geturl()
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    assert parts.hostname is not None
    port = parts.port or _PORTS[parts.scheme]
    connection = _Connection(parts.hostname, port, is_tls=parts.scheme == "https", deadline=deadline)
    headers = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "weft"}
    with contextlib.closing(connection), connection.alarm:
        try:
            connection.request("GET", path, headers=headers)
        except PrivateAddressError as error:
            raise _refusal(
                url, "is not fetched: its host has an address that is not of the public internet", param
            ) from error
        response = connection.getresponse()
        if response.status in _REDIRECTS and response.getheader("Location"):
            return str(response.getheader("Location"))
        if response.status != 200:
            raise _refusal(url, f"gave HTTP status {response.status}", param)
        body = _body(response, url, policy.max_bytes, param)
        if time.monotonic() >= deadline:  # the body may be incomplete
            raise TimeoutError
        return body


def _body(response: http.client.HTTPResponse, url: str, limit: int, param: str) -> bytes:
    length = response.getheader("Content-Length") or ""
    chunks, size = [], int(length) if length.isdigit() and int(length) > limit else 0
    while size <= limit and (chunk := response.read(_CHUNK)):
        chunks.append(chunk)
        size += len(chunk)
    if size > limit:
        raise _refusal(url, f"is larger than the {limit:,} bytes that are read", param)
    return b"".join(chunks)


class _Connection(http.client.HTTPConnection):
    """Connects to a checked address. Every operation ends at ``deadline``, until ``alarm`` is closed."""

    def __init__(self, host: str, port: int, *, is_tls: bool, deadline: float) -> None:
        super().__init__(host, port)
        if is_tls:
            self.default_port = _PORTS["https"]  # the scheme's own port is left out of the Host header
        self._is_tls = is_tls
        self._deadline = deadline
        self.alarm = contextlib.ExitStack()

    def connect(self) -> None:
        for address in _addresses(self.host, self.port):
            try:
                self.sock = socket.create_connection((address, self.port), self._left())
                break
            except OSError as error:
                failure = error
        else:
            raise failure
        if self._is_tls:
            context = ssl.create_default_context()
            self.sock = context.wrap_socket(self.sock, server_hostname=self.host, do_handshake_on_connect=False)
        timer = threading.Timer(self._left(), _cut, [self.sock])
        timer.daemon = True
        timer.start()
        self.alarm.callback(timer.cancel)
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


def _cut(connected: socket.socket) -> None:
    """End reads and writes of the socket in other threads, without the closing messages of TLS."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
