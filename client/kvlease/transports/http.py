"""Own blocking REST connections: http.client, kept alive, over TCP or a Unix socket; `_rest` owns the form of calls."""

import http.client
import socket
from collections.abc import Iterator

from google.protobuf.message import Message

from kvlease.transports._pool import ConnectionPool
from kvlease.transports._rest import SseReader, ended, request_of, response_of, unreachable
from kvlease.transports._silence import Silence
from kvlease.transports.base import Address, Attached, Outgoing, past_deadline
from kvlease.v1 import kvlease_pb2 as pb


class HttpTransport:
    """Calls over kept-alive connections, each of which carries one at a time; threads do not wait for each other."""

    def __init__(self, address: Address) -> None:
        """Remember where the daemon listens."""
        self._address = address
        self._pool = ConnectionPool(lambda: _Connection(address))

    def __repr__(self) -> str:
        """Show life: whether it is connected."""
        return f"<HttpTransport {self._address} {self._pool}>"

    @property
    def is_open(self) -> bool:
        """Whether it holds anything that `close` would give back."""
        return self._pool.is_open

    def send(self, call: Outgoing) -> Message:
        """Send a call and return its response; raises the daemon's refusal, DeadlineError or UnavailableError."""
        connection, num_closes = self._pool.take(call)
        try:
            status, body = connection.exchange(call)
        except TimeoutError as error:
            raise past_deadline(call.verb) from error
        except (OSError, http.client.HTTPException) as error:
            # If one broke, the daemon has probably ended: a retry should not try one dead connection after another.
            self._pool.close()
            raise unreachable(self._address, error) from error
        finally:
            self._pool.put_back(connection, num_closes)
        return response_of(call.verb, status, body)

    def attach(self, call: Outgoing) -> Attached:
        """Send an attach; REST hands over no memory."""
        response = self.send(call)
        assert isinstance(response, pb.AttachResponse)
        return Attached(response, [])

    def stream(self, call: Outgoing, idle_seconds: float | None) -> Iterator[Message]:
        """Yield the answers to a watch or a trace, over its own connection, until none comes for `idle_seconds`."""
        connection = _Connection(self._address)
        silence: Silence | None = None
        try:
            answer = connection.begin(call)
            if answer.status >= 400:  # noqa: PLR2004 - HTTP's own boundary
                response_of(call.verb, answer.status, answer.read())
            silence = Silence(self._address, idle_seconds, can_ask=False)
            events = SseReader(call.verb)
            connection.limit(silence.wait_seconds())
            while chunk := answer.read1(2**16):
                for event in events.feed(chunk):
                    yield event
                    silence.note_event()
                connection.limit(silence.wait_seconds())
            raise ended()
        except TimeoutError as error:
            if silence is None:
                raise past_deadline(call.verb) from error
            if not silence.ends_stream:
                silence.ask()
        except http.client.IncompleteRead as error:
            raise unreachable(self._address, ended()) from error
        except (OSError, http.client.HTTPException) as error:
            raise unreachable(self._address, error) from error
        finally:
            connection.close()

    def close(self) -> None:
        """Close the connections; a later call would open another."""
        self._pool.close()


class _Connection:
    """One connection; it opens at its first call, and closes at any doubt about its state."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._bearer = address.bearer
        self._connection: http.client.HTTPConnection | None = None

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def exchange(self, call: Outgoing) -> tuple[int, bytes]:
        """Send a call and return the answer's status and body."""
        try:
            answer = self.begin(call)
            return answer.status, answer.read()
        except BaseException:
            # Whatever stopped us, even an interrupt: a late answer must not become the next call's.
            self.close()
            raise

    def begin(self, call: Outgoing) -> http.client.HTTPResponse:
        """Send a call and return the answer, whose body is still to be read."""
        request = request_of(call, call.token or self._bearer.token)
        connection = self._connection
        if connection is None:
            connection = self._connection = self._open(call.seconds_left())
        else:
            self.limit(call.seconds_left())
        try:
            connection.request(
                request.method, request.path, body=request.body or None, headers=request.headers
            )
        except (BrokenPipeError, ConnectionResetError) as error:
            return self._answer_before(error)
        return connection.getresponse()

    def _answer_before(self, error: OSError) -> http.client.HTTPResponse:
        """Return the answer of a daemon that refused to read the whole request; raises `error` if there is none."""
        if (connection := self._connection) is None or connection.sock is None:
            raise error
        try:
            return connection.getresponse()
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException):
            raise error from None

    def limit(self, seconds: float | None) -> None:
        """Have every read and write end after `seconds`."""
        assert self._connection is not None, "a limit without a connection"
        if self._connection.sock is not None:
            self._connection.sock.settimeout(seconds)

    def close(self) -> None:
        """Close the connection; the next call opens it again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _open(self, seconds: float) -> http.client.HTTPConnection:
        if self._address.path:
            return _UnixConnection(self._address.path, seconds)
        host, port = self._address.host, self._address.port
        if self._address.has_tls:
            context = self._address.credentials.tls()
            return http.client.HTTPSConnection(host, port, timeout=seconds, context=context)
        return http.client.HTTPConnection(host, port, timeout=seconds)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket instead of a host."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self.timeout)
            sock.connect(self._path)
        except BaseException:
            sock.close()
            raise
        self.sock = sock
