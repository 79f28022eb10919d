"""Own the series over which each alert fires or does not, and the values of each recording rule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

Series = Mapping[str, str]
"""Values, one a minute, by name and labels; job and instance are added, and no cache if the name has none."""

CACHE: Final = {"cache": "main"}
FULL: Final = {
    'kvlease_blocks{cache="main", tier="device", state="free"}': "2x200",
    'kvlease_blocks{cache="main", tier="device", state="ready"}': "98x200",
}
MADE_SMALLER: Final = {
    'kvlease_blocks{cache="main", tier="device", state="free"}': "64x10 3x200",
    'kvlease_blocks{cache="main", tier="device", state="parked"}': "0x10 60x200",
    'kvlease_blocks{cache="main", tier="device", state="bad"}': "0x10 1x200",
    'kvlease_available_blocks{cache="main"}': "64x10 3x200",
}
"""A pool that was made smaller, whose remaining blocks are all free."""
OWNED: Final = {
    'kvlease_blocks{cache="main", tier="device", state="reserved"}': "64x200",
    'kvlease_available_blocks{cache="main"}': "64x10 0x200",
    'kvlease_magazine_blocks{cache="main", magazine="1", state="private"}': "0x10 24x200",
    'kvlease_magazine_blocks{cache="main", magazine="1", state="held"}': "0x10 40x200",
}
"""A pool that one engine has taken as a whole; only the engine knows which blocks are in use."""
POOLS_OF_MOST: Final = {
    "kvlease_memory_pools_bytes": "900x20",
    "kvlease_memory_limit_bytes": "1000x20",
}
"""A container for large pools, of whose memory the processes have a small part."""
REFUSED: Final = (
    'kvlease_refusals_total{cache="main", verb="reserve", code="POOL_FULL", reason="blocks"}'
)
GRANTED: Final = 'kvlease_leases_granted_total{cache="main"}'


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case of one alert: at a minute it fires over one set of series, and not over another."""

    fires: Series
    quiet: Series
    at_minutes: int
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the alert beside severity, job and instance."""
    summary: str
    has_instance: bool = True
    has_job: bool = True
    also_fires: Sequence[Series] = ()
    """Further series over which the alert fires at the minute."""
    also_quiet: Sequence[Series] = ()
    """Further series over which the alert does not fire at any minute until then."""


ALERTS: Final[Mapping[str, Case]] = {
    "KvleaseDown": Case(
        fires={"up": "0x20"},
        quiet={"up": "0x1 1x20"},
        also_quiet=(
            {"up": "1x20", 'up{job="kvlease/postgres"}': "0x20"},
            {"up": "1x20", 'up{job="kvlease/team/node"}': "0x20"},
        ),
        at_minutes=5,
        summary="kvlease at node:7070 cannot be scraped",
    ),
    "KvleaseAbsent": Case(
        fires={'up{job="node"}': "1x20", 'up{job="kvlease/postgres"}': "1x20"},
        quiet={"up": "0x20"},
        also_quiet=({'up{job="inference/kvlease-chat"}': "1x20"},),
        at_minutes=12,
        summary="no kvlease is scraped at all",
        has_instance=False,
        has_job=False,
    ),
    "KvleaseNotReady": Case(
        fires={"kvlease_ready": "0x20"},
        quiet={"kvlease_ready": "0x3 1x20"},
        at_minutes=6,
        summary="kvlease at node:7070 is up but grants nothing",
    ),
    "KvleaseRestarting": Case(
        fires={"kvlease_epoch": "1x5 2x5 3x5 4x5"},
        quiet={"kvlease_epoch": "1x10 2x10"},
        # Three lives that ended before anybody looked.
        also_fires=(
            {
                "kvlease_epoch": "1x10 4x10",
                'kvlease_control_restarts_total{reason="ended"}': "0x10 2x10",
                'kvlease_control_restarts_total{reason="silent"}': "0x10 1x10",
            },
        ),
        at_minutes=19,
        summary="kvlease at node:7070 began 3 new lives within 30 minutes",
    ),
    "KvleaseMoversEnding": Case(
        fires={'kvlease_mover_ends_total{mover="disk"}': "0x5 1x5 2x5 5x5"},
        quiet={'kvlease_mover_ends_total{mover="disk"}': "0x5 1x15"},
        at_minutes=19,
        labels={"mover": "disk"},
        summary="movers of disk at node:7070 end again and again",
    ),
    "KvleasePoolNearlyFull": Case(
        fires=FULL | {'kvlease_available_blocks{cache="main"}': "4x20"},
        quiet=FULL | {'kvlease_available_blocks{cache="main"}': "6x20"},
        also_quiet=(MADE_SMALLER, OWNED),
        at_minutes=12,
        labels=CACHE,
        summary="main at node:7070 has 96% of its blocks held",
    ),
    "KvleasePoolExhausted": Case(
        fires={REFUSED: "0+6x30", GRANTED: "0+54x30"},
        quiet={REFUSED.replace("POOL_FULL", "NEVER_FITS"): "0+6x30", GRANTED: "0+54x30"},
        also_quiet=(
            {REFUSED: "0+6x30", GRANTED: "0+600x30"},
            {REFUSED: "0 0 1 1 2 2 3 3 4 4 5 5 5x20", GRANTED: "0+1x30"},
        ),
        at_minutes=12,
        labels=CACHE,
        summary="main at node:7070 refuses 10% of its requests for want of room",
    ),
    "KvleasePoolExhaustionPredicted": Case(
        fires=FULL | {'kvlease_available_blocks{cache="main"}': "100-2x49"},
        quiet=FULL | {'kvlease_available_blocks{cache="main"}': "20x49"},
        also_quiet=(MADE_SMALLER, OWNED),
        at_minutes=45,
        labels=CACHE,
        summary="main at node:7070 runs out of blocks within 15 minutes if it goes on so",
    ),
    "KvleaseWaitsLong": Case(
        # One call after the other, as each is refused after wait_ms_max.
        fires={'kvlease_waiting_oldest_seconds{cache="main"}': "31 1 31 1 31 1 31 1 31 1 31 1"},
        quiet={'kvlease_waiting_oldest_seconds{cache="main"}': "29x20"},
        # A single call that waited until its time was over.
        also_quiet=({'kvlease_waiting_oldest_seconds{cache="main"}': "0x2 55 0x20"},),
        at_minutes=8,
        labels=CACHE,
        summary="a call to main at node:7070 has waited for 31s",
    ),
    "KvleaseCallsSlow": Case(
        fires={
            'kvlease_request_seconds_bucket{verb="commit", transport="local", le="0.005"}': "0x30",
            'kvlease_request_seconds_bucket{verb="commit", transport="local", le="0.01"}': "0+60x30",
            'kvlease_request_seconds_bucket{verb="commit", transport="local", le="+Inf"}': "0+60x30",
        },
        quiet={
            'kvlease_request_seconds_bucket{verb="commit", transport="local", le="0.005"}': "0+60x30",
            'kvlease_request_seconds_bucket{verb="commit", transport="local", le="+Inf"}': "0+60x30",
            'kvlease_request_seconds_bucket{verb="reserve", transport="local", le="0.01"}': "0x30",
            'kvlease_request_seconds_bucket{verb="reserve", transport="local", le="+Inf"}': "0+60x30",
        },
        at_minutes=16,
        labels={"verb": "commit"},
        summary="1 of 100 commit calls at node:7070 takes over 9.95ms",
    ),
    "KvleaseEventLoopLag": Case(
        fires={
            'kvlease_loop_lag_seconds_bucket{le="0.1"}': "0x30",
            'kvlease_loop_lag_seconds_bucket{le="0.2"}': "0+600x30",
            'kvlease_loop_lag_seconds_bucket{le="+Inf"}': "0+600x30",
        },
        quiet={
            'kvlease_loop_lag_seconds_bucket{le="0.1"}': "0+600x30",
            'kvlease_loop_lag_seconds_bucket{le="+Inf"}': "0+600x30",
        },
        at_minutes=12,
        summary="the event loop at node:7070 is 199ms late",
    ),
    "KvleaseEvictionThrash": Case(
        fires={
            'kvlease_missed_blocks_total{cache="main", reason="evicted"}': "0+30x60",
            'kvlease_evictions_total{cache="main", tier="device", reason="evicted"}': "0+100x60",
        },
        quiet={
            'kvlease_missed_blocks_total{cache="main", reason="evicted"}': "0+10x60",
            'kvlease_missed_blocks_total{cache="main", reason="unknown"}': "0+90x60",
            'kvlease_evictions_total{cache="main", tier="device", reason="evicted"}': "0+100x60",
        },
        at_minutes=35,
        labels=CACHE,
        summary="30% of what main at node:7070 evicts is asked for again",
    ),
    "KvleaseHitRatioCollapse": Case(
        fires={
            'kvlease_prefix_tokens_total{cache="main", outcome="device_hit"}': "0+12000x120 1441200+1200x60",
            'kvlease_prefix_tokens_total{cache="main", outcome="computed"}': "0x120 10800+10800x60",
        },
        quiet={
            'kvlease_prefix_tokens_total{cache="main", outcome="device_hit"}': "0+12x120 1441.2+1.2x60",
            'kvlease_prefix_tokens_total{cache="main", outcome="computed"}': "0x120 10.8+10.8x60",
        },
        at_minutes=160,
        labels=CACHE,
        summary="main at node:7070 finds 10% of its prefix tokens",
    ),
    "KvleaseLeasesExpiring": Case(
        fires={'kvlease_leases_expired_total{cache="main"}': "0+1x40"},
        quiet={'kvlease_leases_expired_total{cache="main"}': "0x2 1x40"},
        at_minutes=25,
        labels=CACHE,
        summary="leases of main at node:7070 run out again and again",
    ),
    "KvleaseQuarantineStuck": Case(
        fires={'kvlease_quarantined_oldest_seconds{cache="main"}': "601+60x20"},
        quiet={'kvlease_quarantined_oldest_seconds{cache="main"}': "0+60x5 0x20"},
        at_minutes=6,
        labels=CACHE,
        summary="blocks of main at node:7070 are quarantined for 16m 1s",
    ),
    "KvleaseAccountingMismatch": Case(
        fires=FULL | {
            'kvlease_blocks_held{cache="main", tier="device"}': "50x20",
            'kvlease_available_blocks{cache="main"}': "49x20",
        },
        quiet=FULL | {
            'kvlease_blocks_held{cache="main", tier="device"}': "50x20",
            'kvlease_available_blocks{cache="main"}': "50x20",
        },
        at_minutes=5,
        labels=CACHE,
        summary="the books of main at node:7070 do not agree",
    ),
    "KvleaseTierDown": Case(
        fires={'kvlease_tier_up{cache="main", tier="disk"}': "0x20"},
        quiet={'kvlease_tier_up{cache="main", tier="disk"}': "0x3 1x20"},
        # It works for a moment now and then, or hardly ever does not.
        also_fires=({'kvlease_tier_up{cache="main", tier="disk"}': "0x2 1 0x2 1 0x20"},),
        also_quiet=({'kvlease_tier_up{cache="main", tier="disk"}': "1x2 0 1x2 0 1x20"},),
        at_minutes=7,
        labels=CACHE | {"tier": "disk"},
        summary="the disk tier of main at node:7070 does not work",
    ),
    "KvleaseCopiesFailing": Case(
        fires={
            'kvlease_copies_failed_total{cache="main"}': "0+1x40",
            'kvlease_copies_lost_total{cache="main"}': "0x40",
        },
        quiet={
            'kvlease_copies_failed_total{cache="main"}': "0x40",
            'kvlease_copies_lost_total{cache="main"}': "0 1x40",
        },
        # A store that did not accept a few blocks of many.
        also_quiet=(
            {
                'kvlease_store_failures_total{cache="main", tier="remote"}': "0+1x40",
                'kvlease_blocks_moved_total{cache="main", direction="host_to_remote"}': "0+9x40",
            },
        ),
        at_minutes=25,
        labels=CACHE,
        summary="copies of main at node:7070 fail",
    ),
    "KvleaseCopiesStuck": Case(
        fires={'kvlease_mover_oldest_seconds{mover="disk"}': "61+60x20"},
        quiet={'kvlease_mover_oldest_seconds{mover="disk"}': "61 1x20"},
        at_minutes=4,
        labels={"mover": "disk"},
        summary="a copy of the disk mover at node:7070 has waited for 5m 1s",
    ),
    "KvleaseBytesDamaged": Case(
        fires={
            'kvlease_checksum_failures_total{cache="main"}': "0x10 1x10",
            'kvlease_disk_failures_total{cache="main"}': "0x20",
        },
        quiet={
            'kvlease_checksum_failures_total{cache="main"}': "3x20",
            'kvlease_disk_failures_total{cache="main"}': "0x20",
        },
        at_minutes=14,
        labels=CACHE,
        summary="main at node:7070 got back other bytes than it had written",
    ),
    "KvleaseMemoryNearLimit": Case(
        fires=POOLS_OF_MOST | {"kvlease_memory_used_bytes": "996x20"},
        quiet=POOLS_OF_MOST | {"kvlease_memory_used_bytes": "994x20"},
        also_quiet=({**POOLS_OF_MOST, "kvlease_memory_used_bytes": "20x20"},),
        at_minutes=7,
        summary="kvlease at node:7070 uses 96% of the memory that its pools leave",
    ),
    "KvleaseCredentialsStale": Case(
        fires={'kvlease_credentials_stale{what="tokens"}': "1x20"},
        quiet={'kvlease_credentials_stale{what="tokens"}': "1x3 0x20"},
        at_minutes=6,
        labels={"what": "tokens"},
        summary="kvlease at node:7070 cannot use its new tokens",
    ),
    "KvleaseCertificateExpires": Case(
        fires={"kvlease_certificate_expires_timestamp_seconds": "601200x30"},
        quiet={"kvlease_certificate_expires_timestamp_seconds": "606600x30"},
        at_minutes=20,
        summary="the certificate of kvlease at node:7070 ends in 6d 22h 40m 0s",
    ),
    "KvleaseConnectionsNearMax": Case(
        fires={
            'kvlease_connections{listener="rest_tcp"}': "900x20",
            'kvlease_connections{listener="rest_unix"}': "3x20",
            "kvlease_connections_max": "1024x20",
        },
        quiet={
            'kvlease_connections{listener="rest_tcp"}': "900x3 800x20",
            "kvlease_connections_max": "1024x20",
            'kvlease_stranger_connections{listener="rest_tcp"}': "64x20",
        },
        at_minutes=7,
        labels={"listener": "rest_tcp"},
        summary="87.89% of the places at rest_tcp of node:7070 are taken",
    ),
    "KvleaseVersionSkew": Case(
        fires={
            'kvlease_build_info{version="1", instance="a"}': "1x90",
            'kvlease_build_info{version="2", instance="b"}': "1x90",
        },
        quiet={
            'kvlease_build_info{version="1", instance="a"}': "1x90",
            'kvlease_build_info{version="1", instance="b"}': "1x90",
        },
        at_minutes=65,
        summary="2 versions of kvlease run under kvlease",
        has_instance=False,
    ),
}  # fmt: skip

RECORDS: Final[Mapping[str, tuple[Series, float]]] = {
    "kvlease:pool_used:ratio": (ALERTS["KvleasePoolNearlyFull"].fires, 0.96),
    "kvlease:hit:ratio_rate5m": (
        {
            'kvlease_prefix_tokens_total{cache="main", outcome="host_hit"}': "0+30x20",
            'kvlease_prefix_tokens_total{cache="main", outcome="computed"}': "0+90x20",
        },
        0.25,
    ),
    "kvlease:requested_tokens:rate5m": (
        {'kvlease_prefix_tokens_total{cache="main", outcome="computed"}': "0+120x20"},
        2,
    ),
    "kvlease:pool_full:ratio_rate5m": (ALERTS["KvleasePoolExhausted"].fires, 0.1),
    "kvlease:refusals:rate5m": (ALERTS["KvleasePoolExhausted"].fires, 0.1),
    "kvlease:request_seconds:p99_rate5m": (ALERTS["KvleaseCallsSlow"].fires, 0.00995),
    "kvlease:wait_seconds:p99_rate5m": (
        {
            'kvlease_wait_seconds_bucket{cache="main", verb="reserve", le="1"}': "0x20",
            'kvlease_wait_seconds_bucket{cache="main", verb="reserve", le="3"}': "0+60x20",
            'kvlease_wait_seconds_bucket{cache="main", verb="reserve", le="+Inf"}': "0+60x20",
        },
        2.98,
    ),
    "kvlease:evicted_needed:ratio_rate15m": (ALERTS["KvleaseEvictionThrash"].fires, 0.3),
    "kvlease:copy_bandwidth:bytes_per_second_rate5m": (
        {
            'kvlease_copy_bytes_total{direction="device_to_host", result="ok"}': "0+6000x20",
            'kvlease_copy_seconds_total{direction="device_to_host", result="ok"}': "0+2x20",
        },
        3000,
    ),
    "kvlease:loop_lag_seconds:p99_rate5m": (ALERTS["KvleaseEventLoopLag"].fires, 0.199),
    "kvlease:memory_used:ratio": (ALERTS["KvleaseMemoryNearLimit"].fires, 0.96),
}
"""Series and the value recorded from them at the tenth minute."""
