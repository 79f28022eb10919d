"""Own a daemon under attack: its start, the attack, and the waits of a well-behaved worker."""

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from kvlease import Client, PlanInputs, Worker
from kvlease.spec import FullAttention
from tests.acceptance.serving import ROOT, Serving

PER_SECOND: Final = 250.0
"""Hostile requests a second, few enough to leave processor time: the figure is the daemon's cost of strangers."""
CONNECTIONS_MAX: Final = 128


@contextmanager
def besieged(directory: Path) -> Iterator[Serving]:
    """Run a daemon with short timeouts and a cache."""
    options = [
        "--listen-tcp",
        "--http-port",
        "0",
        "--grpc-port",
        "0",
        "--max-connections",
        str(CONNECTIONS_MAX),
    ]
    options += ["--head-seconds-max", "2", "--body-seconds-max", "2", "--idle-seconds-max", "4"]
    made = Serving(directory, *options)
    try:
        made.wait_until_ready()
        layers = [FullAttention(name="l", num_kv_heads=1, head_size=16, dtype="float16")]
        with Client(made.address("unix")) as client:
            client.register(
                "main", PlanInputs(layers=layers, tokens_per_block=16, device_blocks=64)
            )
            made.until(lambda: client.get_cache("main").status == "ready")
        yield made
    finally:
        made.stop()


def attack(
    serving: Serving, num_requests: int, *, gives_way: bool = False
) -> "subprocess.Popen[str]":
    """Start a program that makes so many hostile requests, and prints their outcomes.

    If it gives way, it runs only when the processor is idle: real strangers have machines of their own.
    """
    http_port, grpc_port = ports(Path(serving.log.name))
    command = [sys.executable, "-m", "tests.deploy.hostile", str(serving.runtime_dir)]
    command += [str(http_port), str(grpc_port), str(num_requests), str(PER_SECOND)]
    foe = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if gives_way:
        give_way(foe.pid)
    return foe


def give_way(pid: int) -> None:
    """Make a process run only when the processor is idle."""
    os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def until_ended(foe: "subprocess.Popen[str]") -> Iterator[None]:
    """Make this process give way for as long as the attack lasts."""
    while foe.poll() is None:
        yield


def percentile(worker: Worker, num_calls: int) -> float:
    """Return the 99th percentile of the seconds that a reserve and its release take."""
    seconds = []
    for number in range(num_calls):
        begun = time.perf_counter()
        worker.reserve(f"good-{number}", num_tokens=64).release()
        seconds.append(time.perf_counter() - begun)
    return statistics.quantiles(seconds, n=100)[98]


def ports(log: Path) -> tuple[int, int]:
    """Return the ports of REST and gRPC from the daemon's "ready" event."""
    text = log.read_text()
    http, grpc = (
        re.search(r"http://127.0.0.1:(\d+)", text),
        re.search(r"grpc://127.0.0.1:(\d+)", text),
    )
    assert http is not None
    assert grpc is not None
    return int(http[1]), int(grpc[1])
