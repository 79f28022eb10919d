"""Laws of roles: one table says who may call each route, method and verb, and a refused call changes nothing."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from starlette.routing import Route

from kvlease.v1 import kvlease_pb2 as pb
from kvleased.access.roles import ANYBODY, OF_OPERATION, OF_PATH, OF_SERVICE, OF_VERB, OWN, Role
from kvleased.api.rest.app import documents, make_described_app
from kvleased.api.rest.routes import ROUTES
from kvleased.api.rest.server import DOCUMENTS
from tests.unit.api.guarded import Guarded, guarded, is_refused
from tests.unit.api.scripted import framed

SERVICE = pb.DESCRIPTOR.services_by_name["KVLeaseService"]
VERBS = [field.name for field in pb.Call.DESCRIPTOR.oneofs_by_name["request"].fields]
VERB_OF = {
    field.message_type.name: field.name
    for field in pb.Call.DESCRIPTOR.oneofs_by_name["request"].fields
}
VALUES = {
    "cache": "main",
    "tenant": "default",
    "lease_id": "999999",
    "pin_id": "999999",
    "worker_id": "999999",
}


def described() -> dict[str, Any]:
    """Return the OpenAPI document."""
    return make_described_app().openapi()


OPERATIONS = [
    (method.upper(), path, operation["operationId"])
    for path, methods in described()["paths"].items()
    for method, operation in methods.items()
]


@pytest.fixture
async def serving() -> AsyncIterator[Guarded]:
    """A daemon on all transports, with a cache."""
    with tempfile.TemporaryDirectory(prefix="kvl") as directory:
        async with guarded(Path(directory) / "run") as found:
            yield found


def roles_of(operation_id: str) -> frozenset[Role]:
    """Return the roles that may call an operation of REST."""
    verb = next(route.verb for route in ROUTES if route.operation_id == operation_id)
    return OF_OPERATION.get(operation_id) or OF_VERB[verb]


def test_every_verb_has_roles() -> None:
    """Every verb has roles, and the table has no verb that does not exist."""
    assert set(OF_VERB) == set(VERBS)
    assert set(OF_OPERATION) <= {operation_id for _, _, operation_id in OPERATIONS}
    assert all(Role.STRANGER not in roles for roles in (*OF_VERB.values(), *OF_OPERATION.values()))


async def test_every_path_beside_the_api_has_roles(serving: Guarded) -> None:
    """All else that is served, documents included, has a line in the table."""
    paths = {route.path for route in serving.rest.app.routes if isinstance(route, Route)}

    assert paths | DOCUMENTS == set(OF_PATH)
    assert set(documents()) == DOCUMENTS


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.OPERATOR])
async def test_rest_refuses_by_role_and_changes_nothing(serving: Guarded, role: Role) -> None:
    """A role that may not call is refused, 401 for strangers and 403 for others, before its call is read."""
    token = await serving.token(role)
    before = serving.state()

    for method, path, operation_id in OPERATIONS:
        if role not in roles_of(operation_id):
            status, problem = await serving.over_rest(method, path.format(**VALUES), token)
            assert status in (401, 403), (method, path)
            assert is_refused(problem["code"], problem["resource"]), (method, path)

    assert serving.state() == before


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.STRANGER])
async def test_rest_admits_by_role(serving: Guarded, role: Role) -> None:
    """A role that may call is refused for other reasons, if at all."""
    for method, path, operation_id in OPERATIONS:
        if role in roles_of(operation_id) and (method, path) != ("DELETE", "/v1/caches/{cache}"):
            token = await serving.token(role)
            _, problem = await serving.over_rest(method, path.format(**VALUES), token)
            assert not is_refused(problem.get("code", ""), problem.get("resource", "")), (
                method,
                path,
            )


@pytest.mark.parametrize("role", Role)
async def test_rest_serves_beside_the_api_by_role(serving: Guarded, role: Role) -> None:
    """Metrics and the page's data are for roles that may look at everything; probes and plain files are for all."""
    token = await serving.token(role)

    for path, roles in OF_PATH.items():
        # A token that nobody has is not looked at.
        status, _ = await serving.over_rest("GET", path.format(name="app.js"), token)
        assert (status in (401, 403)) is (role not in roles), path


@pytest.mark.parametrize("role", Role)
async def test_grpc_goes_by_role(serving: Guarded, role: Role) -> None:
    """Every method of the service admits and refuses as its verb does, and a refusal changes nothing."""
    for method in sorted(SERVICE.methods, key=lambda one: one.name == "DeleteCache"):
        verb, request = VERB_OF[method.input_type.name], getattr(pb, method.input_type.name)()
        if verb == "detach" and role is Role.OPERATOR:
            request.worker_id = 999_999
        token, before = await serving.token(role), serving.state()

        code, resource = await serving.over_grpc(method, request, token)

        assert is_refused(code, resource) is (role not in OF_VERB[verb]), (verb, code, resource)
        assert role in OF_VERB[verb] or serving.state() == before, verb


