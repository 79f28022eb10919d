"""Own REST on an event loop: one aiohttp session, over TCP or a Unix socket; `_rest` owns the form of calls."""

import asyncio
import ssl
from collections.abc import AsyncIterator

import aiohttp
from google.protobuf.message import Message

from kvlease.transports._rest import SseReader, ended, request_of, response_of, unreachable
from kvlease.transports._silence import Silence
from kvlease.transports.base import Address, Attached, Outgoing, past_deadline
from kvlease.v1 import kvlease_pb2 as pb


class AsyncHttpTransport:
    """Calls over a pool of kept-alive connections."""

    undoes = False

    def __init__(self, address: Address) -> None:
        """Remember where the daemon listens."""
        self._address = address
        self._bearer = address.bearer
        self._session: aiohttp.ClientSession | None = None

    @property
    def is_open(self) -> bool:
        """Whether it holds anything that `close` would give back."""
        return self._session is not None

    async def send(self, call: Outgoing) -> Message:
        """Send a call and return its response; raises the daemon's refusal, DeadlineError or UnavailableError."""
        request = request_of(call, call.token or self._bearer.token)
        limit = aiohttp.ClientTimeout(total=call.seconds_left())
        try:
            async with self._opened().request(
                request.method,
                self._url(request.path),
                data=request.body or None,
                headers=request.headers,
                timeout=limit,
            ) as answer:
                status, body = answer.status, await answer.read()
        except TimeoutError as error:
            raise past_deadline(call.verb) from error
        except (OSError, aiohttp.ClientError) as error:
            raise unreachable(self._address, error) from error
        return response_of(call.verb, status, body)

    async def attach(self, call: Outgoing) -> Attached:
        """Send an attach; REST hands over no memory."""
        response = await self.send(call)
        assert isinstance(response, pb.AttachResponse)
        return Attached(response, [])

    async def stream(self, call: Outgoing, idle_seconds: float | None) -> AsyncIterator[Message]:
        """Yield the answers to a watch or a trace until none has come for `idle_seconds`."""
        request = request_of(call, call.token or self._bearer.token)
        url = self._url(request.path)
        silence: Silence | None = None
        try:
            async with asyncio.timeout(call.seconds_left()):
                answer = await self._opened().get(
                    url, headers=request.headers, timeout=aiohttp.ClientTimeout(total=None)
                )
            silence = Silence(self._address, idle_seconds, can_ask=False)
            async with answer:
                if answer.status >= 400:  # noqa: PLR2004 - HTTP's own boundary
                    response_of(call.verb, answer.status, await answer.read())
                events = SseReader(call.verb)
                while True:
                    async with asyncio.timeout(silence.wait_seconds()):
                        chunk = await answer.content.readany()
                    if not chunk:
                        raise ended()
                    for event in events.feed(chunk):
                        yield event
                        silence.note_event()
        except TimeoutError as error:
            if silence is None:
                raise past_deadline(call.verb) from error
            if not silence.ends_stream:
                silence.ask()
        except aiohttp.ClientPayloadError as error:
            raise unreachable(self._address, ended()) from error
        except (OSError, aiohttp.ClientError) as error:
            raise unreachable(self._address, error) from error

    async def close(self) -> None:
        """Close all connections; a later call would open others."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = (
                aiohttp.UnixConnector(self._address.path)
                if self._address.path
                else aiohttp.TCPConnector(ssl=self._tls())
            )
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        return self._session

    def _tls(self) -> ssl.SSLContext | bool:
        return self._address.credentials.tls() if self._address.has_tls else True

    def _url(self, path: str) -> str:
        host = "localhost" if self._address.path else self._address.place
        return f"{'https' if self._address.has_tls else 'http'}://{host}{path}"
