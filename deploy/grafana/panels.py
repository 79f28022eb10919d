"""Own what the board shows: rows of panels, each with its text, unit and queries; `board` owns their looks.

In a query, @S stands for the chosen jobs and instances, and @C for those and the chosen caches.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

SECONDS: Final = "s"
RATIO: Final = "percentunit"
BYTES: Final = "bytes"
BYTES_PER_SECOND: Final = "Bps"
PER_SECOND: Final = "cps"
COUNT: Final = "short"


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One panel."""

    title: str
    text: str
    """What the panel tells, and its metric."""
    unit: str
    queries: Mapping[str, str]
    """Queries by legend."""
    is_stat: bool = False
    is_stacked: bool = False
    warns_above: float | None = None
    """Number above which the panel turns yellow."""
    alarms_above: float | None = None
    """Number above which the panel turns red."""
    alarms_below: float | None = None
    """Number below which the panel is red; then no other limit is."""


def _stat(title: str, text: str, unit: str, query: str, *limits: float) -> Panel:
    warns, alarms = limits or (None, None)
    return Panel(
        title=title, text=text, unit=unit, queries={title: query}, is_stat=True,
        warns_above=warns, alarms_above=alarms,
    )  # fmt: skip


def _quantiles(metric: str, labels: str, *ranks: int) -> dict[str, str]:
    return {
        f"p{rank}": f"histogram_quantile({rank / 100:g}, sum by (le) "
        f"(rate({metric}_bucket{{{labels}}}[$__rate_interval])))"
        for rank in ranks
    }


