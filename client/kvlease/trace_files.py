"""Own how a file holds a trace: one JSON object a line, as in Mooncake's published traces.

Each object has `timestamp` (milliseconds), `input_length` and `output_length` (tokens) and `hash_ids` (one number for
each key of the prompt, in order). If a key stands for another number of tokens than in Mooncake's traces, a first line
says so: {"kvlease_trace": 1, "tokens_per_key": 16}. `hit_length` (tokens that were found) is optional; other fields are
ignored. A file that is compressed by gzip is read, too.
"""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import numpy as np

from kvlease.errors import InvalidError
from kvlease.traces import TOKENS_PER_KEY, Trace, dense
from kvlease.units import TOKENS_MAX

LINE_BYTES_MAX: Final = 64 << 20
"""Bytes of the longest line that is read."""

_VERSION: Final = 1
_NUMBER_MAX: Final = 2**63 - 1
_SHOWN_CHARACTERS: Final = 40
_GZIP: Final = b"\x1f\x8b"
"""The first bytes of a file that is compressed by gzip."""


def read_trace(
    path: Path,
    num_requests: int | None = None,
    tell_cut: Callable[[str], None] | None = None,
) -> Trace:
    """Read a trace, or its first requests.

    If the last line ends within a request, because its writer was killed, `tell_cut` is told and the line is skipped.

    Raises:
        InvalidError: the file cannot be read, or a line is not a trace's; the message names the line and the field.
    """
    columns = _Columns()
    try:
        with _opened(path) as file:
            for number, line in _lines(file):
                try:
                    fields = _parsed(path, number, line)
                except InvalidError as error:
                    if tell_cut is None or line.endswith(b"\n") or not columns.times_ms:
                        raise
                    tell_cut(
                        f"{error.message}; the line is the last one and cut off, so it is skipped"
                    )
                    break
                if number == 1 and "kvlease_trace" in fields:
                    columns.tokens_per_key = _tokens_per_key(fields)
                    continue
                if num_requests is not None and len(columns.times_ms) >= num_requests:
                    break
                columns.add(number, fields)
    except (EOFError, zlib.error) as error:
        message = f"cannot read {path}: its gzip data is cut off or damaged; fetch the file again"
        raise InvalidError(message, resource="trace") from error
    except gzip.BadGzipFile as error:
        message = (
            f"cannot read {path}: its gzip data is damaged, or other bytes follow it; fetch the file again, or "
            "compress the trace anew"
        )
        raise InvalidError(message, resource="trace") from error
    except OSError as error:
        message = f"cannot read {path}: {error.strerror or error}"
        raise InvalidError(message, resource="trace") from error
    return columns.trace()


def write_trace(trace: Trace, path: Path) -> None:
    """Write a trace.

    Raises:
        InvalidError: the file cannot be written.
    """
    try:
        with path.open("w", encoding="ascii") as file:
            file.writelines(line + "\n" for line in _written(trace))
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}"
        raise InvalidError(message, resource="output") from error


def _written(trace: Trace) -> Iterator[str]:
    if trace.tokens_per_key != TOKENS_PER_KEY:
        yield json.dumps({"kvlease_trace": _VERSION, "tokens_per_key": trace.tokens_per_key})
    hits = None if trace.hit_tokens is None else trace.hit_tokens.tolist()
    columns = (trace.times_ms, trace.input_tokens, trace.output_tokens)
    for request, (time_ms, num_in, num_out) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        fields = {
            "timestamp": time_ms,
            "input_length": num_in,
            "output_length": num_out,
            "hash_ids": trace.keys_of(request).tolist(),
        }
        yield json.dumps(fields if hits is None else fields | {"hit_length": hits[request]})


