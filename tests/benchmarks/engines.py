"""Own `make bench-vllm`: the connectors' cost to vLLM 0.32 and their savings, beside vLLM alone in the same run.

`tests/benchmarks/engines.py [--only scheduler|first_token|throughput] [--mode offload|owned|shared]`. Nothing here is a
test: machines are noisy, and only ratios taken in one run mean anything.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT))

from measure import Figure  # noqa: E402  # only now is the project's root known
from rich.console import Console  # noqa: E402

from tests.integrations.vllm.births import close_nursery, nursery, until  # noqa: E402
from tests.integrations.vllm.daemon import Daemon, serving  # noqa: E402
from tests.integrations.vllm.engine import (  # noqa: E402
    KV_BYTES,
    Job,
    Life,
    Round,
    living,
    prompt,
)

MODES: Final = {
    "offload": "KVLeaseOffloadingConnector",
    "owned": "KVLeaseOwnedConnector",
    "shared": "KVLeaseSharedConnector",
}
_TOKENS_PER_BLOCK: Final = 32
_BLOCKS: Final = (16, 256, 4096, 8192)
_GOALS_MS: Final = {16: 0.2, 256: 1.0, 4096: 10.0}
"""Most milliseconds that finding and taking a request's blocks may add to vLLM's own time, by blocks."""
_POOL_BLOCKS: Final = 4 * max(_BLOCKS)
_ALONE: Final = "offload without a daemon"
_MORE_TOKENS: Final = 7
"""Tokens of a request after the first: further steps, in which the first one's stores are planned, copied and
published, as any engine has between one request and the next."""
_ROUNDS: Final = 7
_WARM_UP_ROUNDS: Final = 2
_RATIO_MIN: Final = 0.97
_IDLE_SECONDS: Final = 0.5
_HUGE_PAGES: Final = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""What the process is started with that all engines are born of, with a connector or without: their own memory lies in
huge pages. Among small pages two engines that are alike differ by a tenth for all their lives."""


def main() -> int:
    """Measure what was asked for and print it."""
    parser = argparse.ArgumentParser(description="Measure vLLM with and without kvlease.")
    parser.add_argument("--only", action="append", choices=_BENCHMARKS)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    words = parser.parse_args()
    nursery({**Job().environ(), **_HUGE_PAGES})
    figures: list[Figure] = []
    for name in words.only or _BENCHMARKS:
        with tempfile.TemporaryDirectory(prefix="kvlease-bench-") as folder:
            for figure in _BENCHMARKS[name](Path(folder), tuple(words.mode or MODES)):
                told = f"{figure.name}: {figure.ours:,.2f} {figure.unit}, floor {figure.floor:,.2f}"
                Console(stderr=True, highlight=False, width=120).print(f"[dim]{told}[/]")
                figures.append(figure)
    close_nursery()
    if words.json:
        sys.stdout.write(json.dumps([figure.to_json() for figure in figures], indent=1) + "\n")
    else:
        from run import print_table  # noqa: PLC0415  # brings every other benchmark along

        print_table(figures)
    return 0


# Costs of the scheduler.


def scheduler(folder: Path, modes: Sequence[str]) -> Iterator[Figure]:
    """Yield the scheduler's time of a new request by its blocks, and of a step, per mode beside vLLM's own.

    The model computes nothing: a prompt of 8,192 blocks would take this machine an hour. All modes take turns. The
    connector of *offload* is also measured without a daemon, which shows the cost of vLLM's own offloading.
    """
    alone = (_ALONE,) if "offload" in modes else ()
    with _engines(folder, ("none", *alone, *modes), _HOLLOW) as lives:
        for num_blocks in _BLOCKS:
            found = _of_requests(lives, num_blocks)
            for mode in (*alone, *modes):
                for case in _CASES:
                    yield _beside(mode, case, num_blocks, found)
        steps: dict[str, list[float]] = {mode: [] for mode in lives}
        for round_ in range(_WARM_UP_ROUNDS + _ROUNDS):
            for mode, life in lives.items():
                steps[mode].append(_of_step(life, round_))
        for mode in modes:
            ours, floor = (median(steps[one][_WARM_UP_ROUNDS:]) for one in (mode, "none"))
            yield _figure(f"{mode}: a step of 64 requests that decode", ours, floor)


