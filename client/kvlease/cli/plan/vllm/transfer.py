"""Own what a plan says of connectors with which an engine would not start, although the plan is right."""

from collections.abc import Mapping
from typing import Any, Final

from kvlease.cli.plan.vllm.arguments import Given

_ARGUMENT: Final = "kv-transfer-config"
_JOINING: Final = "MultiConnector"
_LOADING: Final = "KVLeaseOffloadingConnector"


def warning(given: Given) -> str:
    """Return what to change in the settings of a MultiConnector so that the engine starts; empty if nothing is."""
    transfer = given.config(_ARGUMENT) if _ARGUMENT in given.values else {}
    policy = transfer.get("kv_load_failure_policy", "fail")
    if transfer.get("kv_connector") != _JOINING or policy == "recompute":
        return ""
    if not any(one.get("kv_connector") == _LOADING for one in _joined(transfer)):
        return ""
    return (
        f"With this --{_ARGUMENT} the engine does not start: kv_load_failure_policy is {str(policy)[:40]} in "
        f"{_JOINING}'s own settings, by which vLLM goes, also if {_LOADING} has its own; set it to recompute there, "
        "beside kv_role."
    )


def _joined(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    extra = transfer.get("kv_connector_extra_config")
    joined = extra.get("connectors") if isinstance(extra, Mapping) else None
    return [one for one in joined if isinstance(one, Mapping)] if isinstance(joined, list) else []
