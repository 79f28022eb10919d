"""Own the description of the API: the OpenAPI document of all routes of the table, made by FastAPI, and its page.

FastAPI takes half a second to import and a tenth of a second to look at all routes, so the server imports this module
only when somebody asks for a document; see `server`.
"""

import inspect
import json
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Annotated, Any, Final, cast

from fastapi import Body as BodyParameter
from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.openapi.models import Example
from fastapi.responses import HTMLResponse
from google.protobuf.descriptor import Descriptor
from starlette.routing import BaseRoute
from starlette.routing import Route as StarletteRoute

from kvlease.ids import ID_MAX
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire import bodies
from kvleased.access.roles import Role
from kvleased.api.rest.conversion import Json, schemas_of, to_json
from kvleased.api.rest.docs import HEADERS, docs_page
from kvleased.api.rest.examples import ANSWERS, REQUESTS
from kvleased.api.rest.refusals import examples, refusals, shared
from kvleased.api.rest.routes import NUMBERS, ROUTES, Route

TITLE: Final = "kvlease"
DESCRIPTION: Final = (
    "Reserve, map, evict and reload KV-cache blocks under leases. KV bytes never travel here: a worker that needs "
    "memory attaches over the local socket. Ids are packed little-endian integers, as base64."
)
TAGS: Final = (
    {"name": "caches", "description": "Plan, register and describe caches."},
    {
        "name": "workers",
        "description": "Become a worker, stay one, stop being one. Over the Unix socket the worker is the process that "
        "connected and ends with it, as with each call of curl; over TCP it stays until it is detached, or "
        "has no lease and was silent for lease_seconds.",
    },
    {
        "name": "leases",
        "description": "Reserve, map, extend, commit, fork, trim, evict, reload and release.",
    },
    {
        "name": "magazines",
        "description": "Give and take blocks by id, for engines with block tables of their own.",
    },
    {"name": "prefixes", "description": "Look up, pin, evict and reload cached blocks."},
    {"name": "operating", "description": "Drain, clear, resize, and set what tenants may have."},
    {"name": "watching", "description": "Snapshots and events."},
)

_RESPONSES: Final = {
    field.name: field.message_type
    for field in pb.Reply.DESCRIPTOR.oneofs_by_name["response"].fields
    if field.message_type is not None
}
_PATH: Final = {
    "cache": Annotated[str, Path(description="The cache's name.")],
    "lease_id": Annotated[int, Path(description="The lease.")],
    "pin_id": Annotated[int, Path(description="The pin.")],
    "worker_id": Annotated[int, Path(description="The worker.")],
    "tenant": Annotated[str, Path(description="The tenant's name.")],
}
_QUERY: Final = {
    "cache": (Annotated[str, Query(description="Only this cache; empty means all.")], ""),
    "after_sequence": (
        Annotated[
            int,
            Query(ge=0, le=NUMBERS["after_sequence"], description="The last sequence number seen."),
        ],
        0,
    ),
    "limit": (
        Annotated[
            int,
            Query(
                ge=0, le=NUMBERS["limit"], description="The most entries of a page; 0 means 256."
            ),
        ],
        0,
    ),
    "with_snapshot": (
        Annotated[bool, Query(description="Whether a snapshot of each cache comes first.")],
        False,
    ),
    "after_id": (
        Annotated[
            int,
            Query(ge=0, le=NUMBERS["after_id"], description="The last id of the previous page."),
        ],
        0,
    ),
    "force": (
        Annotated[
            bool, Query(description="Whether the worker may be one whose process is watched.")
        ],
        False,
    ),
    "purge": (
        Annotated[
            int, Query(ge=0, le=1, description="1: the disk store of the cache is removed too.")
        ],
        0,
    ),
}
_MEANT: Final = Annotated[
    str, Query(description="The cache that an operator means; not needed if there is only one.")
]
_HEADERS: Final = (
    (
        "idempotency_key",
        Annotated[str, Header(description="Retries of one call carry the same key.")],
        "",
    ),
    (
        "kvlease_epoch",
        Annotated[
            int,
            Header(
                ge=0,
                le=ID_MAX,
                description="The daemon's life that the caller knows; 0 does not check.",
            ),
        ],
        0,
    ),
)


def documents() -> dict[str, BaseRoute]:
    """Return the routes of the documents that describe the API, by path."""
    app = make_described_app()
    return {route.path: route for route in app.routes if type(route) is StarletteRoute}


