"""Laws of trace files: what is written can be read again, and what is no trace is refused by line and field."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvlease.errors import InvalidError
from kvlease.trace_files import read_trace, write_trace
from kvlease.traces import Trace, TracedRequest, gathered

FIXTURE = Path(__file__).parents[2] / "fixtures" / "traces" / "conversation-1000.jsonl"
GOOD = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [4, 7]}


def written(path: Path, *lines: object) -> Path:
    """Write lines to a file."""
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def requested(timestamp_ms: int, digests: list[int]) -> TracedRequest:
    """Return a recorded request."""
    return TracedRequest(
        timestamp_ms=timestamp_ms,
        input_tokens=16 * len(digests),
        output_tokens=1,
        key_digests=np.array(digests, "<u8").tobytes(),
        tokens_per_key=16,
        hit_tokens=timestamp_ms,
        num_dropped=0,
    )


def columns(trace: Trace) -> list[object]:
    """Return all columns of a trace."""
    found = [trace.times_ms, trace.input_tokens, trace.output_tokens, trace.offsets, trace.key_ids]
    hits = None if trace.hit_tokens is None else trace.hit_tokens.tolist()
    return [*(column.tolist() for column in found), trace.tokens_per_key, hits]


def test_published_format_is_read() -> None:
    """Times, sizes and keys are those of the file; keys become numbers in the order in which they first appear."""
    trace = read_trace(FIXTURE)
    lines = [json.loads(line) for line in FIXTURE.read_text().splitlines()]

    assert (
        repr(trace)
        == f"<Trace 1000 requests, {len(trace.key_ids)} keys, {trace.num_distinct} distinct>"
    )
    assert trace.times_ms.tolist() == [line["timestamp"] for line in lines]
    assert trace.input_tokens.tolist() == [line["input_length"] for line in lines]
    assert trace.num_distinct == len({key for line in lines for key in line["hash_ids"]})
    assert trace.keys_of(0).tolist() == list(range(len(lines[0]["hash_ids"])))
    assert (trace.tokens_per_key, trace.is_prefix_closed) == (512, True)


def test_first_requests_alone_are_read_the_same() -> None:
    """Reading only the first requests gives the same as cutting off the rest."""
    assert columns(read_trace(FIXTURE, 40)) == columns(read_trace(FIXTURE).first(40))


def test_recorded_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Requests are sorted by time, digests become numbers, and the tokens and hits of keys are kept."""
    trace = gathered([requested(9, [2**64 - 1, 8]), requested(4, [2**64 - 1, 3, 1])])
    path = tmp_path / "trace.jsonl"

    write_trace(trace, path)

    assert columns(read_trace(path)) == columns(trace)
    assert columns(trace) == [[4, 9], [48, 32], [1, 1], [0, 3, 5], [0, 1, 2, 0, 3], 16, [4, 9]]


def test_keys_that_are_no_prefixes_are_told() -> None:
    """A key that follows different keys names no whole prefix."""
    closed = gathered([requested(0, [1, 2]), requested(1, [1, 3]), requested(2, [])])
    open_ = gathered([requested(0, [1, 2]), requested(1, [3, 2])])

    assert (closed.is_prefix_closed, open_.is_prefix_closed) == (True, False)


def test_empty_trace_is_one(tmp_path: Path) -> None:
    """An empty file is a trace without requests."""
    write_trace(gathered([]), tmp_path / "trace.jsonl")

    assert len(read_trace(tmp_path / "trace.jsonl")) == 0


@pytest.mark.parametrize(
    ("encoding", "why"),
    [
        pytest.param("utf-16", r"is no UTF-8 text \(line 1, byte 1\)", id="marked"),
        pytest.param("utf-16-le", r"has a NUL byte \(line 1, byte 2\).*UTF-16", id="little"),
        pytest.param("utf-16-be", r"has a NUL byte \(line 1, byte 1\).*UTF-16", id="big"),
        pytest.param("utf-32", r"is no UTF-8 text \(line 1, byte 1\)", id="four bytes"),
    ],
)
def test_file_in_another_encoding_is_refused_as_such(
    tmp_path: Path, encoding: str, why: str
) -> None:
    """The refusal names the file, and says that it is no UTF-8 text, or has bytes that no such text has."""
    text = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}\n'
    path = tmp_path / "trace.jsonl"
    path.write_bytes(text.encode(encoding))

    with pytest.raises(InvalidError, match=f"trace.jsonl {why}"):
        read_trace(path)


