"""The probe of vLLM: without it, nothing is imported by accident and the refusal says what to do."""

import subprocess
import sys
import types

import pytest

from kvlease.integrations import vllm as integration
from kvlease.integrations.vllm import hooks


def test_connector_without_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who names a connector where vLLM is missing reads what is needed."""
    monkeypatch.setattr(hooks, "find_spec", lambda _: None)
    hooks.require_hooks.cache_clear()

    for name in integration.__all__:
        with pytest.raises(ImportError, match=r"needs vLLM 0\.32"):
            getattr(integration, name)


def test_unsupported_vllm_is_refused_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM without a hook is refused by the hook's name and its own version."""

    class Connector:
        """One that has but a part of the hooks."""

        reset_cache = None

    module = types.SimpleNamespace(KVConnectorBase_V1=Connector, __version__="0.19.1")
    monkeypatch.setattr(hooks, "find_spec", lambda _: object())
    monkeypatch.setattr(hooks, "import_module", lambda _: module)
    hooks.require_hooks.cache_clear()

    with pytest.raises(ImportError) as caught:
        hooks.require_hooks()

    assert "0.19.1" in str(caught.value)
    assert "KVConnectorBase_V1.get_mem_pool_context" in str(caught.value)
    assert "KVConnectorBase_V1.reset_cache" not in str(caught.value)
    assert "vllm.v1.core.block_pool.BlockPool" in str(caught.value)


def test_missing_module_counts_as_missing_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that was moved is named, not stumbled over."""

    def fail(_: str) -> object:
        raise ImportError

    monkeypatch.setattr(hooks, "import_module", fail)

    assert "vllm.v1.core.block_pool.BlockPool" in hooks.missing_hooks()


def test_unknown_name_is_no_attribute() -> None:
    """Only the public names load anything."""
    with pytest.raises(AttributeError):
        integration.Nothing  # noqa: B018

    assert dir(integration) == sorted(integration.HOMES)


def test_kvlease_imports_nothing_of_the_integration() -> None:
    """`import kvlease` costs nothing for those who have no vLLM."""
    code = "import sys, kvlease; sys.exit(any('integrations' in name for name in sys.modules))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
