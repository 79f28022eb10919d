"""Laws of the listener for probes: it serves probes and metrics under any host name, and nothing else."""

import asyncio
import errno
import socket
from collections.abc import Callable
from http.client import HTTPConnection

import pytest

from kvleased.api.rest.probes import ProbeServer
from tests.unit.api.scripted import Served

TRANSPORTS = ("rest",)


async def _get(port: int, path: str, method: str = "GET") -> tuple[int, bytes]:
    def send() -> tuple[int, bytes]:
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request(method, path, headers={"Host": "10.0.0.7:7072"})
        answer = connection.getresponse()
        result = answer.status, answer.read()
        connection.close()
        return result

    return await asyncio.to_thread(send)


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz", "/metrics"])
async def test_probe_is_answered_under_any_name(served: Served, path: str) -> None:
    """A kubelet asks by the pod's address, and a web page gains nothing by asking under another name."""
    server = ProbeServer(served.rest.probes)
    await server.start("127.0.0.1", 0)
    try:
        status, body = await _get(server.port, path)
    finally:
        await server.stop()

    assert (status, bool(body)) == (200, True)


@pytest.mark.parametrize(
    "missing", [None, errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL], ids=["IPv6", "none", "none now"]
)
async def test_all_addresses_are_those_that_there_are(
    served: Served, missing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`::` is served over IPv4, too, also where the kernel has no IPv6."""
    if missing is not None:
        monkeypatch.setattr(socket, "socket", _without_v6(missing))

    assert await _status_at_all_addresses(served, monkeypatch) == 200


async def test_all_addresses_do_not_hang_on_the_machines_default(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPv4 is served even where sockets of IPv6 take only IPv6 unless they ask for more."""
    monkeypatch.setattr(socket, "socket", _ForOneFamily)

    assert await _status_at_all_addresses(served, monkeypatch) == 200


async def _status_at_all_addresses(served: Served, monkeypatch: pytest.MonkeyPatch) -> int:
    """Listen at `::` with sockets as they are now made, and ask over IPv4 with ordinary sockets."""
    server = ProbeServer(served.rest.probes)
    await server.start("::", 0)
    monkeypatch.undo()
    try:
        status, _ = await _get(server.port, "/livez")
    finally:
        await server.stop()
    return status


class _ForOneFamily(socket.socket):
    """A socket as the kernel makes it with `net.ipv6.bindv6only`."""

    def __init__(self, *about: int, **more: int) -> None:
        super().__init__(*about, **more)
        if self.family == socket.AF_INET6:
            self.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)


def _without_v6(number: int) -> Callable[..., socket.socket]:
    """Return a maker of sockets that makes none of IPv6."""
    make = socket.socket

    def made(*about: int, **more: int) -> socket.socket:
        if about and about[0] == socket.AF_INET6:
            raise OSError(number, "no IPv6")
        return make(*about, **more)

    return made


@pytest.mark.parametrize("path", ["/v1/stats", "/v1/leases", "/docs", "/openapi.json", "/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_api_is_not_there(served: Served, path: str, method: str) -> None:
    """Nothing of the API is served where strangers may connect."""
    server = ProbeServer(served.rest.probes)
    await server.start("127.0.0.1", 0)
    try:
        status, _ = await _get(server.port, path, method)
    finally:
        await server.stop()

    assert status == 404
    assert served.daemon.calls == []
