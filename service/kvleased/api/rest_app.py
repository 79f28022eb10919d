"""Own the FastAPI app: every route of the table, and its OpenAPI document; what a route does is `rest_endpoints`'s.

FastAPI takes half a second to import and a tenth of one to look at all routes, so the server imports this
module only when it is ready already; see `rest`.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from typing import Annotated, Any, Final, cast

from fastapi import Body as BodyParameter
from fastapi import FastAPI, Header, Path, Query, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from google.protobuf.descriptor import Descriptor

from kvlease import wire
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.api.conversion import Json, schemas_of
from kvleased.api.rest_docs import HEADERS, docs_page
from kvleased.api.rest_routes import Route
from kvleased.roles import Role

TITLE: Final = "kvlease"
DESCRIPTION: Final = (
    "Reserve, map, evict and reload KV-cache blocks under leases. KV bytes never travel here: a worker that needs "
    "memory attaches over the local socket. Ids are packed little-endian integers, as base64."
)
PROBLEM: Final[Json] = {
    "description": "Refused; the document says why, what was needed and when to retry.",
    "content": {
        "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}},
    },
}
"""The answer of every route that is not a success."""

TAGS: Final = (
    {"name": "caches", "description": "Plan, register and describe caches."},
    {"name": "workers", "description": "Become a worker, stay one, stop being one."},
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
        Annotated[int, Query(ge=0, description="The last sequence number seen.")],
        0,
    ),
    "limit": (
        Annotated[int, Query(ge=0, description="Entries of the page at most; 0 means 256.")],
        0,
    ),
    "with_snapshot": (
        Annotated[int, Query(ge=0, le=1, description="1: a snapshot of each cache comes first.")],
        0,
    ),
    "after_id": (Annotated[int, Query(description="The last id of the page before.")], 0),
}
_MEANT: Final = Annotated[
    str, Query(description="The cache that an operator means; needless where there is but one.")
]
_HEADERS: Final = (
    ("idempotency_key", "Retries of one call carry the same key.", str, ""),
    ("kvlease_epoch", "The daemon's life that the caller knows; 0 does not check.", int, 0),
)


Answers = Callable[[Request], Awaitable[Response]]
"""What answers the requests of one route."""


class DirectRoute(APIRoute):
    """A route that FastAPI finds and describes, and whose requests go straight to one of our endpoints."""

    def get_route_handler(self) -> Any:
        """Return what answers a request: reading it is the endpoint's business, which is stricter and quicker."""
        return vars(self.endpoint)["answers"]


def make_described_app(endpoints: Mapping[Route, Answers]) -> FastAPI:
    """Return the FastAPI app of all routes, with its documents at /openapi.json and /docs.

    The page for people, /docs, is our own: FastAPI's loads scripts of another host.
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
    app.router.route_class = DirectRoute
    app.router.add_route("/docs", _documents(app), methods=["GET"], include_in_schema=False)
    for route, answers in endpoints.items():
        app.add_api_route(
            route.path,
            _described(route, answers),
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
    written["components"]["securitySchemes"] = {
        "bearer": {
            "type": "http",
            "scheme": "bearer",
            "description": (
                "The token that attach returned, or that of a reader, a joiner or an operator; over the Unix socket "
                "the operator sends none. Which of them may call an operation, its x-roles tell."
            ),
        }
    }
    # Either: a token, or none where the socket or a certificate says who calls.
    written["security"] = [{"bearer": []}, {}]
    return app


def signature(route: Route) -> inspect.Signature:
    """Return the signature by which FastAPI describes a route."""
    parameters = [_parameter(name, _PATH[name]) for name in route.in_path]
    parameters += [_parameter(name, *_QUERY[name]) for name in route.query]
    if route.takes_cache:
        parameters.append(_parameter("cache", _MEANT, ""))
    parameters += [
        _parameter(name, Annotated[kind, Header(description=text)], default)
        for name, text, kind, default in _HEADERS
    ]
    if route.body is not None:
        parameters.append(_parameter("body", Annotated[route.body, BodyParameter()]))
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
    found: dict[int | str, Json] = {200: success, "4XX": PROBLEM, "5XX": PROBLEM}
    if route.verb == "register_cache":
        found[201] = success | {"description": "Created."}
    return found


def components() -> dict[str, Json]:
    """Return the schemas that `responses` refers to."""
    found: dict[str, Json] = {}
    for message in _RESPONSES.values():
        found.update(schemas_of(cast(Descriptor, message)))
    problem = wire.Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**problem.pop("$defs"), **found, "Problem": problem}


def _documents(app: FastAPI) -> Answers:
    """Return what answers with the description as a page, written when it is first asked for."""

    @cache
    def page() -> Response:
        return HTMLResponse(docs_page(app.openapi()), headers=HEADERS)

    async def answer(_: Request) -> Response:
        return page()

    return answer


def _described(route: Route, answers: Answers) -> Callable[..., Response]:
    """Return a function that looks like the route, so that FastAPI can describe it, and carries what answers it."""

    def endpoint() -> Response:
        raise AssertionError

    endpoint.__name__ = route.operation_id
    endpoint.__signature__ = signature(route)  # type: ignore[attr-defined]  # how Python lets a signature be given
    endpoint.answers = answers  # type: ignore[attr-defined]  # for DirectRoute
    return endpoint


def _parameter(
    name: str,
    annotation: Any,
    default: Any = inspect.Parameter.empty,
) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
