"""Laws of the one table of errors: every error is the same over every transport."""

import asyncio
import gc
import json
import weakref
from typing import NoReturn

import pytest
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import StatusCode
from structlog.testing import capture_logs

from kvlease.errors import (
    BY_CODE,
    Holding,
    InternalError,
    InvalidError,
    KVLeaseError,
    PoolFullError,
)
from kvlease.transports import _rest
from kvlease.transports.grpc import _explained
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.faults import error_from_proto, error_to_proto, holdings_from_text
from kvleased.access.callers import Caller
from kvleased.api.faults import ask, grpc_status, outcome, problem

ERRORS = [
    pytest.param(
        kind(
            "why",
            resource="r",
            need=0,
            available=1,
            limit=2,
            retry_after_ms=3,
            rule="not_enough_memory",
            remedies=("device_bytes=64", 'layout="BLHNC", or none'),
            holdings=(
                Holding(owner="you", state="leased", num_blocks=12),
                Holding(owner="others", state="cached", num_blocks=3),
            ),
        ),
        id=code,
    )
    for code, kind in BY_CODE.items()
]
NUMBERS = (
    "need", "available", "limit", "retry_after_ms", "resource", "message", "rule", "remedies",
    "holdings",
)  # fmt: skip


async def test_fault_of_ours_is_logged_by_the_name_that_runbooks_have() -> None:
    """A call that fails later, as a registration does, is logged as one that fails at once, with its verb."""
    late: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    late.set_exception(ArithmeticError())

    with capture_logs() as lines:
        answer = outcome("register_cache", late)

    assert isinstance(answer, InternalError)
    assert [(line["event"], line["verb"]) for line in lines] == [("call_failed", "register_cache")]


def test_refusal_leaves_nothing_to_the_garbage_collector() -> None:
    """A refused call is freed at once, because a run of the garbage collector would hold up all others."""

    def call(*_: object) -> NoReturn:
        raise PoolFullError(resource="blocks")

    def refuse() -> "weakref.ref[object]":
        answer = ask(call, "reserve", pb.ReserveRequest(), Caller(transport="local"))
        assert isinstance(answer, PoolFullError)
        assert answer.__traceback__ is None
        return weakref.ref(answer)

    gc.disable()
    try:
        assert refuse()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("error", ERRORS)
def test_error_survives_the_protocol(error: KVLeaseError) -> None:
    """An error that is written as a message is read as the same error, zeros included."""
    found = error_from_proto(error_to_proto(error))

    assert type(found) is type(error)
    assert [getattr(found, name) for name in NUMBERS] == [getattr(error, name) for name in NUMBERS]


@pytest.mark.parametrize("error", ERRORS)
def test_error_survives_a_problem_document(error: KVLeaseError) -> None:
    """The library reads a problem document as the error from which it was written."""
    with pytest.raises(type(error)) as caught:
        _rest.response_of("reserve", error.http_status, problem(error))

    assert [getattr(caught.value, name) for name in NUMBERS] == [
        getattr(error, name) for name in NUMBERS
    ]
    assert json.loads(problem(error))["status"] == error.http_status >= 400


def test_number_that_no_field_can_carry_is_the_same_over_every_protocol() -> None:
    """A refusal repeats any number of the caller's; one that cannot be carried is left out of the explanation."""
    error = InvalidError("too large", resource="revision", need=2**64 - 1, limit=2**63 - 1)

    with pytest.raises(InvalidError, match="too large") as caught:
        _rest.response_of("set_tenant", error.http_status, problem(error))

    found = _explained(grpc_status(error).SerializeToString(), error.message)
    assert found is not None
    assert caught.value.need == error_from_proto(error_to_proto(error)).need == found.need is None
    assert caught.value.limit == error_from_proto(error_to_proto(error)).limit == found.limit


@pytest.mark.parametrize("error", ERRORS)
def test_error_is_a_grpc_status(error: KVLeaseError) -> None:
    """Every error has ErrorInfo with its numbers, and a status that is not OK."""
    status = grpc_status(error)
    info = ErrorInfo()

    assert status.details[0].Unpack(info)
    assert status.code == StatusCode[error.grpc_status].value[0] != 0
    assert (info.reason, info.metadata["need"], info.metadata["resource"]) == (error.code, "0", "r")
    assert info.metadata["rule"] == "not_enough_memory"
    assert json.loads(info.metadata["remedies"]) == list(error.remedies)
    assert info.metadata["holdings"] == "you leased 12, others cached 3"


@pytest.mark.parametrize("error", ERRORS)
def test_error_survives_a_grpc_status(error: KVLeaseError) -> None:
    """The library reads a gRPC status as the error from which it was written."""
    found = _explained(grpc_status(error).SerializeToString(), error.message)

    assert type(found) is type(error)
    assert [getattr(found, name) for name in NUMBERS] == [getattr(error, name) for name in NUMBERS]


def test_error_without_holdings_says_nothing_of_them() -> None:
    """Unknown holdings are left out, rather than written as none."""
    error = PoolFullError("full")
    info = ErrorInfo()

    assert grpc_status(error).details[0].Unpack(info)
    assert "holdings" not in info.metadata
    assert "holdings" not in json.loads(problem(error))


@pytest.mark.parametrize("text", ["", "you", "you leased many", "you leased -1, , a b c d"])
def test_holdings_that_cannot_be_read_are_passed_over(text: str) -> None:
    """A newer daemon may write more holdings; those that are understood are kept."""
    assert holdings_from_text(f"{text}, nobody free 4") == [
        pb.Holding(owner="nobody", state="free", num_blocks=4)
    ]


def test_number_of_any_width_is_explained() -> None:
    """A refusal repeats the caller's number, however large it is, and no other number replaces it."""
    error = InvalidError(need=2**64 - 1, available=-(2**70), limit=7)

    found = error_from_proto(error_to_proto(error))

    assert (found.need, found.available, found.limit) == (None, None, 7)