def make_described_app() -> FastAPI:
    """Return a FastAPI app that describes all routes but answers none, with documents at /openapi.json and /docs.

    The page for people, /docs, is our own, because FastAPI's loads scripts from another host.
    """
    app = FastAPI(
        title=TITLE,
        version="1",
        description=DESCRIPTION,
        openapi_tags=[dict(tag) for tag in TAGS],
        servers=[{"url": "/"}],
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.router.add_route("/docs", _page(app), methods=["GET"], include_in_schema=False)
    for route in ROUTES:
        app.add_api_route(
            route.path,
            _described(route),
            methods=[route.method],
            operation_id=route.operation_id,
            summary=route.summary,
            tags=[route.tag],
            responses=responses(route),
            openapi_extra={"x-roles": [role.value for role in Role if role in route.roles]},
        )
    written = app.openapi()
    schemas = written["components"]["schemas"]
    for name, schema in components().items():
        schemas.setdefault(name, schema)
    written["components"] |= {"responses": shared(ROUTES), "examples": examples()}
    written["components"]["securitySchemes"] = {
        "bearer": {
            "type": "http",
            "scheme": "bearer",
            "description": (
                "The token that attach returned, or that of a reader, a joiner or an operator; over the Unix socket "
                "the operator sends none. The x-roles of an operation say which of them may call it."
            ),
        }
    }
    # One of two: a token, or nothing if the socket or a certificate says who calls.
    written["security"] = [{"bearer": []}, {}]
    _tell_written(app, written)
    return app


def _tell_written(app: FastAPI, written: Json) -> None:
    """Serve the OpenAPI document as ready bytes: writing it for each request would hold the loop for milliseconds."""
    packed = json.dumps(written, ensure_ascii=False, separators=(",", ":")).encode()

    async def tell(request: Request) -> Response:  # noqa: ARG001 -- Starlette's contract
        return Response(packed, media_type="application/json")

    path = cast(str, app.openapi_url)
    places = [place for place, route in enumerate(app.routes) if getattr(route, "path", "") == path]
    app.routes[places[0]] = StarletteRoute(path, tell, include_in_schema=False)


def signature(route: Route) -> inspect.Signature:
    """Return the signature by which FastAPI describes a route."""
    parameters = [_parameter(name, _PATH[name]) for name in route.in_path]
    means_one = route.takes_cache or route.verb == "explain"
    parameters += [
        _parameter(name, *_QUERY[name]) for name in route.query if name != "cache" or not means_one
    ]
    if means_one:
        parameters.append(_parameter("cache", _MEANT, ""))
    parameters += [_parameter(name, annotation, default) for name, annotation, default in _HEADERS]
    if route.body is not None:
        usual = REQUESTS.get(route.operation_id)
        told = None if usual is None else {"usual": Example(value=usual)}
        parameters.append(
            _parameter("body", Annotated[route.body, BodyParameter(openapi_examples=told)])
        )
    return inspect.Signature(parameters)


def responses(route: Route) -> dict[int | str, Json]:
    """Return the answers of a route, for OpenAPI."""
    message = _RESPONSES[route.verb]
    kind = "text/event-stream" if route.is_stream else "application/json"
    success: Json = {
        "description": "Done.",
        "headers": {
            "KVLease-Epoch": {
                "description": "The daemon's life.",
                "schema": {"type": "integer"},
            }
        },
        "content": {kind: {"schema": {"$ref": f"#/components/schemas/{message.name}"}}},
    }
    if route.operation_id in ANSWERS:
        success["content"][kind]["example"] = json.loads(to_json(ANSWERS[route.operation_id]))
    found: dict[int | str, Json] = {200: success}
    if route.verb == "register_cache":
        found[201] = success | {"description": "Created."}
    return found | refusals(route)


def components() -> dict[str, Json]:
    """Return the schemas that `responses` refers to."""
    found: dict[str, Json] = {}
    for message in _RESPONSES.values():
        found.update(schemas_of(cast(Descriptor, message)))
    problem = bodies.Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**problem.pop("$defs"), **found, "Problem": problem}


def _page(app: FastAPI) -> Callable[[Request], Awaitable[Response]]:
    """Return a function that answers with the description as a page, made at the first request."""

    @cache
    def page() -> Response:
        return HTMLResponse(docs_page(app.openapi()), headers=HEADERS)

    async def answer(_: Request) -> Response:
        return page()

    return answer


def _described(route: Route) -> Callable[..., Response]:
    """Return a function with the signature of the route, so that FastAPI can describe it."""

    def endpoint() -> Response:
        raise AssertionError

    endpoint.__name__ = route.operation_id
    endpoint.__signature__ = signature(route)  # type: ignore[attr-defined]  # how Python lets a signature be given
    return endpoint


def _parameter(
    name: str,
    annotation: Any,
    default: Any = inspect.Parameter.empty,
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
