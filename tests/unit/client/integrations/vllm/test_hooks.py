"""Laws of the probe of vLLM: without vLLM, nothing is imported by accident, and the refusal says what to do."""

import logging
import subprocess
import sys
import types

import pytest

from kvlease.integrations import vllm as integration
from kvlease.integrations.vllm import hooks


@pytest.fixture(autouse=True)
def _probed_anew() -> None:
    """Forget what an earlier test found."""
    hooks.require_hooks.cache_clear()
    hooks.warn_of_another_release.cache_clear()


def test_connector_without_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM is missing, the use of a connector's name says what is needed."""
    monkeypatch.setattr(hooks, "find_spec", lambda _: None)

    for name in integration.__all__:
        with pytest.raises(ImportError, match=r"needs vLLM 0\.32"):
            getattr(integration, name)


def test_unsupported_vllm_is_refused_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that lacks a hook is refused with the hook's name and vLLM's version."""

    class Connector:
        """A connector that has only some of the hooks."""

        reset_cache = None

    module = types.SimpleNamespace(KVConnectorBase_V1=Connector, __version__="0.19.1")
    monkeypatch.setattr(hooks, "find_spec", lambda _: object())
    monkeypatch.setattr(hooks, "import_module", lambda _: module)

    with pytest.raises(ImportError) as caught:
        hooks.require_hooks("owned")

    assert "0.19.1" in str(caught.value)
    assert "KVConnectorBase_V1.get_mem_pool_context" in str(caught.value)
    assert "KVConnectorBase_V1.reset_cache" not in str(caught.value)
    assert "vllm.v1.core.block_pool.BlockPool" in str(caught.value)


@pytest.mark.parametrize(
    ("version", "num_said"), [("0.32.0", 0), ("0.32.4.dev1+cpu", 0), ("0.33.0", 1), ("0.3.2", 1)]
)
def test_release_that_is_not_tested_is_named_once(
    version: str,
    num_said: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A vLLM that has every hook is used, and the log says once if it is of another release than the tests'."""
    monkeypatch.setattr(hooks, "find_spec", lambda _: object())
    monkeypatch.setattr(hooks, "missing_hooks", lambda _: [])
    names = {name: name for name in integration.__all__}
    module = types.SimpleNamespace(__version__=version, **names)
    monkeypatch.setattr(hooks, "import_module", lambda _: module)
    monkeypatch.setattr(integration, "import_module", lambda _: module)
    monkeypatch.setattr(integration, "register", lambda: None)
    # A connector's first use filters kvlease's log, which later tests read.
    monkeypatch.setattr(logging.getLogger("kvlease"), "filters", [])

    for name in names:
        assert integration.__getattr__(name) == name
        monkeypatch.delitem(vars(integration), name)

    said = [record for record in caplog.records if getattr(record, "action", "") == "vllm_untested"]
    assert len(said) == num_said
    assert all(version in record.getMessage() for record in said)


def test_missing_module_counts_as_missing_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that was moved is named, and does not raise an import error."""

    def fail(_: str) -> object:
        raise ImportError

    monkeypatch.setattr(hooks, "import_module", fail)

    assert "vllm.v1.core.block_pool.BlockPool" in hooks.missing_hooks("shared")


def test_each_mode_needs_its_own_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that only one mode needs is no reason to refuse another mode."""
    monkeypatch.setattr(hooks, "import_module", lambda _: types.SimpleNamespace())

    lacking = {mode: " ".join(hooks.missing_hooks(mode)) for mode in hooks.MODES}

    assert [mode for mode in hooks.MODES if "OffloadingConnector" in lacking[mode]] == ["offload"]
    assert [mode for mode in hooks.MODES if "ConnectorHandshakeMetadata" in lacking[mode]] == [
        "owned",
        "shared",
    ]
    assert [mode for mode in hooks.MODES if "BlockPool" in lacking[mode]] == [*hooks.MODES]
    assert [mode for mode in hooks.MODES if "FullAttentionManager" in lacking[mode]] == ["shared"]


def test_attribute_that_a_constructor_gives_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute that a constructor sets counts as present, and a missing one as missing."""

    class OffloadingConnectorScheduler:
        """A scheduler whose constructor sets a manager."""

        def __init__(self) -> None:
            self.manager = None

    class OffloadingConnectorWorker:
        """A worker whose constructor sets no worker."""

        def __init__(self) -> None:
            self.manager = None

    classes = OffloadingConnectorScheduler, OffloadingConnectorWorker
    module = types.SimpleNamespace(**{one.__name__: one for one in classes})
    monkeypatch.setattr(hooks, "import_module", lambda _: module)

    lacking = hooks.missing_hooks("offload")

    assert "OffloadingConnectorScheduler.manager" not in lacking
    assert "OffloadingConnectorWorker.worker" in lacking


def test_unknown_name_is_no_attribute() -> None:
    """An unknown name is no attribute, as only the public names load anything."""
    with pytest.raises(AttributeError):
        integration.Nothing  # noqa: B018

    assert dir(integration) == sorted(integration.HOMES)


def test_kvlease_imports_nothing_of_the_integration() -> None:
    """`import kvlease` loads no module of the integration."""
    code = "import sys, kvlease; sys.exit(any('integrations' in name for name in sys.modules))"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
