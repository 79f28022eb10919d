"""Own what a plan says of settings with which kvlease's connectors would not work, although the plan is right."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from kvlease.cli.plan.vllm.arguments import Given
from kvlease.errors import InvalidError
from kvlease.integrations.vllm.settings import VLLM_SETTINGS, ConnectorSettings, require_role

_ARGUMENT: Final = "kv-transfer-config"
_INSTEAD: Final = "kv-offloading-size"
_JOINING: Final = "MultiConnector"
_LOADING: Final = "KVLeaseOffloadingConnector"
_OURS: Final = (_LOADING, "KVLeaseOwnedConnector", "KVLeaseSharedConnector")


def warnings(given: Given) -> Iterator[str]:
    """Yield what to change so that the engine starts, and has the connectors of kvlease that it names."""
    transfer = given.config(_ARGUMENT) if _ARGUMENT in given.values else {}
    ours = [one for one in (transfer, *_joined(transfer)) if one.get("kv_connector") in _OURS]
    if not ours:
        return
    if _INSTEAD in given.values:
        yield (
            f"With --{_INSTEAD} vLLM takes a connector of its own instead of the one in --{_ARGUMENT}, and nothing "
            "reaches kvlease; leave it out."
        )
    try:
        require_role(transfer.get("kv_role"))
        for one in ours:
            ConnectorSettings.read(_extra(one), VLLM_SETTINGS)
    except InvalidError as error:
        yield f"With this --{_ARGUMENT} the engine does not start: {error.message}."
    policy = transfer.get("kv_load_failure_policy", "fail")
    is_joined = transfer not in ours and any(one["kv_connector"] == _LOADING for one in ours)
    if is_joined and policy != "recompute":
        yield (
            f"With this --{_ARGUMENT} the engine does not start: kv_load_failure_policy is {str(policy)[:40]} in "
            f"{_JOINING}'s own settings, by which vLLM goes, also if {_LOADING} has its own; set it to recompute "
            "there, beside kv_role."
        )


def _joined(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    joined = (
        _extra(transfer).get("connectors") if transfer.get("kv_connector") == _JOINING else None
    )
    return [one for one in joined if isinstance(one, Mapping)] if isinstance(joined, list) else []


def _extra(transfer: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = transfer.get("kv_connector_extra_config")
    return extra if isinstance(extra, Mapping) else {}
