"""Own `make bench-vllm`: what the connectors cost vLLM 0.32 and what they save it, beside vLLM alone in the same run.

`tests/benchmarks/engines.py [--only scheduler|first_token|throughput] [--mode offload|owned|shared]`. Nothing here is a
test: machines are noisy, and only ratios taken in one run mean anything.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(_ROOT))

from measure import Figure  # noqa: E402  # only now is the project's root known
from rich.console import Console  # noqa: E402

from tests.integrations.vllm.births import close_nursery  # noqa: E402
from tests.integrations.vllm.daemon import Daemon, serving  # noqa: E402
from tests.integrations.vllm.engine import Job, Life, Round, living, prompt  # noqa: E402

MODES: Final = {
    "offload": "KVLeaseOffloadingConnector",
    "owned": "KVLeaseOwnedConnector",
    "shared": "KVLeaseSharedConnector",
}
_TOKENS_PER_BLOCK: Final = 32
_BLOCKS: Final = (16, 256, 4096, 8192)
_GOALS_MS: Final = {16: 0.2, 256: 1.0, 4096: 10.0}
"""What finding and taking the blocks of one request may add to vLLM's own time."""
_POOL_BLOCKS: Final = 4 * max(_BLOCKS)
_ROUNDS: Final = 5
_RATIO_MIN: Final = 0.97


def main() -> int:
    """Measure what was asked for and print it."""
    parser = argparse.ArgumentParser(description="Measure vLLM with and without kvlease.")
    parser.add_argument("--only", action="append", choices=_BENCHMARKS)
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    words = parser.parse_args()
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
        from run import table_of  # noqa: PLC0415  # brings every other benchmark along

        Console(highlight=False).print(table_of(figures))
    return 0


# What the scheduler pays.


def scheduler(folder: Path, modes: Sequence[str]) -> Iterator[Figure]:
    """Yield the scheduler's time of a new request by its blocks, and of a step, per mode beside vLLM's own.

    The model computes nothing: a prompt of 8,192 blocks would take this machine an hour.
    """
    with _engines(folder, ("none", *modes), _HOLLOW) as lives:
        for num_blocks in _BLOCKS:
            found = {mode: _of_request(life, num_blocks) for mode, life in lives.items()}
            for mode in modes:
                for case in ("new", "found"):
                    yield _beside(mode, case, num_blocks, found)
        steps = {mode: _of_step(life) for mode, life in lives.items()}
        for mode in modes:
            yield _figure(f"{mode}: a step of 64 requests that decode", steps[mode], steps["none"])


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


def _of_request(life: Life, num_blocks: int) -> dict[str, float]:
    """Return the scheduler's seconds of a request of so many blocks: one that is new, and one that is cached."""
    spent: dict[str, list[float]] = {"new": [], "found": []}
    for round_ in range(_ROUNDS if num_blocks <= max(_GOALS_MS) else 2):
        tokens = prompt(num_blocks * _TOKENS_PER_BLOCK + 1, seed=1000 * num_blocks + round_)
        for case in ("new", "found"):
            spent[case].append(_seconds(life.generate([tokens], sampling={"max_tokens": 1})))
    return {case: median(seconds) for case, seconds in spent.items()}


def _of_step(life: Life) -> float:
    """Return the scheduler's seconds of one step in which every request decodes one token."""
    prompts = [prompt(64, seed=7_000_000 + index) for index in range(64)]
    done = life.generate(prompts, sampling={"max_tokens": 100})
    scheduled, updated = done.spans["schedule"][4:-4], done.spans["update_from_output"][4:-4]
    return median(one + other for one, other in zip(scheduled, updated, strict=False))


def _seconds(done: Round) -> float:
    return sum(sum(spans) for spans in done.spans.values())


