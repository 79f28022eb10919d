"""Laws of `kvlease trace`: tables for people, JSON for machines, drawings, and a sentence for a senseless command."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import cast

import pytest
from typer.testing import CliRunner

from kvlease.aio import AsyncClient
from kvlease.cli import app as cli
from kvlease.cli.trace import command as trace_commands
from kvlease.cli.trace import plot as trace_plot
from kvlease.cli.trace import record as trace_record
from kvlease.cli.trace import replay as trace_replay
from kvlease.cli.trace import simulator
from kvlease.cli.trace.record import Recorded, written_at_the_end
from kvlease.errors import InvalidError
from kvlease.trace_files import read_trace
from kvlease.traces import Simulated, TracedRequest
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.traces import POLICIES

CUT = Path(__file__).parents[4] / "fixtures" / "traces" / "conversation-1000.jsonl"


def run(*arguments: str, columns: str = "200") -> tuple[int, str, str]:
    """Return exit status, output and errors of a command line."""
    result = CliRunner(env={"COLUMNS": columns}).invoke(cli.app, ["trace", *arguments])
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


def result_of(policy: str, num_blocks: int, num_hits: int) -> Simulated:
    """Return a policy's result for a hundred keys, of which 50 could be found."""
    return Simulated(
        policy=policy, num_blocks=num_blocks, num_requests=9, num_keys=100, num_hits=num_hits, num_hits_bound=50,
        seconds=0.1,
    )  # fmt: skip


def test_one_policy_and_size_is_one_object() -> None:
    """The JSON has the hit ratio, from 0 to 1, at the top beside the bound, and the same once more as a list."""
    status, output, _ = run(
        "simulate", str(CUT), "--policy", "leaf-lru", "--blocks", "2000", "--json"
    )

    answer = json.loads(output)
    assert (status, answer["policy"], answer["num_blocks"]) == (0, "leaf-lru", 2000)
    assert 0 < answer["hit_ratio"] < answer["bound_hit_ratio"] < 1
    assert answer["results"] == [{name: answer[name] for name in answer["results"][0]}]
    assert answer["num_requests"] == 1000


def test_several_policies_and_sizes_are_a_list() -> None:
    """Each size is tried with each policy, on as many requests as asked for."""
    status, output, _ = run(
        "simulate", str(CUT), "--policy", "fifo", "--policy", "lru", "--policy", "belady",
        "--blocks", "500", "--blocks", "1000", "--requests", "100", "--json",
    )  # fmt: skip

    answer = json.loads(output)
    tried = [(one["num_blocks"], one["policy"]) for one in answer["results"]]
    assert (status, answer["num_requests"], "hit_ratio" in answer) == (0, 100, False)
    assert tried == [(n, p) for n in (500, 1000) for p in ("fifo", "leaf-lru", "belady")]


def test_table_has_a_row_per_size_and_the_bound_beside_it() -> None:
    """The table shows the trace, a column for each policy, and what was possible."""
    status, output, _ = run("simulate", str(CUT), "--requests", "300", "--blocks", "800")

    lines = output.splitlines()
    assert status == 0
    assert lines[0].startswith("300 requests, ")
    assert lines[1].split() == ["blocks", *POLICIES, "belady", "(bound)"]
    assert lines[3].split()[0] == "800"
    assert len(lines[3].split()) == len(POLICIES) + 2


def test_narrow_terminal_has_every_number() -> None:
    """Where the table does not fit, each number has its own line."""
    _, output, _ = run("simulate", str(CUT), "--requests", "300", "--blocks", "800", columns="30")

    assert {line.split()[0] for line in output.splitlines()[3:]} >= {"blocks", "fifo", "belady"}


