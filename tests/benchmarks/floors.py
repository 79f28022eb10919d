"""Own servers that only answer, which show a transport's least cost. Run as `floors.py KIND PATH REPLY`.

KIND is echo, fastapi or grpc; PATH the Unix socket; REPLY what to answer, in base64. Nothing of the service is here.
"""

import asyncio
import base64
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import cores

START_SECONDS_MAX: Final = 20.0
BYTES_OF_LENGTH: Final = 4
ZEROS: Final = bytes(1 << 20)
_IDLE_SECONDS_MAX: Final = 3600
"""On a busy machine, connections of rounds that take turns idle for longer than uvicorn's five seconds."""


@contextmanager
def floor_server(kind: str, path: Path, reply: bytes = b"") -> Iterator[Path]:
    """Run one of the servers in a process of its own for as long as the context lasts."""
    arguments = [sys.executable, __file__, kind, str(path), base64.b64encode(reply).decode()]
    with cores.for_servers():
        process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL)
    try:
        give_up_at = time.monotonic() + START_SECONDS_MAX
        while not path.exists():
            if process.poll() is not None or time.monotonic() > give_up_at:
                message = f"the {kind} floor did not start"
                raise RuntimeError(message)
            time.sleep(0.01)
        yield path
    finally:
        process.kill()
        process.wait()


class Echo(asyncio.Protocol):
    """Answer each frame with one whose length is in its first four bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection's transport."""
        self._transport: Any = transport
        self._partial = b""

    def data_received(self, data: bytes) -> None:
        """Answer all complete frames in one write."""
        data = self._partial + data
        begin, replies = 0, []
        while len(data) - begin >= BYTES_OF_LENGTH:
            body = begin + BYTES_OF_LENGTH
            end = body + int.from_bytes(data[begin:body], "little")
            if end > len(data):
                break
            reply_bytes = int.from_bytes(data[body : body + BYTES_OF_LENGTH], "little")
            replies.append(reply_bytes.to_bytes(BYTES_OF_LENGTH, "little") + ZEROS[:reply_bytes])
            begin = end
        self._partial = data[begin:]
        if replies:
            self._transport.write(b"".join(replies))


def serve_echo(path: str) -> None:
    """Serve frames as the local socket has them."""
    import uvloop  # noqa: PLC0415 - each server loads what it needs and no more

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_unix_server(Echo, path)
        await server.serve_forever()

    uvloop.run(serve())


def serve_fastapi(path: str, reply: bytes) -> None:
    """Serve a route with a pydantic body and a pydantic answer, as FastAPI's tutorial has it."""
    import uvicorn  # noqa: PLC0415
    from fastapi import FastAPI  # noqa: PLC0415
    from pydantic import BaseModel, create_model  # noqa: PLC0415

    class Reserve(BaseModel):
        request_id: str
        keys: str = ""
        num_tokens: int
        wait_ms: int = 0
        token_ids: str = ""

    class Released(BaseModel):
        released: bool = True

    fields: dict[str, Any] = json.loads(reply)
    kinds: dict[str, Any] = {name: (type(value), ...) for name, value in fields.items()}
    granted = create_model("Granted", **kinds)(**fields)
    app = FastAPI()

    async def reserve(body: Reserve) -> Any:  # noqa: ARG001 - reading it is what is measured
        return granted

    async def release(lease_id: int) -> Released:  # noqa: ARG001
        return Released()

    app.post("/v1/leases", response_model=type(granted))(reserve)
    app.delete("/v1/leases/{lease_id}")(release)
    uvicorn.run(
        app,
        uds=path,
        loop="uvloop",
        http="httptools",
        access_log=False,
        log_level="error",
        timeout_keep_alive=_IDLE_SECONDS_MAX,
    )


def serve_grpc(path: str, reply: bytes) -> None:
    """Serve Reserve and Release with the same messages and nothing behind them."""
    import grpc  # noqa: PLC0415

    from kvlease.v1 import kvlease_pb2 as pb  # noqa: PLC0415

    granted, released = pb.ReserveResponse.FromString(reply), pb.ReleaseResponse(released=True)

    async def reserve(request: Any, context: Any) -> Any:  # noqa: ARG001 - gRPC's own signature
        return granted

    async def release(request: Any, context: Any) -> Any:  # noqa: ARG001
        return released

    def unary(method: Any, request: Any, response: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            method,
            request_deserializer=request.FromString,
            response_serializer=response.SerializeToString,
        )

    async def serve() -> None:
        server = grpc.aio.server()
        handlers = {
            "Reserve": unary(reserve, pb.ReserveRequest, pb.ReserveResponse),
            "Release": unary(release, pb.ReleaseRequest, pb.ReleaseResponse),
        }
        service = "kvlease.v1.KVLeaseService"
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_insecure_port(f"unix://{path}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


if __name__ == "__main__":
    _kind, _path, _reply = sys.argv[1], sys.argv[2], base64.b64decode(sys.argv[3])
    if _kind == "echo":
        serve_echo(_path)
    elif _kind == "fastapi":
        serve_fastapi(_path, _reply)
    else:
        serve_grpc(_path, _reply)