def _beside(
    mode: str, case: str, num_blocks: int, found: Mapping[str, Mapping[str, float]]
) -> Figure:
    ours, floor = found[mode][case], found["none"][case]
    goal_ms = _GOALS_MS.get(num_blocks)
    added_ms = (ours - floor) * 1e3
    return Figure(
        name=f"{mode}: a request of {num_blocks:,} blocks, {case}",
        ours=ours * 1e3,
        floor=floor * 1e3,
        unit="ms",
        ratio=ours / floor,
        goal=f"adds ≤ {goal_ms:g} ms" if goal_ms else "",
        holds=added_ms <= goal_ms if goal_ms else None,
        note=f"adds {added_ms:.2f} ms",
    )


# What a user waits for.


def first_token(folder: Path, modes: Sequence[str]) -> Iterator[Figure]:
    """Yield the seconds to a first token of 2,000 tokens: computed, cached by the engine, and found by each mode."""
    job = {"engine": {"max_model_len": 4096, "max_num_batched_tokens": 4096}}
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
    """Return the time of an engine whose life before was killed."""
    with living(_job(mode, words, daemon), folder) as life:
        _first_tokens(life, questions)
        life.generate([prompt(8, seed=1)], sampling={"max_tokens": 16})
        life.kill()
    with living(_job(mode, words, daemon), folder) as life:
        life.generate([prompt(8, seed=2)], sampling={"max_tokens": 2})
        found = _first_tokens(life, questions)
        cached = life.metrics("vllm:prompt_tokens_cached")
    share = sum(cached.values()) / sum(map(len, questions)) if cached else 0.0
    return _figure(
        f"first token, {mode}, after a kill", found, cold, note=f"{share:.0%} of prompts cached"
    )


def _first_tokens(life: Life, questions: Sequence[Sequence[int]]) -> float:
    said = [life.generate([one], sampling={"max_tokens": 1}).requests[0] for one in questions]
    return median(one.seconds_to_first_token for one in said)


# What it costs where nothing is found.


def throughput(folder: Path, modes: Sequence[str]) -> Iterator[Figure]:
    """Yield tokens a second with a connector and no hit, as a ratio to the engine without; the two take turns."""
    with _engines(folder, ("none", *modes), {}) as lives:
        rates: dict[str, list[float]] = {mode: [] for mode in lives}
        for round_ in range(_ROUNDS + 1):
            prompts = [prompt(384, seed=90_000 + 100 * round_ + index) for index in range(12)]
            for mode, life in lives.items():
                done = life.generate(prompts, sampling={"max_tokens": 32, "logprobs": None})
                rates[mode].append(12 * (384 + 32) / done.seconds)
    for mode in modes:
        # The first round warms up.
        ratio = median(
            one / other for one, other in zip(rates[mode][1:], rates["none"][1:], strict=True)
        )
        yield Figure(
            name=f"{mode}: throughput without a hit",
            ours=median(rates[mode][1:]),
            floor=median(rates["none"][1:]),
            unit="tokens/s",
            ratio=ratio,
            goal=f"≥ {_RATIO_MIN} x",
            holds=ratio >= _RATIO_MIN,
        )


# Engines.


@contextmanager
def _engines(
    folder: Path, modes: Sequence[str], words: Mapping[str, Any]
) -> Iterator[dict[str, Life]]:
    """Run an engine of each mode, each with a daemon of its own; one that waits for an order takes no time."""
    with ExitStack() as stack:
        lives = {}
        for mode in modes:
            daemon = None
            if mode != "none":
                daemon = stack.enter_context(serving(_made(folder / mode)))
            lives[mode] = stack.enter_context(living(_job(mode, words, daemon), folder))
        yield lives


def _job(mode: str, words: Mapping[str, Any], daemon: Daemon | None) -> Job:
    if daemon is None:
        return Job(**words)
    extra: dict[str, Any] = {"socket": daemon.address}
    if mode == "offload":
        extra["pool_bytes"] = 1 << 29
    return Job(
        **words,
        kv_transfer_config={
            "kv_connector": MODES[mode],
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