@dataclass(slots=True)
class _Columns:
    """The requests read so far."""

    tokens_per_key: int = TOKENS_PER_KEY
    times_ms: list[int] = field(default_factory=list)
    input_tokens: list[int] = field(default_factory=list)
    output_tokens: list[int] = field(default_factory=list)
    hit_tokens: list[int] = field(default_factory=list)
    num_keys: list[int] = field(default_factory=lambda: [0])
    names: list[int] = field(default_factory=list)

    def add(self, number: int, fields: dict[str, Any]) -> None:
        """Take the request of one line."""
        time_ms = _whole(number, fields, "timestamp", _NUMBER_MAX)
        if self.times_ms and time_ms < self.times_ms[-1]:
            message = (
                f"line {number}: timestamp is {time_ms}, below the {self.times_ms[-1]} of the request above; "
                "sort the trace by time"
            )
            raise InvalidError(message, resource="timestamp")
        names = _names(number, fields)
        self.times_ms.append(time_ms)
        self.input_tokens.append(_whole(number, fields, "input_length", TOKENS_MAX))
        self.output_tokens.append(_whole(number, fields, "output_length", TOKENS_MAX))
        if "hit_length" in fields:
            self.hit_tokens.append(_whole(number, fields, "hit_length", TOKENS_MAX))
        self.num_keys.append(len(names))
        self.names += names

    def trace(self) -> Trace:
        """Return what was read."""
        has_hits = self.times_ms and len(self.hit_tokens) == len(self.times_ms)
        return Trace(
            times_ms=np.array(self.times_ms, np.int64),
            input_tokens=np.array(self.input_tokens, np.int64),
            output_tokens=np.array(self.output_tokens, np.int64),
            offsets=np.cumsum(self.num_keys, dtype=np.int64),
            key_ids=dense(np.array(self.names, np.int64)),
            tokens_per_key=self.tokens_per_key,
            hit_tokens=np.array(self.hit_tokens, np.int64) if has_hits else None,
        )


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a trace, even one that is compressed by gzip, whatever its name."""
    with path.open("rb") as file:
        if not file.peek(len(_GZIP)).startswith(_GZIP):
            yield file
            return
        with gzip.open(file) as unpacked:
            yield cast("BinaryIO", unpacked)


def _lines(file: Any) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers."""
    number = 0
    while line := file.readline(LINE_BYTES_MAX + 1):
        number += 1
        if len(line) > LINE_BYTES_MAX:
            message = f"line {number} has more than {LINE_BYTES_MAX} bytes; check that the file is a trace"
            raise InvalidError(message, resource="trace", limit=LINE_BYTES_MAX)
        if not line.isspace():
            yield number, line


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(_decoded(path, number, line))
    except (ValueError, RecursionError) as error:
        raise InvalidError(f"line {number} {_why_not(error)}", resource="trace") from error
    if not isinstance(fields, dict):
        message = f"line {number} is not a JSON object; a trace must have one for each request"
        raise InvalidError(message, resource="trace")
    return fields


def _decoded(path: Path, number: int, line: bytes) -> str:
    """Return the text of a line, which may begin with a mark of UTF-8."""
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        message = (
            f"{path} is no UTF-8 text (line {number}, byte {error.start + 1}); convert it to UTF-8, or check that it "
            "is a trace"
        )
        raise InvalidError(message, resource="trace") from error
    zero = line.find(b"\0")
    if zero >= 0:
        message = (
            f"{path} has a NUL byte (line {number}, byte {zero + 1}), which no trace has; remove it, or convert the "
            "file to UTF-8 if it is in UTF-16"
        )
        raise InvalidError(message, resource="trace")
    return text


def _why_not(error: ValueError | RecursionError) -> str:
    """Return in plain words why a line could not be read."""
    if isinstance(error, json.JSONDecodeError):
        return f"is not valid JSON from character {error.colno} on"
    if isinstance(error, RecursionError):
        return "has brackets nested too deeply for a request"
    # The only ValueError left is that of an integer with too many digits.
    return f"has an integer above {_NUMBER_MAX}"


def _tokens_per_key(header: dict[str, Any]) -> int:
    version = header["kvlease_trace"]
    if version != _VERSION:
        message = (
            f"line 1: kvlease_trace is {_shown(version)}; this version of kvlease reads {_VERSION}"
        )
        raise InvalidError(message, resource="kvlease_trace")
    tokens_per_key = _whole(1, header, "tokens_per_key", TOKENS_MAX)
    if not tokens_per_key:
        raise InvalidError(
            "line 1: tokens_per_key is 0; it must be at least 1", resource="tokens_per_key"
        )
    return tokens_per_key


def _names(number: int, fields: dict[str, Any]) -> list[int]:
    names = fields.get("hash_ids")
    if not isinstance(names, list):
        message = f"line {number}: hash_ids is {_shown(names)}; it must be a list of integers"
        raise InvalidError(message, resource="hash_ids")
    for place, name in enumerate(names):
        if type(name) is not int or abs(name) > _NUMBER_MAX:
            message = (
                f"line {number}: hash_ids[{place}] is {_shown(name)}; it must be a 64-bit integer"
            )
            raise InvalidError(message, resource="hash_ids")
    if len(set(names)) < len(names):
        twice = next(name for name, count in Counter(names).items() if count > 1)
        message = f"line {number}: hash_ids has {twice} twice; each id must name a whole prefix"
        raise InvalidError(message, resource="hash_ids")
    return names


def _whole(number: int, fields: dict[str, Any], name: str, most: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= most:
        message = (
            f"line {number}: {name} is {_shown(value)}; it must be an integer from 0 to {most}"
        )
        raise InvalidError(message, resource=name, limit=most)
    return value


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        # Not written out, as it may be nested to any depth.
        return "a list" if isinstance(value, list) else "an object"
    return "missing" if value is None else json.dumps(value)[:_SHOWN_CHARACTERS]
