"""Own what a rank's connector learns of the settings of a MultiConnector above it, by which vLLM goes."""

from typing import Any

from vllm.config import get_current_vllm_config_or_none

from kvlease.integrations.vllm.settings import require_recompute, require_role


def require_outer(own: Any, *, loads: bool) -> None:
    """Refuse settings of a MultiConnector above that a connector with its `own` settings cannot work with.

    Only in a rank does vLLM say which configuration is the engine's, so the scheduler's half cannot ask.

    Raises:
        InvalidError: the engine only produces, or, if the connector loads, a load that fails would fail its request.
    """
    config = get_current_vllm_config_or_none()
    outer = None if config is None else config.kv_transfer_config
    if outer is None or outer is own:
        return
    require_role(outer.kv_role)
    if loads:
        require_recompute(outer.kv_load_failure_policy)
