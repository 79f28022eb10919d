"""Laws of a daemon's standard streams: whether or not somebody reads them, nobody waits and nothing fails."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvleased.telemetry.streams import PIECES_MAX, Unhurried

ENOUGH_LINES = PIECES_MAX + 1000
SECONDS = 30


def lost(num_lines: int) -> str:
    """Return the line that tells of missing lines."""
    return f"lost {num_lines}\n"


def test_what_is_written_comes_in_its_order() -> None:
    """A reader gets every line in its order."""
    reader, writer = os.pipe()
    stream = Unhurried(writer, lost)

    for number in range(100):
        stream.write(f"{number}\n")
    stream.drain()
    os.close(writer)

    with os.fdopen(reader) as read:
        assert [int(line) for line in read] == [*range(100)]


def test_who_stops_reading_holds_up_nobody_and_is_told_what_is_missing() -> None:
    """Lines without room are lost and counted, and the count is written when somebody reads again."""
    reader, writer = os.pipe()
    stream = Unhurried(writer, lost)
    line = "x" * 999 + "\n"

    for _ in range(ENOUGH_LINES):
        stream.write(line)
    with ThreadPoolExecutor() as pool, os.fdopen(reader) as read:
        reading = pool.submit(list, read)
        stream.drain(SECONDS)
        os.close(writer)
        found = reading.result(SECONDS)

    told = [one for one in found if one != line]
    num_lost = sum(int(one.split()[1]) for one in told)
    assert num_lost + len(found) - len(told) == ENOUGH_LINES
    assert num_lost


def test_reader_who_is_gone_breaks_nothing() -> None:
    """Writing after the reader has gone raises nothing."""
    reader, writer = os.pipe()
    os.close(reader)
    stream = Unhurried(writer, lost)

    assert stream.write("hello\n") == len("hello\n")
    stream.drain(SECONDS)

    assert "1 lost" in repr(stream)
    os.close(writer)


def test_full_disk_costs_lines_and_the_next_line_begins_anew(tmp_path: Path) -> None:
    """The rest of a line that was cut short is not joined to the next line."""
    file = tmp_path / "log"
    script = (
        "import resource, signal, sys\n"
        "from kvleased.telemetry.streams import Unhurried\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 1 << 20))\n"
        "stream = Unhurried(1, lambda num_lost: f'lost {num_lost}\\n')\n"
        "stream.write('first\\n'); stream.write('second\\n'); stream.drain()\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "stream.write('third\\n'); stream.drain()\n"
    )

    with file.open("wb") as out:
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True, timeout=SECONDS)

    assert file.read_text() == "first\nseco\nlost 1\nthird\n"


def test_descriptor_that_somebody_made_one_that_does_not_wait_is_waited_for() -> None:
    """A full pipe in non-blocking mode is written to when there is room."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream = Unhurried(writer, lost)
    text = "y" * (1 << 18)

    stream.write(text)
    found = b""
    while len(found) < len(text):
        found += os.read(reader, 1 << 16)

    assert found.decode() == text
    stream.drain(SECONDS)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("fds", ["", "1>&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"])
def test_closed_stream_gets_something_that_swallows_all(fds: str, tmp_path: Path) -> None:
    """A closed standard stream accepts all that is written, and no file opened later gets its number."""
    out = tmp_path / "out"
    script = (
        "import json, os, sys\n"
        "from kvleased.telemetry.streams import open_closed\n"
        "open_closed()\n"
        "sys.stdout.write('hello'); sys.stdout.flush(); sys.stderr.write('hello'); sys.stderr.flush()\n"
        "opened = os.open('/dev/null', os.O_RDONLY)\n"
        f"open({str(out)!r}, 'w').write(json.dumps([opened, sorted(map(os.get_inheritable, range(3)))]))\n"
    )

    subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$1" {fds}', sys.executable, script],
        check=True,
        capture_output=True,
        timeout=SECONDS,
    )

    opened, inherited = json.loads(out.read_text())
    assert opened > 2
    assert inherited == [True] * 3