def test_keys_that_are_no_prefixes_are_told(tmp_path: Path) -> None:
    """The bound holds only for keys that name whole prefixes, and a note says so for others."""
    path = tmp_path / "open.jsonl"
    lines = [
        {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": ids}
        for ids in ([1, 2], [3, 2])
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    assert "do not name whole prefixes" in run("simulate", str(path), "--blocks", "1")[1]


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_drawing_is_of_the_named_kind(tmp_path: Path, suffix: str) -> None:
    """The drawing is a file of the kind that its name says."""
    path = tmp_path / f"hits.{suffix}"

    status, _, _ = run("simulate", str(CUT), "--requests", "200", "--plot", str(path))

    assert status == 0
    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])


def test_curves_are_by_policy_and_the_bound_comes_last() -> None:
    """Each policy has its points by size, in percent; the bound has one point for each size."""
    results = [result_of("fifo", 20, 30), result_of("fifo", 10, 20), result_of("belady", 10, 50)]

    curves = trace_plot.curves_of(results)

    assert curves == {"fifo": ([10, 20], [20.0, 30.0]), "belady (bound)": ([10, 20], [50.0, 50.0])}
    labels = [line.get_label() for line in trace_plot.drawn(curves).axes[0].get_lines()]
    assert labels == ["fifo", "belady (bound)"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        pytest.param("no/hits.png", "no such directory", id="no directory"),
        pytest.param("there.png", "it is a directory", id="directory"),
        pytest.param("hits.pdf", "it must end in", id="kind"),
    ],
)
def test_place_of_a_drawing_is_looked_at_first(tmp_path: Path, name: str, why: str) -> None:
    """Nothing is read or computed for a drawing that cannot be written, and no file is left."""
    (tmp_path / "there.png").mkdir()

    status, output, said = run("simulate", "no trace at all", "--plot", str(tmp_path / name))

    assert (status, output) == (2, "")
    assert why in said
    assert [path.name for path in tmp_path.iterdir()] == ["there.png"]


def test_drawing_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """The refusal of a drawing that cannot be written names its file."""
    with pytest.raises(InvalidError, match="cannot write"):
        trace_plot.draw([result_of("fifo", 10, 20)], tmp_path / "no" / "hits.png")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        pytest.param(("--policy", "leaf_lru"), "did you mean leaf-lru?", id="policy"),
        pytest.param(("--plot", "hits.pdf"), "it must end in .png or .svg", id="drawing"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: tuple[str, ...], why: str) -> None:
    """The refusal of a senseless command says what to change, and the exit status says that nothing was done."""
    status, output, said = run("simulate", str(CUT), "--blocks", "10", *arguments)

    assert (status, output) == (2, "")
    assert why in said


def test_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    """The refusal of a file that is no trace names the line and the field."""
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 1}\n')

    status, _, said = run("simulate", str(path), "--blocks", "10")

    assert status == 2
    assert "line 1: hash_ids is missing" in said


@pytest.mark.parametrize(
    "found",
    [
        pytest.param([], id="not installed"),
        pytest.param(
            [EntryPoint(name="traces", value="kvlease.no_such", group="kvlease.traces")],
            id="not all that it needs",
        ),
    ],
)
def test_simulation_without_a_daemon_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: list[EntryPoint]
) -> None:
    """The refusal of a simulation without the daemon's package says how to install it."""
    monkeypatch.setattr(simulator, "entry_points", lambda **_: found)

    status, _, said = run("simulate", str(CUT), "--blocks", "10")

    assert status == 2
    assert 'pip install ".[service]"' in said


def test_recording_into_nowhere_is_refused_at_once(tmp_path: Path) -> None:
    """A file that cannot be written is refused before anything is recorded."""
    status, _, said = run("record", "--cache", "demo", "--output", str(tmp_path / "no" / "a.jsonl"))

    assert status == 2
    assert "cannot write" in said


