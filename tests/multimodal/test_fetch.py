"""Downloads: from the named hosts only, at every hop, within bytes and seconds. Everything happens on this machine."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from weft.errors import RequestError
from weft.multimodal import fetch as module
from weft.multimodal.fetch import FetchPolicy, fetch, is_public

Answer = Callable[[str, socket.socket], None]
"""Gets the path that was asked for."""


class Site:
    """A small HTTP server that records what reached it. ``answer``: what it sends."""

    def __init__(self, answer: Answer) -> None:
        self.paths: list[str] = []
        self.num_connections = 0
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connected, _ = self._listener.accept()
                self.num_connections += 1
                threading.Thread(target=self._one, args=[connected], daemon=True).start()

    def _one(self, connected: socket.socket) -> None:
        with connected, contextlib.suppress(OSError):
            head = connected.recv(65536).decode("latin-1")
            self.paths.append(head.split(" ")[1] if " " in head else head)
            self._answer(self.paths[-1], connected)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def site() -> Iterator[Callable[[Answer], Site]]:
    sites: list[Site] = []

    def start(answer: Answer) -> Site:
        sites.append(Site(answer))
        return sites[-1]

    yield start
    for running in sites:
        running.close()


def body(content: bytes, status: str = "200 OK", *headers: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(content)}", "Connection: close", *headers])
    return f"{head}\r\n\r\n".encode() + content


def redirect(location: str, status: str = "302 Found") -> bytes:
    return body(b"", status, f"Location: {location}")


def always(data: bytes) -> Answer:
    return lambda path, connected: connected.sendall(data)


def get(url: str, *domains: str, max_bytes: int = 1000, timeout_s: float = 20.0) -> bytes:
    return fetch(url, FetchPolicy(domains, max_bytes, timeout_s), "messages")


def refused(url: str, *domains: str, match: str, **limits: float) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        get(url, *domains, **limits)  # type: ignore[arg-type]
    assert caught.value.param == "messages" and "send it as a data: URI" in str(caught.value)


def test_a_named_host(site: Callable[[Answer], Site]) -> None:
    here = site(always(body(b"picture")))
    assert get(f"http://{here.name}/a/b.png?c=d&e", here.name) == b"picture"
    assert get(f"HTTP://{here.name}", here.name) == b"picture"
    assert here.paths == ["/a/b.png?c=d&e", "/"]


def test_nothing_is_asked_of_others(site: Callable[[Answer], Site]) -> None:
    here = site(always(body(b"picture")))
    url = f"http://{here.name}/x.png"
    refused(url, match="fetches no media unless --allowed-media-domains")
    refused(url, "example.com", match="names example.com only")
    refused(url, "127.0.0.1", match="names 127.0.0.1 only")  # another port than the scheme's own must be named
    refused(f"http://example.com@{here.name}/", "example.com", match="without a user name")
    refused(f"http://{here.name}\\@example.com/", "example.com", match="not a valid URL|names example.com only")
    refused(f"http://{here.name}#@example.com/", "example.com", match="names example.com only")
    refused(f"http://example.com:{here.port}.evil/", "example.com", match="not a valid URL")
    refused("http:///x", "example.com", match="allowed are http:// and https://")
    refused("http://exämple.com/", "exämple.com", match="printable ASCII")
    refused("http://example.com/\r\nHost: x", "example.com", match="printable ASCII")
    assert here.num_connections == 0


def test_names_of_this_machine_and_of_private_networks(
    site: Callable[[Answer], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name is refused for any of its addresses; an address that the operator names himself is not."""
    here = site(always(body(b"picture")))
    refused(f"http://localhost:{here.port}/", f"localhost:{here.port}", match="not of the public internet")
    answers = {"mixed.example": ["93.184.216.34", "10.0.0.7"], "v6.example": ["::ffff:127.0.0.1"]}

    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        return [(2, 1, 6, "", (address, port)) for address in answers[host]]

    monkeypatch.setattr(module.socket, "getaddrinfo", resolve)
    for host in answers:
        refused(f"http://{host}:{here.port}/", f"{host}:{here.port}", match="not of the public internet")
    assert here.num_connections == 0


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("172.16.0.1", False), ("192.168.0.1", False), ("169.254.169.254", False), ("100.64.0.1", False),
        ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::1", False), ("::", False),
        ("fe80::1", False), ("fc00::1", False), ("ff02::1", False), ("::ffff:10.0.0.1", False),
        ("::ffff:93.184.216.34", True), ("64:ff9b::a00:1", False), ("2002:a00:1::1", False),
        ("2001:0:1::1", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is public


def test_redirects_are_checked_like_the_first_url(site: Callable[[Answer], Site]) -> None:
    inside = site(always(body(b"secret")))
    target = {
        "/inside": f"http://{inside.name}/",
        "/name": f"http://localhost:{inside.port}/",
        "/file": "file:///etc/passwd",
    }
    target |= {"/ok": "ok2", "/meta": "http://169.254.169.254/latest"}

    def answer(path: str, connected: socket.socket) -> None:
        connected.sendall(redirect(target[path]) if path in target else body(b"picture"))

    here = site(answer)
    assert get(f"http://{here.name}/ok", here.name) == b"picture"
    for path in ("inside", "name", "meta"):
        refused(f"http://{here.name}/{path}", here.name, match=f"names {here.name} only")
    refused(f"http://{here.name}/file", here.name, match="allowed are http:// and https://")
    refused(f"http://{here.name}/name", here.name, f"localhost:{inside.port}", match="not of the public internet")
    assert inside.num_connections == 0
    target["/loop"] = "/loop"
    refused(f"http://{here.name}/loop", here.name, match="more than 3 redirects")
    assert here.paths.count("/loop") == 4


def test_bodies_are_bounded(site: Callable[[Answer], Site]) -> None:
    def endless(path: str, connected: socket.socket) -> None:
        connected.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while True:
            connected.sendall(bytes(65536))

    large = site(endless)
    refused(f"http://{large.name}/", large.name, match="larger than the 1,000 bytes")
    claimed = site(always(b"HTTP/1.1 200 OK\r\nContent-Length: 1001\r\n\r\n"))
    refused(f"http://{claimed.name}/", claimed.name, match="larger than the 1,000 bytes")


def test_time_is_bounded(site: Callable[[Answer], Site]) -> None:
    """A header, or a body, that comes byte by byte and never ends."""

    def drips(path: str, connected: socket.socket) -> None:
        connected.sendall(b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if path == "/body" else b"X: "))
        for _ in range(2000):
            connected.sendall(b"a")
            time.sleep(0.01)

    here = site(drips)
    began = time.monotonic()
    for path in ("body", "head"):
        refused(f"http://{here.name}/{path}", here.name, match="did not come within 0.3 s", timeout_s=0.3)
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (body(b"", "404 Not Found"), "gave HTTP status 404"),
        (body(b"", "204 No Content"), "gave HTTP status 204"),
        (b"", "could not be fetched"),
        (b"SSH-2.0-x\r\n", "could not be fetched"),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200 + b"\r\n", "could not be fetched"),
    ],
)
def test_answers_that_are_none(site: Callable[[Answer], Site], data: bytes, error: str) -> None:
    here = site(always(data))
    refused(f"http://{here.name}/", here.name, match=error)


def test_an_unreachable_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        name = f"127.0.0.1:{listener.getsockname()[1]}"
    refused(f"http://{name}/", name, match="could not be fetched")
    refused(f"https://{name}/", name, match="could not be fetched")
