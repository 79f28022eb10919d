"""`kvlease` with a real daemon: it finds the intended one, loses no file, and tells scripts by its exit status."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from kvlease import Client, FullAttention, PlanInputs
from kvlease.trace_files import write_trace
from kvlease.traces import Trace
from tests.acceptance.serving import ROOT, Serving, served, told_in

pytestmark = pytest.mark.acceptance

TOKENS_PER_BLOCK = 16
LAYER = FullAttention(name="l", num_kv_heads=1, head_size=16, dtype="float32")
INPUTS = PlanInputs(layers=(LAYER,), tokens_per_block=TOKENS_PER_BLOCK, device_blocks=8)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A daemon with a page, and the caches a and b."""
    ports = ("--listen-tcp", "--http-port", "0", "--grpc-port", "0")
    with served(tmp_path_factory.mktemp("daemon") / "run", *ports) as serving:
        with Client(serving.address("unix")) as client:
            for cache in ("a", "b"):
                client.register(cache, INPUTS)
            serving.until(lambda: {one.status for one in client.list_caches()} == {"ready"})
        yield serving


def kvlease(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Return exit status, output and errors of a command that can find a daemon only by `environment`."""
    others = {"XDG_RUNTIME_DIR", "KVLEASE_ADDRESS", "KVLEASE_TOKEN_FILE", "KVLEASED_RUNTIME_DIR"}
    kept = {name: value for name, value in os.environ.items() if name not in others}
    run = subprocess.run(
        [Path(sys.executable).with_name("kvlease"), *arguments],
        env=kept | {"COLUMNS": "400"} | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return run.returncode, run.stdout, run.stderr


def page_of(serving: Serving) -> str:
    """Return the daemon's address of REST on TCP."""
    said = next(one for one in told_in(Path(serving.log.name)) if one["event"] == "ready")
    return str(said["rest_on_tcp"])


def token_of(serving: Serving) -> str:
    """Return a reader's token."""
    return (serving.runtime_dir / "reader.token").read_text().strip()


def trace_of(num_keys: int) -> Trace:
    """Return a trace of one request for so many keys, with the caches' block size."""
    return Trace(
        times_ms=np.zeros(1, np.int64),
        input_tokens=np.full(1, num_keys * TOKENS_PER_BLOCK),
        output_tokens=np.zeros(1, np.int64),
        offsets=np.array([0, num_keys]),
        key_ids=np.arange(num_keys),
        tokens_per_key=TOKENS_PER_BLOCK,
    )


# Which daemon ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", ["KVLEASE_ADDRESS", "KVLEASED_RUNTIME_DIR"])
def test_page_has_the_token_of_the_daemon_that_is_meant(daemon: Serving, variable: str) -> None:
    """Port and token are those beside the socket that the environment names, and the daemon accepts the token."""
    known = {
        "KVLEASE_ADDRESS": daemon.address("unix"),
        "KVLEASED_RUNTIME_DIR": str(daemon.runtime_dir),
    }[variable]

    status, output, _ = kvlease("ui", **{variable: known})

    assert (status, output) == (0, f"{page_of(daemon)}/ui#token={token_of(daemon)}\n")


def test_page_of_the_environment_is_that_of_rest(daemon: Serving) -> None:
    """A REST address in the environment becomes the page's, and a named token file is used."""
    file = str(daemon.runtime_dir / "reader.token")

    status, output, _ = kvlease("ui", "--token-file", file, KVLEASE_ADDRESS=page_of(daemon))

    assert (status, output) == (0, f"{page_of(daemon)}/ui#token={token_of(daemon)}\n")


def test_token_of_any_characters_stands_behind_the_address(tmp_path: Path) -> None:
    """A token that has characters with a meaning in addresses, as in base64, is read there as it is."""
    token = "ab+/c==&%41#" + "0" * 32
    file = tmp_path / "reader.token"
    file.write_text(token)
    file.chmod(0o600)
    options = ["--listen-tcp", "--http-port", "0", "--grpc-port", "0"]
    with served(tmp_path / "run", *options, "--reader-token-file", str(file)) as serving:
        known = {"KVLEASE_ADDRESS": serving.address("unix")}

        status, output, _ = kvlease("ui", "--token-file", str(file), **known)

    assert status == 0
    assert parse_qs(urlsplit(output.strip()).fragment) == {"token": [token]}


def test_token_of_another_daemon_is_not_printed(daemon: Serving, tmp_path: Path) -> None:
    """A token of another directory is refused by this daemon before it is printed."""
    (tmp_path / "reader.token").write_text("0" * 32)

    status, output, errors = kvlease(
        "ui", "--address", page_of(daemon), KVLEASED_RUNTIME_DIR=str(tmp_path)
    )

    assert (status, output) == (2, "")
    assert f"does not accept the token in {tmp_path}/reader.token" in errors


def test_directory_of_the_environment_leads_to_the_daemon(daemon: Serving) -> None:
    """`KVLEASED_RUNTIME_DIR`, which tells the daemon its directory, leads the command line to it, too."""
    known = {"KVLEASED_RUNTIME_DIR": str(daemon.runtime_dir)}

    assert kvlease("health", **known)[0] == 0


# How it is ------------------------------------------------------------------------------------------------------------


def test_drain_is_seen(daemon: Serving) -> None:
    """`status` shows a drained cache as drained, and a daemon that grants no new lease as not well."""
    known = {"KVLEASE_ADDRESS": daemon.address("unix")}
    kvlease("drain", "b", **known)
    assert "ready, draining" in kvlease("status", **known)[1]
    assert kvlease("health", **known)[0] == 0

    kvlease("drain", **known)
    status, output, _ = kvlease("health", **known)
    kvlease("drain", "--undo", **known)
    kvlease("drain", "--undo", "--cache", "b", **known)

    assert (status, output.startswith("draining: ")) == (3, True)
    assert "draining" not in kvlease("status", **known)[1]


def test_lease_is_found_without_its_cache(daemon: Serving) -> None:
    """A lease is found by its id alone, in whichever cache; an id that no cache has is said to be unknown."""
    known = {"KVLEASE_ADDRESS": daemon.address("unix")}
    with Client(daemon.address("unix"), on_doubt="raise") as client:
        a, b = client.attach("a"), client.attach("b")
        leases = [one.reserve("r", num_tokens=16).lease_id for one in (a, b)]

        for lease_id in leases:
            assert f"Lease {lease_id}: " in kvlease("explain", str(lease_id), **known)[1]
        status, _, errors = kvlease("explain", str(max(leases) + 1_000), **known)
        a.close()
        b.close()

    assert len(set(leases)) == 2
    assert (status, "UNKNOWN_LEASE" in errors) == (1, True)


def test_cache_of_another_layout_is_deleted_by_name(daemon: Serving) -> None:
    """The refusal of a second layout names the command that makes room for it."""
    known = {"KVLEASE_ADDRESS": daemon.address("unix")}
    with Client(daemon.address("unix"), on_doubt="raise") as client:
        client.register("gone", INPUTS)
        other = PlanInputs(layers=(LAYER,), tokens_per_block=32, device_blocks=8)
        with pytest.raises(Exception, match="kvlease delete --cache gone") as refused:
            client.register("gone", other)

        assert kvlease("delete", "--cache", "gone", **known) == (0, "gone is deleted\n", "")
        client.register("gone", other)
        client.delete_cache("gone")

    assert "choose another name" in str(refused.value)


def test_page_and_example_of_the_quickstart_share_a_daemon(daemon: Serving) -> None:
    """Running the quickstart page's code and then the example leads to no refusal."""
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    environment = os.environ | {"KVLEASE_ADDRESS": daemon.address("unix")}

    for program in (["-c", code], [str(ROOT / "examples" / "quickstart.py")]):
        subprocess.run([sys.executable, *program], env=environment, check=True, timeout=120)


# Traces ---------------------------------------------------------------------------------------------------------------


def test_recording_that_fails_leaves_the_file_as_it_was(daemon: Serving, tmp_path: Path) -> None:
    """With --force an earlier recording is replaced by a whole one only; a failed recording leaves it alone."""
    known = {"KVLEASE_ADDRESS": daemon.address("unix")}
    path = tmp_path / "day.jsonl"
    path.write_text("of yesterday\n")
    arguments = ("trace", "record", "--output", str(path), "--seconds", "0.1")

    refused = kvlease(*arguments, "--cache", "a", **known)
    unknown = kvlease(*arguments, "--cache", "nope", "--force", **known)

    assert (refused[0], "--force" in refused[2]) == (2, True)
    assert (unknown[0], "UNKNOWN_CACHE" in unknown[2]) == (1, True)
    assert path.read_text() == "of yesterday\n"
    assert kvlease(*arguments, "--cache", "a", "--force", **known)[0] == 2
    assert path.read_text() == "of yesterday\n"
    assert list(tmp_path.iterdir()) == [path]


def test_recording_replaces_an_earlier_one(daemon: Serving, tmp_path: Path) -> None:
    """With --force, a recording replaces the earlier one once it is whole."""
    known = {"KVLEASE_ADDRESS": daemon.address("unix")}
    path, asked = tmp_path / "day.jsonl", tmp_path / "asked.jsonl"
    path.write_text("of yesterday\n")
    write_trace(trace_of(4), asked)
    arguments = ("--cache", "a", "--output", str(path), "--requests", "1", "--force")
    with ThreadPoolExecutor(1) as pool:
        recording = pool.submit(lambda: kvlease("trace", "record", *arguments, **known))
        while not recording.done():
            kvlease("trace", "replay", str(asked), "--cache", "a", **known)

    assert recording.result()[0] == 0
    assert path.read_text() != "of yesterday\n"


def test_replay_on_a_cache_that_is_too_small_says_why(daemon: Serving, tmp_path: Path) -> None:
    """A replay reports requests that can never be granted, with the reason, and by its exit status."""
    known = {"KVLEASE_ADDRESS": daemon.address("unix")}
    fits, never = tmp_path / "fits.jsonl", tmp_path / "never.jsonl"
    write_trace(trace_of(4), fits)
    write_trace(trace_of(40), never)

    status, output, _ = kvlease("trace", "replay", str(never), "--cache", "a", **known)
    told = json.loads(kvlease("trace", "replay", str(never), "--cache", "a", "--json", **known)[1])

    assert status == 1
    assert "NEVER_FITS  request 0: " in output
    assert told["reasons"]["NEVER_FITS"].startswith("request 0: ")
    assert kvlease("trace", "replay", str(fits), "--cache", "a", **known)[0] == 0


# Events ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["unix", "http+unix", "grpc+unix"])
def test_events_go_on_when_the_control_process_is_killed(tmp_path: Path, scheme: str) -> None:
    """A watcher hears of what the next control process does, and that something may have been missed."""
    with served(tmp_path / "run") as serving:
        arguments = [
            Path(sys.executable).with_name("kvlease"),
            "events",
            "--address",
            serving.address(scheme),
        ]
        with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True) as watching:
            told = watching.stdout
            assert told is not None
            try:
                with Client(serving.address("unix"), on_doubt="raise") as client:
                    client.register("before", INPUTS)
                    assert "cache_registered cache=before" in told.readline()
                    serving.kill_control()
                    serving.wait_until_ready()
                    client.register("after", INPUTS)
                lines = [told.readline(), told.readline()]
            finally:
                watching.kill()

    assert "resync" in lines[0]
    assert "cache_registered cache=after" in lines[1]


# Places ---------------------------------------------------------------------------------------------------------------


def test_sockets_may_lie_in_a_directory_of_any_name(tmp_path: Path) -> None:
    """No sign of a path ends it, or stands for another, over any transport."""
    place = tmp_path / "a?b#c;d%20e f"
    place.mkdir()
    with served(place / "run") as serving:
        for scheme in ("unix", "http+unix", "grpc+unix"):
            with Client(serving.address(scheme), on_doubt="raise") as client:
                assert not client.list_caches()
