"""The ways to the daemon: the local socket, REST and gRPC, each blocking and for an event loop."""

from importlib import import_module
from types import ModuleType

from kvlease.errors import InvalidError
from kvlease.transports.base import Address, AsyncTransport, Transport, Undo

__all__ = ["Address", "AsyncTransport", "Transport", "open_async_transport", "open_transport"]


def open_transport(address: Address) -> Transport:
    """Return a blocking transport to `address`; it connects at its first call."""
    # Only the transport in use is loaded: aiohttp and grpc cost more than all of kvlease.
    if address.protocol == "unix":
        from kvlease.transports.local import LocalTransport  # noqa: PLC0415

        return LocalTransport(address.path)
    if address.protocol == "http":
        from kvlease.transports.http import HttpTransport  # noqa: PLC0415

        return HttpTransport(address)
    transport: Transport = _grpc().GrpcTransport(address)
    return transport


def open_async_transport(address: Address, undo: Undo | None = None) -> AsyncTransport:
    """Return a transport to `address` for the running event loop; it connects at its first call.

    `undo` says what to do about answers that come after their callers were cancelled; over REST and gRPC that is the
    sender's business.
    """
    if address.protocol == "unix":
        from kvlease.transports.local_async import AsyncLocalTransport  # noqa: PLC0415

        return AsyncLocalTransport(address.path, undo)
    if address.protocol == "http":
        from kvlease.transports.http_async import AsyncHttpTransport  # noqa: PLC0415

        return AsyncHttpTransport(address)
    transport: AsyncTransport = _grpc().AsyncGrpcTransport(address)
    return transport


def _grpc() -> ModuleType:
    try:
        return import_module("kvlease.transports.grpc")
    except ImportError as error:
        message = f"gRPC addresses need more packages ({error}); pip install 'kvlease[grpc]'"
        raise InvalidError(message, resource="address") from error
