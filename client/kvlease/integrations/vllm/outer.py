"""Own what a rank's connector refuses of what is around it: a MultiConnector above, or another engine."""

from typing import Any

from vllm.config import get_current_vllm_config_or_none

from kvlease.errors import InvalidError
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


def require_first(*, has_engine: bool) -> None:
    """Refuse a second engine in one process: vLLM gives it the first one's connector, whose copies would go there.

    Raises:
        InvalidError: the connector has an engine; the message says how each gets a process of its own.
    """
    if has_engine:
        message = (
            "another engine of this process has the connector, of which vLLM makes one in a process; end that engine "
            "first, or leave VLLM_ENABLE_V1_MULTIPROCESSING at 1, so that each engine has a process of its own"
        )
        raise InvalidError(message, resource="engine", rule="one_engine")
