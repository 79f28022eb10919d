"""Own how a trace is recorded: until there are enough requests, the time is over, or the user stops it."""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

import typer

from kvlease.aio import AsyncClient
from kvlease.cli.connecting import CONNECT_SECONDS
from kvlease.errors import InvalidError, KVLeaseError
from kvlease.trace_files import write_trace
from kvlease.traces import Trace, TracedRequest

STANDARD_OUTPUT: Final = Path("-")
"""The name that stands for standard output."""
REQUESTS_MAX: Final = 1_000_000
"""Requests after which a recording ends by default: they are kept in memory until they are written."""


@contextmanager
def written_at_the_end(output: Path, *, may_replace: bool) -> Iterator[Path]:
    """Give a file to write: it replaces `output` if all went well, and is removed if not.

    A pipe or a device is written itself, and STANDARD_OUTPUT at the end.

    Raises:
        InvalidError: there is a file already that may not be replaced, or none can be written there.
    """
    if output == STANDARD_OUTPUT:
        with NamedTemporaryFile() as whole:
            yield Path(whole.name)
            with _writing(output):
                shutil.copyfileobj(whole, sys.stdout.buffer)
                sys.stdout.buffer.flush()
        return
    if output.is_dir():
        message = f"{output} is a directory; name a file in it"
        raise InvalidError(message, resource="output")
    # Asked of the name as it is: the link of a pipe's descriptor leads there, but no path does.
    if output.exists() and not output.is_file():
        yield output
        return
    place = Path(os.path.realpath(output))
    if place.exists() and not may_replace:
        message = f"{output} already exists; name another file, or replace it with --force"
        raise InvalidError(message, resource="output")
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        with _writing(output):
            # If the file cannot be written, that should be known before there is something to write.
            part.write_bytes(b"")
        yield part
        with _writing(output):
            part.replace(place)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def _writing(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot write {output}: {error.strerror or error}"
        raise InvalidError(message, resource="output") from error


def write_recorded(trace: Trace, path: Path) -> None:
    """Write what was recorded, which cannot be recorded again: where `path` cannot take it, a temporary file may.

    Raises:
        InvalidError: the file cannot be written; it says where the recording is then, if it is anywhere.
    """
    try:
        write_trace(trace, path)
    except InvalidError as error:
        if (spare := _spare_file(trace)) is None:
            raise
        message = f"{error.message}; what was recorded is in {spare}"
        raise InvalidError(message, resource="output") from error


def _spare_file(trace: Trace) -> Path | None:
    """Write a trace to a new temporary file, and return its path; None if that has no room either."""
    path: Path | None = None
    try:
        with NamedTemporaryFile(prefix="kvlease-trace-", suffix=".jsonl", delete=False) as spare:
            path = Path(spare.name)
        write_trace(trace, path)
    except (OSError, InvalidError):
        if path is not None:
            path.unlink(missing_ok=True)
        return None
    return path


@dataclass(slots=True, kw_only=True)
class Recorded:
    """What was recorded."""

    requests: list[TracedRequest] = field(default_factory=list)
    num_dropped: int = 0
    """Requests that the daemon left out, because they were not read fast enough."""
    error: KVLeaseError | None = None
    """Why the recording ended early."""


async def record(address: str, cache: str, seconds: float | None, num_requests: int) -> Recorded:
    """Record a cache's requests until there are so many, for so many seconds, or until SIGINT or SIGTERM.

    A daemon that goes in the middle takes nothing of what was recorded with it.

    Raises:
        KVLeaseError: the daemon refuses, or cannot be reached, before there was anything to record.
    """
    recorded = Recorded()
    async with AsyncClient(address or None, deadline_seconds=CONNECT_SECONDS) as client:
        reading = asyncio.ensure_future(_read(client, cache, num_requests, recorded))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, reading.cancel)
        try:
            with suppress(TimeoutError, asyncio.CancelledError):
                await asyncio.wait_for(reading, seconds)
        except KVLeaseError as error:
            if not recorded.requests:
                raise
            recorded.error = error
    return recorded


async def _read(client: AsyncClient, cache: str, num_requests: int, recorded: Recorded) -> None:
    async for request in client.trace(cache):
        recorded.num_dropped += request.num_dropped
        if request.key_digests:
            recorded.requests.append(request)
        elif not request.num_dropped:
            typer.echo(f"recording {cache}; press ^C to stop", err=True)
        if len(recorded.requests) >= num_requests:
            return