def test_mark_of_utf_8_is_read_over(tmp_path: Path) -> None:
    """A file that begins with the mark of UTF-8 is read like any other."""
    text = '{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": []}\n'
    (tmp_path / "trace.jsonl").write_text(text, encoding="utf-8-sig")

    assert len(read_trace(tmp_path / "trace.jsonl")) == 1


@pytest.mark.parametrize(
    ("line", "why"),
    [
        pytest.param([1], "line 2 is not a JSON object", id="list"),
        pytest.param(GOOD | {"timestamp": 1.5}, "line 2: timestamp is 1.5", id="seconds"),
        pytest.param(GOOD | {"timestamp": 4}, "line 2: timestamp is 4, below the 5", id="unsorted"),
        pytest.param(GOOD | {"input_length": -1}, "line 2: input_length is -1", id="negative"),
        pytest.param(GOOD | {"output_length": True}, "line 2: output_length is true", id="bool"),
        pytest.param(GOOD | {"hash_ids": None}, "line 2: hash_ids is missing", id="no keys"),
        pytest.param(GOOD | {"hash_ids": "ab"}, 'line 2: hash_ids is "ab"', id="text"),
        pytest.param(GOOD | {"hash_ids": [1, "x"]}, r'line 2: hash_ids\[1\] is "x"', id="name"),
        pytest.param(GOOD | {"hash_ids": [2**70]}, r"line 2: hash_ids\[0\]", id="huge"),
        pytest.param(GOOD | {"hash_ids": [1, 2, 1]}, "line 2: hash_ids has 1 twice", id="twice"),
    ],
)
def test_line_that_is_no_request_is_refused(tmp_path: Path, line: object, why: str) -> None:
    """The refusal names the line and the field, and repeats the value."""
    path = written(tmp_path / "trace.jsonl", GOOD, line)

    with pytest.raises(InvalidError, match=why):
        read_trace(path)


def test_id_that_comes_twice_in_a_long_request_is_named(tmp_path: Path) -> None:
    """An id that comes twice is named at once, however many ids are before it."""
    ids = [*range(1_000_000), 999_999]
    path = written(tmp_path / "trace.jsonl", GOOD | {"hash_ids": ids})

    with pytest.raises(InvalidError, match="line 1: hash_ids has 999999 twice"):
        read_trace(path)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        pytest.param({"kvlease_trace": 2}, "kvlease_trace is 2", id="version"),
        pytest.param({"kvlease_trace": 1}, "tokens_per_key is missing", id="missing"),
        pytest.param({"kvlease_trace": 1, "tokens_per_key": 0}, "tokens_per_key is 0", id="zero"),
    ],
)
def test_header_of_another_kind_is_refused(tmp_path: Path, header: object, why: str) -> None:
    """A header that this version does not know is refused."""
    with pytest.raises(InvalidError, match=why):
        read_trace(written(tmp_path / "trace.jsonl", header, GOOD))


@pytest.mark.parametrize("num_bytes", [1, 20, len(json.dumps(GOOD)) - 1])
def test_last_line_that_is_cut_off_is_passed_over(tmp_path: Path, num_bytes: int) -> None:
    """A last line that a kill cut off loses one request: a caller who can be told is told, any other is refused."""
    path = written(tmp_path / "trace.jsonl", GOOD, GOOD)
    with path.open("a") as file:
        file.write(json.dumps(GOOD)[:num_bytes])
    said: list[str] = []

    assert len(read_trace(path, None, said.append)) == 2
    (told,) = said
    assert told.startswith("line 3 is not valid JSON")
    assert "cut off" in told
    with pytest.raises(InvalidError, match="line 3 is not valid JSON"):
        read_trace(path)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(f'{json.dumps(GOOD)}\n{{"ti\n{json.dumps(GOOD)}\n', id="in the middle"),
        pytest.param(f'{json.dumps(GOOD)}\n{{"ti\n', id="at the end, and ended"),
        pytest.param('\n{"ti', id="alone"),
    ],
)
def test_broken_line_that_no_kill_left_is_refused(tmp_path: Path, text: str) -> None:
    """A broken line that no kill left means no trace, or a changed one: the refusal names the line."""
    (tmp_path / "trace.jsonl").write_text(text)

    with pytest.raises(InvalidError, match="line 2 is not valid JSON"):
        read_trace(tmp_path / "trace.jsonl", None, pytest.fail)