def test_recording_into_a_directory_is_refused_at_once(tmp_path: Path) -> None:
    """A directory is refused before anything is recorded, which it could not take in the end."""
    for output in (tmp_path, Path(f"{tmp_path}/")):
        status, _, said = run("record", "--cache", "demo", "--output", str(output), "--force")

        assert (status, f"{tmp_path} is a directory; name a file in it" in said) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        pytest.param((), (2, "already exists"), id="refused"),
        pytest.param(("--force",), (1, "UNAVAILABLE"), id="nobody answers"),
    ],
)
def test_recording_keeps_what_is_there(
    tmp_path: Path, arguments: tuple[str, ...], wanted: tuple[int, str]
) -> None:
    """An existing file stays as it was until something is recorded, and no other file is left."""
    output = tmp_path / "a.jsonl"
    output.write_text("of yesterday\n")
    nowhere = f"unix://{tmp_path}/none.sock"

    status, _, said = run(
        "record", "--cache", "demo", "--output", str(output), "--address", nowhere, *arguments
    )

    assert (status, wanted[1] in said) == (wanted[0], True)
    assert output.read_text() == "of yesterday\n"
    assert list(tmp_path.iterdir()) == [output]


def test_recording_into_a_pipe_or_a_device_writes_there() -> None:
    """A pipe or a device cannot be replaced, and is written to directly."""
    with written_at_the_end(Path("/dev/null"), may_replace=False) as file:
        assert file == Path("/dev/null")


@pytest.fixture
def one_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a recording bring one request, without a daemon."""
    request = TracedRequest(
        timestamp_ms=3,
        input_tokens=16,
        output_tokens=0,
        key_digests=bytes(8),
        tokens_per_key=16,
        hit_tokens=0,
        num_dropped=0,
    )

    async def recorded(*_: object) -> Recorded:
        return Recorded(requests=[request])

    monkeypatch.setattr(trace_commands, "record", recorded)


async def test_record_without_keys_is_no_request(capsys: pytest.CaptureFixture[str]) -> None:
    """The first one says that recording has begun, which is told once; a later one counts what was left out last."""

    class Told:
        async def trace(self, _: str) -> AsyncIterator[TracedRequest]:
            for num_keys, num_dropped in ((0, 0), (2, 1), (0, 4)):
                message = pb.TraceResponse(key_digests=bytes(8 * num_keys), num_dropped=num_dropped)
                yield TracedRequest.from_proto(message)

    recorded = Recorded()
    await trace_record._read(cast("AsyncClient", Told()), "demo", 9, recorded)

    assert (len(recorded.requests), recorded.num_dropped) == (1, 5)
    assert capsys.readouterr().err.count("recording demo") == 1


@pytest.mark.usefixtures("one_recorded")
def test_recording_to_standard_output_writes_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name - stands for standard output, which gets the trace and no other line; no such file is made or read."""
    monkeypatch.chdir(tmp_path)

    status, told, said = run("record", "--cache", "demo", "--output", "-")

    assert (status, [json.loads(line) for line in told.splitlines()][1]["timestamp"]) == (0, 3)
    assert said.startswith("1 request with ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("one_recorded")
def test_recording_into_a_pipe_of_the_shell_writes_there() -> None:
    """A pipe without a path, as of `| gzip` or >(gzip), gets the trace and no other line."""
    reader, writer = os.pipe()

    status, told, said = run("record", "--cache", "demo", "--output", f"/dev/fd/{writer}")
    os.close(writer)

    with os.fdopen(reader) as pipe:
        assert [json.loads(line) for line in pipe][1]["timestamp"] == 3
    assert (status, told) == (0, "")
    assert said.startswith("1 request with ")
    assert f"written to /dev/fd/{writer}" in said


@pytest.mark.usefixtures("one_recorded")
@pytest.mark.parametrize("has_room", [True, False])
def test_recording_onto_a_full_disk_is_kept_in_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_room: bool
) -> None:
    """What cannot be recorded again is not thrown away, unless there is no room for temporary files either."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path if has_room else tmp_path / "none"))

    status, told, said = run("record", "--cache", "demo", "--output", "/dev/full")

    assert (status, told) == (2, "")
    assert "cannot write /dev/full: No space left on device" in said
    kept = list(tmp_path.iterdir())
    assert len(kept) == has_room
    assert all(f"what was recorded is in {path}" in said for path in kept)
    assert all(len(read_trace(path)) == 1 for path in kept)


@pytest.mark.usefixtures("one_recorded")
def test_recording_leaves_no_temporary_file_that_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a temporary file can be made but not written, as on a disk that is full for good, none is left or named."""

    def refuse(*_: object) -> None:
        raise InvalidError("cannot write it", resource="output")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(trace_record, "write_trace", refuse)

    status, _, said = run("record", "--cache", "demo", "--output", "/dev/null")

    assert (status, said) == (2, "INVALID: cannot write it")
    assert list(tmp_path.iterdir()) == []