@pytest.mark.parametrize("role", [Role.READER, Role.JOINER, Role.WORKER, Role.OPERATOR])
@pytest.mark.parametrize("shows_token", [True, False])
async def test_local_socket_goes_by_role(serving: Guarded, role: Role, shows_token: bool) -> None:
    """On the local socket a token says who calls; without a token, this user is an operator."""
    if not shows_token and role is not Role.OPERATOR:
        return
    for verb in sorted(VERBS, key=lambda one: one == "delete_cache"):
        call = pb.Call(call_number=1, token=await serving.token(role) if shows_token else "")
        getattr(call, verb).SetInParent()
        if verb == "detach" and role is Role.OPERATOR:
            call.detach.worker_id = 999_999
        before = serving.state()

        if verb in ("watch", "trace") and role in OF_VERB[verb]:
            continue
        reply = await serving.over_local(call)

        error = reply.error
        assert is_refused(error.code, error.resource) is (role not in OF_VERB[verb]), (verb, error)
        assert role in OF_VERB[verb] or serving.state() == before, verb


async def test_wrong_token_is_refused_everywhere(serving: Guarded) -> None:
    """A token that nobody has permits nothing, also on a Unix socket where no token is needed."""
    for token in ("0" * 32, serving.tokens[Role.OPERATOR][:-1], "\xe9" * 16):
        status, _ = await serving.over_rest("GET", "/v1/stats", token)
        assert status == 401
    reply = await serving.over_local(
        pb.Call(call_number=1, token="0" * 32, stats=pb.StatsRequest())
    )
    assert reply.error.code == "UNKNOWN_WORKER"


async def test_stranger_is_refused_before_the_body(serving: Guarded) -> None:
    """A stranger is refused before the body is read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", serving.rest.http_port)
    writer.write(b"POST /v1/leases HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")

    async with asyncio.timeout(5):
        line = await reader.readline()

    writer.close()
    assert b" 401 " in line


async def test_tokens_are_files_of_this_user_alone(serving: Guarded) -> None:
    """The token files have mode 0600, and their tokens differ."""
    paths = serving.settings.token_paths.values()

    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
    assert len({path.read_text() for path in paths}) == len(paths) == 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
async def test_another_user_is_a_stranger(serving: Guarded) -> None:
    """Another user cannot connect; where the file modes let that user in, nothing is permitted without a token."""
    runtime_dir, packed = (
        serving.settings.runtime_dir,
        framed(pb.Call(call_number=1, stats=pb.StatsRequest())),
    )
    paths = [serving.settings.local_socket, serving.settings.http_socket]
    http = b"GET /v1/stats HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"

    shut = [await _by_nobody(path, packed) for path in paths]
    for path in (*paths, runtime_dir, runtime_dir.parent):
        path.chmod(0o777)
    local = pb.Reply.FromString((await _by_nobody(paths[0], packed))[4:])
    rest = await _by_nobody(paths[1], http)

    assert shut == [b"", b""]
    assert local.error.code == "UNKNOWN_WORKER"
    assert b" 401 " in rest


async def _by_nobody(path: Path, packed: bytes) -> bytes:
    program = (
        "import os, socket, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "line = socket.socket(socket.AF_UNIX); line.settimeout(20)\n"
        "try: line.connect(sys.argv[1])\n"
        "except PermissionError: sys.exit()\n"
        "line.sendall(bytes.fromhex(sys.argv[2])); sys.stdout.buffer.write(line.recv(65536))\n"
    )
    command = [sys.executable, "-S", "-c", program, str(path), packed.hex()]
    run = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, check=True, timeout=60
    )
    return run.stdout


async def test_services_beside_kvlease_are_listed(serving: Guarded) -> None:
    """Over gRPC there are kvlease's service, health and reflection, and nothing else."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{serving.grpc.grpc_port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = stub.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        found = {
            one.name async for answer in answers for one in answer.list_services_response.service
        }

    assert found == {SERVICE.full_name, *OF_SERVICE}
    assert set(OF_SERVICE.values()) == {ANYBODY}


def test_own_is_what_needs_an_attached_worker() -> None:
    """Nobody but the worker itself may make its own calls, so no operator acts in a worker's name."""
    assert {Role.WORKER} == OWN
    assert all(Role.OPERATOR in roles for roles in OF_VERB.values() if roles != OWN)