_HOLLOW: Final[Mapping[str, Any]] = {
    "model": "thin",
    "engine": {
        "num_gpu_blocks_override": _POOL_BLOCKS,
        "kv_cache_memory_bytes": 1 << 30,
        "max_model_len": (max(_BLOCKS) + 2) * _TOKENS_PER_BLOCK,
        "max_num_batched_tokens": (max(_BLOCKS) + 2) * _TOKENS_PER_BLOCK,
    },
    "environment": {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"},
    "sampling": {"logprobs": None},
    "is_hollow": True,
    "times": True,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spent:
    """The scheduler's time for one request."""

    seconds: float
    cpu_seconds: float
    num_calls: int


_CASES: Final = ("new", "found", "after")
"""The cases: the scheduler's time of a new request until its first step is scheduled, the same of a request that is
found the second time, and of a new one all that comes after, such as its publication."""


def _of_requests(lives: Mapping[str, Life], num_blocks: int) -> dict[str, dict[str, list[_Spent]]]:
    """Return the times of requests of so many blocks in each mode, by case; the modes take turns."""
    rounds = _ROUNDS if num_blocks <= max(_GOALS_MS) else 3
    spent: dict[str, dict[str, list[_Spent]]] = {
        mode: {case: [] for case in _CASES} for mode in lives
    }
    for round_ in range(_WARM_UP_ROUNDS + rounds):
        tokens = prompt(num_blocks * _TOKENS_PER_BLOCK + 1, seed=1000 * num_blocks + round_)
        for mode, life in lives.items():
            said = {"max_tokens": 1 + _MORE_TOKENS}
            new = life.generate([tokens], sampling=said)
            found = life.generate([tokens], sampling=said)
            if round_ >= _WARM_UP_ROUNDS:
                spent[mode]["new"].append(_until_scheduled(new))
                spent[mode]["found"].append(_until_scheduled(found))
                spent[mode]["after"].append(_afterwards(new))
    return spent


def _of_step(life: Life, round_: int) -> float:
    """Return the scheduler's seconds of one step in which every request decodes one token."""
    prompts = [prompt(64, seed=7_000_000 + 64 * round_ + index) for index in range(64)]
    done = life.generate(prompts, sampling={"max_tokens": 60})
    scheduled, updated = done.spans["schedule"][4:-4], done.spans["update_from_output"][4:-4]
    return median(one + other for one, other in zip(scheduled, updated, strict=False))


def _until_scheduled(done: Round) -> _Spent:
    """Return a request's time until its prompt was scheduled, in any number of steps."""
    last = len(done.spans["schedule"]) - _MORE_TOKENS
    return _spent(done, {"add_request": slice(None), "schedule": slice(last)})


def _afterwards(done: Round) -> _Spent:
    """Return a request's time after its prompt was scheduled."""
    last = len(done.spans["schedule"]) - _MORE_TOKENS
    return _spent(done, {"update_from_output": slice(None), "schedule": slice(last, None)})


def _spent(done: Round, parts: Mapping[str, slice]) -> _Spent:
    return _Spent(
        seconds=sum(sum(done.spans[name][part]) for name, part in parts.items()),
        cpu_seconds=sum(sum(done.cpu_spans[name][part]) for name, part in parts.items()),
        num_calls=len(done.spans.get("control_call", ())),
    )


def _beside(
    mode: str, case: str, num_blocks: int, found: Mapping[str, Mapping[str, Sequence[_Spent]]]
) -> Figure:
    """Return a figure of medians; the goal is compared with the minimum, which the machine's load affects least."""
    ours, floor = found[mode][case], found["none"][case]
    goal_ms = None if case == "after" or mode == _ALONE else _GOALS_MS.get(num_blocks)
    least_ms = 1e3 * (min(one.seconds for one in ours) - min(one.seconds for one in floor))
    cpu_ms, floor_cpu_ms = (1e3 * median(one.cpu_seconds for one in side) for side in (ours, floor))
    seconds, floor_seconds = (median(one.seconds for one in side) for side in (ours, floor))
    calls = median(one.num_calls for one in ours)
    return Figure(
        name=f"{mode}: a request of {num_blocks:,} blocks, {case}",
        ours=seconds * 1e3,
        floor=floor_seconds * 1e3,
        unit="ms",
        ratio=seconds / floor_seconds,
        goal=f"adds ≤ {goal_ms:g} ms" if goal_ms else "",
        holds=least_ms <= goal_ms if goal_ms else None,
        note=f"adds {least_ms:.2f} ms at least; of processor {cpu_ms - floor_cpu_ms:.2f} ms to {floor_cpu_ms:.2f}; "
        f"{calls:g} calls in all",
    )


# A user's wait.


def first_token(folder: Path, modes: Sequence[str]) -> Iterator[Figure]:
    """Yield the seconds to a first token of 2,000 tokens: computed, cached by the engine, and found by each mode."""
    # There is room for all prompts, and for the step's blocks that owned memory keeps free for its engine.
    job = {
        "engine": {
            "kv_cache_memory_bytes": 4 * KV_BYTES,
            "max_model_len": 4096,
            "max_num_batched_tokens": 4096,
        }
    }
    questions = [prompt(2001, seed=80 + index) for index in range(_ROUNDS)]
    with _engines(folder, ("none",), job) as lives:
        cold = _first_tokens(lives["none"], questions)
        local = _first_tokens(lives["none"], questions)
    yield _figure("first token, cached by vLLM itself", local, cold)
    for mode in modes:
        with serving(_made(folder / f"warm-{mode}")) as daemon:
            yield _warm(mode, daemon, folder, job, questions, cold)


def _warm(
    mode: str,
    daemon: Daemon,
    folder: Path,
    words: Mapping[str, Any],
    questions: Sequence[Sequence[int]],
    cold: float,
) -> Figure:
    """Return the first token's time of an engine whose previous life was killed."""
    with living(_job(mode, words, daemon.address), folder) as life:
        _first_tokens(life, questions)
        life.generate([prompt(8, seed=1)], sampling={"max_tokens": 16})
        life.kill()
    with living(_job(mode, words, daemon.address), folder) as life:
        life.generate([prompt(8, seed=2)], sampling={"max_tokens": 2})
        said = _asked(life, questions)
    share = sum(one.cached[0] for one in said) / sum(map(len, questions))
    found = median(one.requests[0].seconds_to_first_token for one in said)
    cpu_ms = 1e3 * median(one.cpu_seconds for one in said)
    note = f"{share:.0%} of prompts cached; {cpu_ms:.1f} ms of the engine's processor time"
    return _figure(f"first token, {mode}, after a kill", found, cold, note=note)


def _first_tokens(life: Life, questions: Sequence[Sequence[int]]) -> float:
    said = _asked(life, questions)
    return median(one.requests[0].seconds_to_first_token for one in said)


def _asked(life: Life, questions: Sequence[Sequence[int]]) -> list[Round]:
    return [life.generate([one], sampling={"max_tokens": 1}) for one in questions]


# Costs without hits.


def throughput(folder: Path, modes: Sequence[str]) -> Iterator[Figure]:
    """Yield tokens a second with a connector and no hit, as a ratio to the engine without; they take turns.

    The ratio is the median over rounds in which all engines did the same in turn. Two engines that are alike differ by
    a few percent for all their lives, as their memory lies; so several are started, one after another. Beside the ratio
    are that of the engines' processor time, which the machine's other load affects less, and the cost of one step. The
    connector of *offload* without a daemon has no goal: it shows what vLLM's own offloading takes of it.
    """
    alone = (_ALONE,) if "offload" in modes else ()
    for model, (what, num_lives, num_rounds) in _MODELS.items():
        done: dict[str, list[Round]] = {mode: [] for mode in ("none", *alone, *modes)}
        for number in range(num_lives):
            place = folder / f"{model} {number}"
            place.mkdir()
            with _engines(place, tuple(done), {"model": model, "times": True}) as lives:
                for mode, rounds in _rounds(lives, num_rounds).items():
                    done[mode] += rounds
        for mode in (*alone, *modes):
            goal = _RATIO_MIN if mode in MODES else None
            yield _rate(f"{mode}, {what}", done[mode], done["none"], goal)


_MODELS: Final = {
    "llama": ("4 layers of 64", 7, 9),
    "stout": ("8 layers of 512", 4, 4),
}
"""Models, with their engines' lives, and the rounds of each; beside the first one's short steps, every connector's work
shows."""
_PROMPTS: Final = 12
_PROMPT_TOKENS: Final = 384
_SAID_TOKENS: Final = 32


def _rounds(lives: Mapping[str, Life], num_rounds: int) -> dict[str, list[Round]]:
    """Have all engines answer the same new prompts in turn; return each one's rounds."""
    done: dict[str, list[Round]] = {mode: [] for mode in lives}
    order = list(lives)
    for round_ in range(_WARM_UP_ROUNDS + num_rounds):
        seed = 90_000 + 100 * round_
        prompts = [prompt(_PROMPT_TOKENS, seed=seed + index) for index in range(_PROMPTS)]
        for mode in order:
            sampling = {"max_tokens": _SAID_TOKENS, "logprobs": None}
            said = lives[mode].generate(prompts, sampling=sampling)
            if round_ >= _WARM_UP_ROUNDS:
                done[mode].append(said)
        order.append(order.pop(0))
    return done


def _rate(
    what: str, ours: Sequence[Round], floor: Sequence[Round], ratio_min: float | None
) -> Figure:
    pairs = list(zip(ours, floor, strict=True))
    ratio = median(other.seconds / one.seconds for one, other in pairs)
    cpu_ratio = median(other.cpu_seconds / one.cpu_seconds for one, other in pairs)
    calls = median(len(one.spans.get("control_call", ())) / one.steps for one in ours)
    cost = median((one.cpu_seconds - other.cpu_seconds) / one.steps for one, other in pairs)
    num_tokens = _PROMPTS * (_PROMPT_TOKENS + _SAID_TOKENS)
    return Figure(
        name=f"{what}: throughput without a hit",
        ours=num_tokens / median(one.seconds for one in ours),
        floor=num_tokens / median(one.seconds for one in floor),
        unit="tokens/s",
        ratio=ratio,
        goal="" if ratio_min is None else f"≥ {ratio_min} x",
        holds=None if ratio_min is None else ratio >= ratio_min,
        note=f"{cpu_ratio:.2f} x by processor time, {cost * 1e3:.2f} ms a step; {calls:.2f} calls a step",
    )


# Engines.


@contextmanager
def _engines(
    folder: Path, modes: Sequence[str], words: Mapping[str, Any]
) -> Iterator[dict[str, Life]]:
    """Run an engine of each mode with a daemon of its own; waiting engines use no processor time."""
    with ExitStack() as stack:
        lives = {}
        for mode in modes:
            daemon = None
            if mode in MODES:
                daemon = stack.enter_context(serving(_made(folder / mode)))
                _settle(daemon)
            address = "" if daemon is None else daemon.address
            if mode == _ALONE:
                address = f"unix://{folder}/nobody"
            lives[mode] = stack.enter_context(living(_job(mode, words, address), folder))
        yield lives


def _settle(daemon: Daemon) -> None:
    """Wait until a daemon's start is over: it imports the libraries of REST and gRPC only after it is ready."""
    tasks = Path(f"/proc/{daemon.control()}/task")

    def is_idle() -> bool:
        before = _cpu_seconds(tasks)
        time.sleep(_IDLE_SECONDS)
        return _cpu_seconds(tasks) - before < _IDLE_SECONDS / 50

    until(is_idle, "the daemon does not come to rest")


def _cpu_seconds(tasks: Path) -> float:
    return sum(int(one.read_text().split()[0]) for one in tasks.glob("*/schedstat")) / 1e9


def _job(mode: str, words: Mapping[str, Any], address: str) -> Job:
    """Return the job of an engine; one with a connector uses the daemon at this address."""
    if not address:
        return Job(**words)
    kind = mode.split(maxsplit=1)[0]
    extra: dict[str, Any] = {"socket": address}
    if kind == "offload":
        extra["pool_bytes"] = 1 << 29
    return Job(
        **words,
        kv_transfer_config={
            "kv_connector": MODES[kind],
            "kv_connector_module_path": "kvlease.integrations.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        },
    )


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _figure(name: str, ours: float, floor: float, note: str = "") -> Figure:
    return Figure(
        name=name, ours=ours * 1e3, floor=floor * 1e3, unit="ms", ratio=ours / floor, note=note
    )


_BENCHMARKS: Final[dict[str, Callable[[Path, Sequence[str]], Iterator[Figure]]]] = {
    "scheduler": scheduler,
    "first_token": first_token,
    "throughput": throughput,
}

if __name__ == "__main__":
    sys.exit(main())