def test_text_that_is_no_json_is_refused(tmp_path: Path) -> None:
    """The refusal names the line, and empty lines are counted."""
    (tmp_path / "trace.jsonl").write_text("\nhello\n")

    with pytest.raises(InvalidError, match="line 2 is not valid JSON"):
        read_trace(tmp_path / "trace.jsonl")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        pytest.param(b"hello", "line 1 is not valid JSON from character 1 on", id="text"),
        pytest.param(b'{"a": }', "is not valid JSON from character 7 on", id="value"),
        pytest.param(
            b'{"a": "\xff"}', r"trace.jsonl is no UTF-8 text \(line 1, byte 8\)", id="bytes"
        ),
        pytest.param(
            b'{"timestamp": 0}\0', r"has a NUL byte \(line 1, byte 17\).*remove it", id="NUL"
        ),
        pytest.param(b"[" * 100_000, "brackets nested too deeply", id="deep"),
        pytest.param(b'{"timestamp": ' + b"9" * 5_000 + b"}", "has an integer above", id="digits"),
        pytest.param(
            b'{"timestamp": ' + b"[" * 500 + b"]" * 500 + b"}", "timestamp is a list", id="nested"
        ),
    ],
)
def test_refusal_of_a_line_speaks_of_the_file(tmp_path: Path, line: bytes, why: str) -> None:
    """The refusal of a line speaks of the file, and uses no words of a programming language."""
    (tmp_path / "trace.jsonl").write_bytes(line + b"\n")

    with pytest.raises(InvalidError, match=why) as refusal:
        read_trace(tmp_path / "trace.jsonl")

    said = str(refusal.value)
    assert not any(
        word in said for word in ("recursion", "delimiter", "codec", "conversion", "column")
    )


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The refusal names the file, for reading and for writing."""
    with pytest.raises(InvalidError, match=r"cannot read .*nothing\.jsonl: No such file"):
        read_trace(tmp_path / "nothing.jsonl")
    with pytest.raises(InvalidError, match=r"cannot write .*: No such file"):
        write_trace(gathered([]), tmp_path / "no" / "trace.jsonl")


def test_compressed_trace_is_read_as_what_is_in_it(tmp_path: Path) -> None:
    """A compressed trace is read by its content, whatever its name; a cut-off or damaged one is refused."""
    path = tmp_path / "day.jsonl"
    packed = gzip.compress(FIXTURE.read_bytes())
    path.write_bytes(packed)

    assert columns(read_trace(path)) == columns(read_trace(FIXTURE))
    for broken in (packed[:-100], packed[:200] + b"damaged" + packed[207:]):
        path.write_bytes(broken)
        with pytest.raises(InvalidError, match="its gzip data is cut off or damaged"):
            read_trace(path)


@pytest.mark.parametrize(
    "follow",
    [
        pytest.param(lambda packed: packed + b"junk", id="bytes behind its end"),
        pytest.param(lambda packed: packed[:-8] + bytes(8), id="another checksum"),
        pytest.param(lambda packed: packed[:2] + b"\7" + packed[3:], id="another method"),
    ],
)
def test_damage_around_compressed_data_is_told_in_our_words(
    tmp_path: Path, follow: Callable[[bytes], bytes]
) -> None:
    """What is wrong with a compressed trace is told without the words of the module that reads it."""
    path = tmp_path / "day.jsonl"
    path.write_bytes(follow(gzip.compress(FIXTURE.read_bytes())))

    with pytest.raises(InvalidError, match="is damaged, or other bytes follow it; fetch") as found:
        read_trace(path)

    assert "b'" not in str(found.value)
