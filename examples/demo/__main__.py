"""Own the demo's beginning and end: arguments, processes, the comparison with plain Transformers, the exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
from pathlib import Path
from typing import Final

import workload
from processes import Daemon, Reference, Worker
from scenes import Play
from tally import Stage, Tally

from kvlease import AsyncClient, PlanInputs
from kvlease.errors import KVLeaseError

_DEMO_SECONDS_MAX: Final = 480.0
_START_SECONDS_MAX: Final = 90.0
_POLL_SECONDS: Final = 0.02
_LOG_LINES_SHOWN: Final = 15


def main() -> int:
    """Run the demo; return 0 only if everything held."""
    parser = argparse.ArgumentParser(prog="demo.py", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="fewer requests and shorter answers, the same faults"
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="where the model and the pools are: cpu, or a GPU such as cuda:0 (default: %(default)s)",
    )
    told = parser.parse_args()
    requests = workload.requests(is_quick=told.quick)
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="kvlease-demo-") as name:
        with Stage(tally, sum(map(len, requests.values()))) as stage:
            asyncio.run(_guarded(stage, requests, Path(name), told))
        if tally.failed_checks:
            _show_logs(stage, Path(name))
    stage.console.print(tally.table())
    for text in tally.failed_checks:
        stage.console.print(f"[red]failed:[/] {text}")
    return 1 if tally.failed_checks else 0


async def _guarded(
    stage: Stage,
    requests: dict[str, list[workload.Request]],
    directory: Path,
    told: argparse.Namespace,
) -> None:
    """Run to the end or to the deadline, and count what goes wrong as a check that failed."""
    running = asyncio.current_task()
    assert running is not None
    for ending in (signal.SIGTERM, signal.SIGHUP):
        # Left to themselves these would end this process alone, and the daemon would stay, with its memory.
        asyncio.get_running_loop().add_signal_handler(ending, running.cancel)
    try:
        async with asyncio.timeout(_DEMO_SECONDS_MAX):
            await _play(stage, requests, directory, told)
    except (TimeoutError, RuntimeError, KVLeaseError, OSError) as error:
        stage.check(False, f"no {type(error).__name__}: {error}")


async def _play(
    stage: Stage,
    requests: dict[str, list[workload.Request]],
    directory: Path,
    told: argparse.Namespace,
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        reference = await stack.enter_async_context(
            Reference(directory, told.device, is_quick=told.quick)
        )
        answers = asyncio.create_task(reference.answers())
        stage.begin("starting the daemon, and registering the model's cache")
        daemon = await stack.enter_async_context(Daemon(directory, told.device))
        operator = await stack.enter_async_context(AsyncClient(daemon.address))
        await _register(operator)

        async def start_worker(name: str) -> Worker:
            worker = Worker(name, daemon, directory, stage.stepped)
            return await stack.enter_async_context(worker)

        play = Play(
            stage=stage,
            daemon=daemon,
            operator=operator,
            requests=requests,
            first=await start_worker("first"),
            second=await start_worker("second"),
            start_worker=start_worker,
        )
        await play.run()
        tally = stage.tally
        stage.begin("waiting for the answers of plain Transformers")
        tally.compare(await answers)
        stage.check(
            tally.mismatches == 0 and len(tally.answers) == sum(map(len, requests.values())),
            f"all {tally.num_tokens} tokens equal plain Transformers",
        )
        stage.check(
            tally.is_prompt_accounted_for,
            f"each of {tally.prompt_tokens} prompt tokens was hit, reloaded or computed",
        )
        stage.check(
            tally.blocks_evicted > 0 and tally.blocks_reloaded > 0,
            "blocks were evicted and reloaded",
        )


async def _register(operator: AsyncClient) -> None:
    """Register the model's cache as soon as the daemon is there."""
    inputs = PlanInputs(
        model_config=workload.model_config(),
        tokens_per_block=workload.TOKENS_PER_BLOCK,
        device_blocks=workload.DEVICE_BLOCKS,
        host_bytes=workload.HOST_BYTES,
        model_digest=workload.MODEL_DIGEST,
    )
    async with asyncio.timeout(_START_SECONDS_MAX):
        while True:
            with contextlib.suppress(KVLeaseError):
                info = await operator.register(workload.CACHE, inputs)
                if info.status == "ready":
                    return
            await asyncio.sleep(_POLL_SECONDS)


def _show_logs(stage: Stage, directory: Path) -> None:
    for path in sorted(directory.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES_SHOWN:]
        stage.console.print(f"--- {path.name}", *lines, sep="\n", markup=False)


if __name__ == "__main__":
    sys.exit(main())
