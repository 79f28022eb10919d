"""Own the interceptor that makes a span of each gRPC call, if calls are traced; `verbs` answers the calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

import grpc

from kvleased.api.grpc.calls import Context
from kvleased.api.seam import Traces

_Answers = Callable[[object, Context], Awaitable[bytes]]

_SYSTEM: Final = "grpc"


class Spans(grpc.aio.ServerInterceptor):
    """Makes a span of every call of one service, below the span that its caller names; streams have none."""

    def __init__(self, traces: Traces, service: str) -> None:
        """Take the maker of spans, and the service's full name."""
        self._traces = traces
        self._prefix = f"/{service}/"

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return a handler that answers a call in a span; the handlers of other services are left as they are."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or handler.response_streaming or not method.startswith(self._prefix):
            return handler
        return grpc.stream_unary_rpc_method_handler(
            cast(Any, self._within(method.removeprefix("/"), handler.stream_unary))
        )

    def _within(self, method: str, answer: _Answers) -> _Answers:
        attributes = {"rpc.system": _SYSTEM, "rpc.method": method}

        async def answer_in_span(messages: object, context: Context) -> bytes:
            with self._traces.request(method, _traceparent(context), attributes) as span:
                try:
                    answered = await answer(messages, context)
                except grpc.aio.AbortError:
                    # The context has the code of the refusal.
                    span.set_attribute("rpc.response.status_code", _code(context))
                    raise
                span.set_attribute("rpc.response.status_code", grpc.StatusCode.OK.name)
                return answered

        return answer_in_span


def _traceparent(context: Context) -> str:
    for name, value in context.invocation_metadata() or ():
        if name == "traceparent":
            return value if isinstance(value, str) else value.decode("latin-1")
    return ""


def _code(context: Context) -> str:
    code = context.code()
    if isinstance(code, int):
        return next(one.name for one in grpc.StatusCode if one.value[0] == code)
    return str(getattr(code, "name", code))
