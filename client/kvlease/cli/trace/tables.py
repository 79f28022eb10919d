"""Own how the results of `kvlease trace` read on a terminal."""

from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from kvlease.cli.sheets import Column, pairs, sheet
from kvlease.cli.trace.replay import Replayed
from kvlease.traces import Simulated, Trace

BOUND = "belady"
"""The name of the bound."""


def simulated(trace: Trace, results: Sequence[Simulated], width: int) -> Iterator[RenderableType]:
    """Yield what the trace holds, and one row per size: the hit ratio of each policy, and the bound."""
    repeated = 1 - trace.num_distinct / len(trace.key_ids)
    yield (
        f"{len(trace):,} requests, {len(trace.key_ids):,} keys, {trace.num_distinct:,} of them distinct: "
        f"{repeated:.1%} could be found in a pool that holds all keys"
    )
    policies = [one for one in dict.fromkeys(result.policy for result in results) if one != BOUND]
    columns = [Column(name=name) for name in ("blocks", *policies, f"{BOUND} (bound)")]
    by_size: dict[int, dict[str, Simulated]] = {}
    for result in results:
        by_size.setdefault(result.num_blocks, {})[result.policy] = result
    rows = []
    for num_blocks, found in sorted(by_size.items()):
        ratios = [f"{found[policy].hit_ratio:.1%}" for policy in policies]
        bound = next(iter(found.values())).bound_hit_ratio
        rows.append([f"{num_blocks:,}", *ratios, f"{bound:.1%}"])
    yield sheet(columns, rows, width)
    if not trace.is_prefix_closed:
        yield "keys of this trace do not name whole prefixes, so the bound does not hold"


def replayed(answer: Replayed) -> Iterator[RenderableType]:
    """Yield what a cache answered to a trace."""
    found = ", ".join(f"{tokens:,} {tier}" for tier, tokens in answer.hit_tokens.items() if tokens)
    refused = ", ".join(f"{count:,} {code}" for code, count in answer.refusals.items())
    rows = [
        ("requests", f"{answer.num_requests:,} in {answer.seconds:.1f} s"),
        ("tokens", f"{answer.num_tokens:,}"),
        ("found", f"{answer.hit_ratio:.1%}" + (f": tokens from {found}" if found else "")),
        ("refused", refused or "none"),
    ]
    rows += list(answer.reasons.items())
    for verb, latency in answer.latencies.items():
        text = f"p50 {latency.p50_ms:.2f} ms, p99 {latency.p99_ms:.2f} ms, at most {latency.max_ms:.2f} ms"
        rows.append((verb, text))
    if answer.late_ms_max:
        rows.append(
            (
                "late",
                f"at most {answer.late_ms_max:,.0f} ms; use a lower --speed to keep to the recorded times",
            )
        )
    yield pairs(rows)
    yield "nothing was written to the cache's memory: what the tenant of the replay finds there has no real content"