ROWS: Final[Mapping[str, tuple[Panel, ...]]] = {
    "Overview": (
        Panel(
            title="Ready", unit=COUNT, is_stat=True, alarms_below=1,
            text="Whether all daemons grant calls: kvlease_ready; 1 is yes.",
            queries={"Ready": "min(kvlease_ready{@S})"},
        ),
        _stat(
            "Blocks held, most", "The fullest device pool: kvlease:pool_used:ratio.", RATIO,
            "max(kvlease:pool_used:ratio{@C})", 0.9, 0.98,
        ),
        _stat(
            "Largest request", "Blocks that one request can get now, in the fullest pool: kvlease_available_blocks.",
            COUNT, "min(kvlease_available_blocks{@C})",
        ),
        _stat(
            "Prefix tokens found", "The part of all requested tokens that some tier had: kvlease_prefix_tokens_total.",
            RATIO,
            'sum(rate(kvlease_prefix_tokens_total{@C, outcome!="computed"}[$__rate_interval]))'
            " / (sum(rate(kvlease_prefix_tokens_total{@C}[$__rate_interval])) > 0)",
        ),
        _stat("Leases", "Live leases: kvlease_leases.", COUNT, "sum(kvlease_leases{@C})"),
        _stat(
            "Reserve, p99", "Seconds of 99 of 100 reserves, waits included: kvlease_request_seconds.", SECONDS,
            "histogram_quantile(0.99, sum by (le) "
            '(rate(kvlease_request_seconds_bucket{@S, verb="reserve"}[$__rate_interval])))',
            0.005, 0.1,
        ),
        _stat(
            "Refused for want of room", "Calls a second with POOL_FULL: kvlease_refusals_total.", PER_SECOND,
            'sum(rate(kvlease_refusals_total{@C, code="POOL_FULL"}[$__rate_interval]))', 0.01, 1,
        ),
        _stat(
            "Evictions", "Blocks a second that leave the device to make room: kvlease_evictions_total.", PER_SECOND,
            'sum(rate(kvlease_evictions_total{@C, tier="device", reason="evicted"}[$__rate_interval]))',
        ),
    ),
    "Pools": (
        Panel(
            title="Device blocks by state", unit=COUNT, is_stacked=True,
            text="All blocks of the device pools: kvlease_blocks. Ready ones are cached, or held by leases as well.",
            queries={"{{state}}": 'sum by (state) (kvlease_blocks{@C, tier="device"})'},
        ),
        Panel(
            title="Bytes in use by tier", unit=BYTES,
            text="Bytes of blocks that are neither free nor out of use, over all ranks: kvlease_pool_bytes.",
            queries={"{{tier}}": 'sum by (tier) (kvlease_pool_bytes{@C, state!~"free|parked|bad"})'},
        ),
        Panel(
            title="Blocks held by cache", unit=RATIO, warns_above=0.9, alarms_above=0.98,
            text="The part of each device pool that can be neither granted nor evicted: kvlease:pool_used:ratio. "
            "A pool that one engine took as a whole has none.",
            queries={"{{cache}} {{instance}}": "kvlease:pool_used:ratio{@C}"},
        ),
        Panel(
            title="Device blocks by tenant", unit=COUNT, is_stacked=True,
            text="Cached and held blocks by whose bytes they hold: kvlease_tenant_blocks.",
            queries={"{{tenant}} {{state}}": 'sum by (tenant, state) (kvlease_tenant_blocks{@C, tier="device"})'},
        ),
        Panel(
            title="Pinned device blocks by tenant", unit=COUNT, is_stacked=True,
            text="Held blocks that stay until they are unpinned: kvlease_tenant_pinned_blocks.",
            queries={"{{tenant}}": "sum by (tenant) (kvlease_tenant_pinned_blocks{@C})"},
        ),
        Panel(
            title="Bytes that hold nothing, by group", unit=BYTES,
            text="Behind the last token of leases, and padding: kvlease_group_unfilled_bytes, …_padding_bytes.",
            queries={
                "{{cache}} {{group}} unfilled": "sum by (cache, group) (kvlease_group_unfilled_bytes{@C})",
                "{{cache}} {{group}} padding": "sum by (cache, group) (kvlease_group_padding_bytes{@C})",
            },
        ),
        Panel(
            title="Bytes that hold nothing, by plan", unit=BYTES, is_stacked=True,
            text="What the plan wastes whatever is cached, by cause: kvlease_plan_waste_bytes.",
            queries={"{{tier}} {{cause}}": "sum by (tier, cause) (kvlease_plan_waste_bytes{@C})"},
        ),
    ),
    "Calls": (
        Panel(
            title="Calls by verb and answer", unit=PER_SECOND,
            text="Answered calls a second; the code is OK or an error's: kvlease_requests_total.",
            queries={"{{verb}} {{code}}": "sum by (verb, code) (rate(kvlease_requests_total{@S}[$__rate_interval]))"},
        ),
        Panel(
            title="Seconds of a reserve", unit=SECONDS,
            text="From reading the call to writing its answer, waits included: kvlease_request_seconds.",
            queries=_quantiles("kvlease_request_seconds", '@S, verb="reserve"', 50, 95, 99),
        ),
        Panel(
            title="Seconds of a call by verb, p99", unit=SECONDS,
            text="99 of 100 calls of each verb are not slower: kvlease:request_seconds:p99_rate5m.",
            queries={"{{verb}} {{instance}}": "kvlease:request_seconds:p99_rate5m{@S}"},
        ),
        Panel(
            title="Refusals by reason", unit=PER_SECOND,
            text="The rule that was broken, or what there was too little of: kvlease_refusals_total.",
            queries={"{{code}} {{reason}}": "sum by (code, reason) (kvlease:refusals:rate5m{@C})"},
        ),
        Panel(
            title="Calls that wait", unit=COUNT, is_stacked=True,
            text="Requests that wait for blocks, by priority: kvlease_waiting_requests.",
            queries={"{{priority}}": "sum by (priority) (kvlease_waiting_requests{@C})"},
        ),
        Panel(
            title="Seconds of waits", unit=SECONDS,
            text="The oldest now, and 95 of 100 ended ones: kvlease_waiting_oldest_seconds, kvlease_wait_seconds.",
            queries={
                "oldest now": "max(kvlease_waiting_oldest_seconds{@C})",
                "ended, p95": _quantiles("kvlease_wait_seconds", "@C", 95)["p95"],
            },
        ),
    ),
    "Leases": (
        Panel(
            title="Leases by phase", unit=COUNT, is_stacked=True,
            text="Where live leases are in their lives: kvlease_leases.",
            queries={"{{phase}}": "sum by (phase) (kvlease_leases{@C})"},
        ),
        Panel(
            title="Ages of leases", unit=SECONDS,
            text="The largest over caches of the median, of 95 of 100 and of all: kvlease_lease_age_seconds.",
            queries={"{{statistic}}": "max by (statistic) (kvlease_lease_age_seconds{@C})"},
        ),
        Panel(
            title="Beginnings and ends", unit=PER_SECOND,
            text=(
                "Leases a second that were granted, or recovered by a restart, and how they ended: "
                "kvlease_leases_granted_total, …_recovered_total, …_ended_total."
            ),
            queries={
                "granted": "sum(rate(kvlease_leases_granted_total{@C}[$__rate_interval]))",
                "recovered": "sum(rate(kvlease_leases_recovered_total{@C}[$__rate_interval]))",
                "{{reason}}": "sum by (reason) (rate(kvlease_leases_ended_total{@C}[$__rate_interval]))",
            },
        ),
        Panel(
            title="Quarantine", unit=SECONDS,
            text="How long the first of the quarantined leases has been so: kvlease_quarantined_oldest_seconds.",
            queries={"{{cache}} {{instance}}": "kvlease_quarantined_oldest_seconds{@C}"},
        ),
    ),
    "Reuse and eviction": (
        Panel(
            title="Tokens by where they came from", unit=PER_SECOND, is_stacked=True,
            text="Tokens a second of granted requests; the parts add up to the requests: kvlease_prefix_tokens_total.",
            queries={"{{outcome}}": "sum by (outcome) (rate(kvlease_prefix_tokens_total{@C}[$__rate_interval]))"},
        ),
        Panel(
            title="Prefix tokens found by cache", unit=RATIO,
            text="The part of requested tokens that some tier had, over 5 minutes: kvlease:hit:ratio_rate5m.",
            queries={"{{cache}} {{instance}}": "kvlease:hit:ratio_rate5m{@C}"},
        ),
        Panel(
            title="Blocks missed by reason", unit=PER_SECOND, is_stacked=True,
            text="Blocks of prefixes that were not found; evicted ones had been there: kvlease_missed_blocks_total.",
            queries={"{{reason}}": "sum by (reason) (rate(kvlease_missed_blocks_total{@C}[$__rate_interval]))"},
        ),
        Panel(
            title="Evicted and needed again", unit=RATIO, warns_above=0.1, alarms_above=0.2,
            text="Evicted blocks that are asked for again, per evicted block: kvlease:evicted_needed:ratio_rate15m.",
            queries={"{{cache}} {{instance}}": "kvlease:evicted_needed:ratio_rate15m{@C}"},
        ),
        Panel(
            title="Blocks that leave, by tier and reason", unit=PER_SECOND,
            text="Blocks a second that left a tier, and why: kvlease_evictions_total.",
            queries={
                "{{tier}} {{reason}}": "sum by (tier, reason) (rate(kvlease_evictions_total{@C}[$__rate_interval]))",
            },
        ),
        Panel(
            title="Life of evicted device blocks", unit=SECONDS,
            text="How long they had been findable, and idle: kvlease_block_residence_seconds, …_idle_seconds.",
            queries={
                f"{word} {name}": query
                for word in ("residence", "idle")
                for name, query in _quantiles(f"kvlease_block_{word}_seconds", '@C, tier="device"', 50, 95).items()
            },
        ),
        Panel(
            title="What ghost caches would find", unit=RATIO,
            text="The part of keys that another policy or size would have had: kvlease_ghost_hits_total.",
            queries={
                "{{cache}} {{ghost}}": "sum by (cache, ghost) (rate(kvlease_ghost_hits_total{@C}[$__rate_interval]))"
                " / (sum by (cache, ghost) (rate(kvlease_ghost_keys_total{@C}[$__rate_interval])) > 0)",
            },
        ),
    ),
    "Tiers and copies": (
        Panel(
            title="Bytes copied", unit=BYTES_PER_SECOND,
            text="Bytes a second by direction: kvlease_copy_bytes_total.",
            queries={
                "{{direction}}": "sum by (direction) "
                '(rate(kvlease_copy_bytes_total{@S, result="ok"}[$__rate_interval]))',
            },
        ),
        Panel(
            title="Bandwidth while copying", unit=BYTES_PER_SECOND,
            text="Bytes per second that movers spent on them: kvlease:copy_bandwidth:bytes_per_second_rate5m.",
            queries={"{{direction}} {{instance}}": "kvlease:copy_bandwidth:bytes_per_second_rate5m{@S}"},
        ),
        Panel(
            title="Queues of movers", unit=COUNT,
            text="Batches that wait to be sent to their mover, or that it has: kvlease_mover_queue.",
            queries={"{{mover}} {{state}}": "sum by (mover, state) (kvlease_mover_queue{@S})"},
        ),
        Panel(
            title="Oldest batch", unit=SECONDS, warns_above=10, alarms_above=60,
            text="Seconds since the oldest batch of each mover began to wait: kvlease_mover_oldest_seconds.",
            queries={"{{mover}}": "max by (mover) (kvlease_mover_oldest_seconds{@S})"},
        ),
        Panel(
            title="What went wrong", unit=PER_SECOND,
            text="Copies that failed or were lost, and blocks that came back with other bytes or not at all.",
            queries={
                name.replace("_", " "): f"sum(rate(kvlease_{name}_total{{@C}}[$__rate_interval]))"
                for name in (
                    "copies_failed", "copies_lost", "checksum_failures", "disk_failures", "store_failures",
                    "remote_misses",
                )
            },
        ),
        Panel(
            title="Lower tiers that work", unit=COUNT,
            text="1 where a lower tier works, 0 where everything in it is a miss: kvlease_tier_up.",
            queries={"{{cache}} {{tier}}": "min by (cache, tier) (kvlease_tier_up{@C})"},
        ),
    ),
    "Process": (
        Panel(
            title="Lag of the event loop", unit=SECONDS, warns_above=0.02, alarms_above=0.1,
            text="How late the control process hears a clock: kvlease_loop_lag_seconds.",
            queries=_quantiles("kvlease_loop_lag_seconds", "@S", 50, 99),
        ),
        Panel(
            title="Memory", unit=BYTES,
            text="Used and allowed where least is left, and what pools have of it: kvlease_memory_used_bytes, "
            "…_limit_bytes, …_pools_bytes.",
            queries={
                "used {{instance}}": "kvlease_memory_used_bytes{@S}",
                "limit {{instance}}": "kvlease_memory_limit_bytes{@S}",
                "pools {{instance}}": "kvlease_memory_pools_bytes{@S}",
            },
        ),
        Panel(
            title="Private memory by process", unit=BYTES,
            text="Memory that a process shares with no other, so without pools: kvlease_process_private_bytes.",
            queries={"{{role}}": "sum by (role) (kvlease_process_private_bytes{@S})"},
        ),
        Panel(
            title="Open descriptors by process", unit=COUNT,
            text="Sockets, pools, clocks: kvlease_process_open_fds.",
            queries={"{{role}}": "sum by (role) (kvlease_process_open_fds{@S})"},
        ),
        Panel(
            title="Processor of the control process", unit=RATIO,
            text="The part of one core that it uses: process_cpu_seconds_total.",
            queries={"{{instance}}": "rate(process_cpu_seconds_total{@S}[$__rate_interval])"},
        ),
        Panel(
            title="Processes that were replaced", unit=PER_SECOND,
            text="Control processes and movers a second: kvlease_control_restarts_total and kvlease_mover_ends_total.",
            queries={
                "control, {{reason}}": "sum by (reason) (rate(kvlease_control_restarts_total{@S}[$__rate_interval]))",
                "mover of {{mover}}": "sum by (mover) (rate(kvlease_mover_ends_total{@S}[$__rate_interval]))",
            },
        ),
        Panel(
            title="Connections and watchers, of what there may be", unit=RATIO, warns_above=0.8, alarms_above=0.95,
            text="The part of the places that is taken: kvlease_connections and kvlease_watchers by their limits. "
            "Strangers have places of their own, and the oldest gives way: see kvlease_connections_turned_away_total.",
            queries={
                "{{listener}} {{instance}}":
                    "kvlease_connections{@S} / on (job, instance) group_left kvlease_connections_max{@S}",
                "watchers {{instance}}": "kvlease_watchers{@S} / kvlease_watchers_max{@S}",
            },
        ),
        Panel(
            title="End of the certificate", unit=SECONDS,
            text="Seconds until the one in use ends: kvlease_certificate_expires_timestamp_seconds.",
            queries={"{{instance}}": "kvlease_certificate_expires_timestamp_seconds{@S} - time()"},
        ),
        Panel(
            title="Seconds of a scrape", unit=SECONDS,
            text="What it takes to compute all this once: kvlease_scrape_seconds.",
            queries={"{{instance}}": "kvlease_scrape_seconds{@S}"},
        ),
        Panel(
            title="Builds", unit=COUNT, is_stacked=True,
            text="Daemons by version: kvlease_build_info.",
            queries={"{{version}}": "count by (version) (kvlease_build_info{@S})"},
        ),
    ),
}  # fmt: skip
"""All panels, by row."""
