"""The listener for those who may look but not call serves probes and metrics, to whatever name, and nothing else."""

import asyncio
from http.client import HTTPConnection

import pytest

from kvleased.api.probes import ProbeServer
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
    """A kubelet asks by the pod's address, which no page of a browser gains anything by."""
    server = ProbeServer(served.rest.probes)
    await server.start("127.0.0.1", 0)
    try:
        status, body = await _get(server.port, path)
    finally:
        await server.stop()

    assert (status, bool(body)) == (200, True)


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