def test_recording_into_a_link_replaces_what_it_leads_to(tmp_path: Path) -> None:
    """The link stays a link, and the file that it leads to is replaced."""
    there, link = tmp_path / "there", tmp_path / "link"
    there.write_text("old")
    link.symlink_to(there)

    with written_at_the_end(link, may_replace=True) as file:
        file.write_text("new")

    assert (there.read_text(), link.is_symlink()) == ("new", True)


def test_recording_without_a_daemon_says_so(tmp_path: Path) -> None:
    """Where no daemon listens, a sentence says so."""
    nowhere = f"unix://{tmp_path}/none.sock"
    output = tmp_path / "a.jsonl"

    status, _, said = run(
        "record", "--cache", "demo", "--output", str(output), "--address", nowhere
    )

    assert status == 1
    assert said.startswith("UNAVAILABLE: ")


def test_keys_are_found_where_the_traces_are() -> None:
    """Equal numbers make equal keys; other numbers and other tenants make other keys."""
    trace = read_trace(CUT, 50)
    mine = [trace_replay.keys_of(trace, request, bytes(32)) for request in range(len(trace))]

    named: dict[bytes, int] = {}
    for request, packed in enumerate(mine):
        for place, number in enumerate(trace.keys_of(request).tolist()):
            assert named.setdefault(packed[32 * place : 32 * place + 32], number) == number
    assert len(named) == trace.num_distinct
    assert trace_replay.keys_of(trace, 0, bytes([1] * 32)) != mine[0]


@pytest.mark.parametrize("command", [("simulate",), ("replay", "--cache", "demo")])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", "trace.jsonl has no requests, so there is nothing", id="empty"),
        pytest.param(
            '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": []}\n',
            "trace.jsonl has no requests with keys (hash_ids)",
            id="no keys",
        ),
    ],
)
def test_trace_that_asks_for_nothing_is_refused(
    tmp_path: Path, command: tuple[str, ...], text: str, says: str
) -> None:
    """A trace that asks for nothing is refused by name, with what it lacks, before any daemon is asked."""
    path = tmp_path / "trace.jsonl"
    path.write_text(text)

    status, output, said = run(*command, str(path))

    assert (status, output) == (2, "")
    assert says in said


def test_trace_that_is_cut_off_is_simulated(tmp_path: Path) -> None:
    """A cut-off last line loses its request; a note goes to stderr, so that the output stays JSON."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(CUT.read_bytes()[:-9])

    status, output, said = run("simulate", str(path), "--blocks", "100", "--json")

    assert (status, json.loads(output)["num_requests"]) == (0, 999)
    assert said.startswith("warning: line 1000 is not valid JSON")


def test_interrupted_simulation_leaves_no_traceback(tmp_path: Path) -> None:
    """An interrupted simulation ends without a traceback."""
    program = (
        "import signal, sys; from kvlease.cli import app\nfrom kvlease.cli.trace import command\n"
        "command.read_trace = lambda *_: signal.raise_signal(signal.SIGINT)\n"
        "sys.argv = ['kvlease', 'trace', 'simulate', 'x']; app.main()"
    )

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
