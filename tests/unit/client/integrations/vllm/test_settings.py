"""Laws of a connector's settings: an unknown setting, or one out of range, is refused by name."""

from pathlib import Path

import pytest

from kvlease.errors import InvalidError
from kvlease.integrations.vllm.settings import (
    VLLM_SETTINGS,
    VLLM_TRUTHS,
    ConnectorSettings,
    require_chunks,
    require_recompute,
    require_role,
)


def test_nothing_said_takes_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty extra config has every setting at its default."""
    monkeypatch.setenv("KVLEASE_ADDRESS", "unix:///run/kvlease.sock")

    settings = ConnectorSettings.read(None)

    assert settings == ConnectorSettings.read({})
    assert settings.address == "unix:///run/kvlease.sock"
    assert settings.deadline_seconds == 0.25
    assert settings.options.integrity == "xxh3"


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        pytest.param(
            {"sokcet": "/run/k.sock"},
            "sokcet: there is no such setting; did you mean socket\\?",
            id="unknown",
        ),
        pytest.param({"zzz": 1}, "zzz: .*; known are adapters, .*, write_policy", id="like none"),
        pytest.param({"deadline_ms": 0}, "deadline_ms", id="no time"),
        pytest.param({"retry_seconds": -1}, "retry_seconds", id="negative"),
        pytest.param({"pool_bytes": "much"}, "pool_bytes", id="no number"),
        pytest.param({"write_policy": "never"}, "write_policy", id="no policy"),
        pytest.param(
            {"socket": "unix://k.sock"}, "socket: 'unix://k.sock' is not", id="no address"
        ),
        pytest.param(
            {"deadline_ms": True}, "deadline_ms: .*not true or false", id="no number but 1"
        ),
    ],
)
def test_wrong_setting_is_refused_with_its_name(extra: dict[str, object], named: str) -> None:
    """A mistyped setting is named when the engine starts."""
    with pytest.raises(InvalidError, match=named):
        ConnectorSettings.read(extra)


def test_all_wrong_settings_are_named_at_once() -> None:
    """One start of the engine names all mistakes."""
    with pytest.raises(InvalidError) as caught:
        ConnectorSettings.read({"sokcet": "", "deadline_ms": 0})

    assert "sokcet" in caught.value.message
    assert "deadline_ms" in caught.value.message


def test_settings_that_the_engine_reads_are_left_to_it() -> None:
    """Settings that vLLM itself reads are left to it, as they stand in the same dictionary."""
    settings = ConnectorSettings.read({"spec_name": "X", "tenant": "a"}, {"spec_name"})

    assert settings.tenant == "a"


@pytest.mark.parametrize("name", sorted(VLLM_TRUTHS))
@pytest.mark.parametrize("word", ["false", "no", "0", "true", ""])
def test_word_that_the_engine_would_take_for_true_is_refused(name: str, word: str) -> None:
    """To vLLM every text but an empty one is true, even "false", so no text is let through to it."""
    with pytest.raises(
        InvalidError, match=f"{name}: .*true or false, .* not '{word}'; pool_byte: "
    ):
        ConnectorSettings.read({name: word, "pool_byte": 1}, VLLM_SETTINGS)


@pytest.mark.parametrize("value", [True, False, 0, 1])
def test_truth_is_left_to_the_engine(value: object) -> None:
    """What vLLM takes for what it says is left to it."""
    for name in VLLM_TRUTHS:
        assert ConnectorSettings.read({name: value}, VLLM_SETTINGS) == ConnectorSettings.read({})


@pytest.mark.parametrize(
    ("socket", "address"),
    [
        pytest.param("/run/k.sock", "unix:///run/k.sock", id="path"),
        pytest.param("unix:///run/k.sock", "unix:///run/k.sock", id="address"),
    ],
)
def test_socket_may_be_a_path(socket: str, address: str) -> None:
    """A path means the local socket at that path."""
    assert ConnectorSettings.read({"socket": socket}).address == address


@pytest.mark.parametrize("socket", ["k.sock", "./k.sock"])
def test_path_may_begin_at_the_working_directory(
    socket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The path is relative to the working directory at the engine's start, even if that changes later."""
    monkeypatch.chdir(tmp_path)
    settings = ConnectorSettings.read({"socket": socket})
    monkeypatch.chdir("/")

    assert settings.address == f"unix://{tmp_path}/k.sock"


@pytest.mark.parametrize(("socket", "path"), [("~/k.sock", "/h/k.sock"), ("~n:o/k", "/~n:o/k")])
def test_path_may_begin_at_home(socket: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell has seen the settings, so ~ is the user's home here, and the name of nobody is left as it is."""
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.chdir("/")

    assert ConnectorSettings.read({"socket": socket}).address == f"unix://{path}"


def test_malformed_address_of_the_environment_is_named_as_such(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A malformed address in the environment is not called `socket`, which nobody has set."""
    monkeypatch.setenv("KVLEASE_ADDRESS", "kvlease.sock")

    with pytest.raises(InvalidError, match=r"KVLEASE_ADDRESS: 'kvlease\.sock' is not an address"):
        ConnectorSettings.read({})


def test_checks_can_be_left_off() -> None:
    """Without `verify` no checksum is taken."""
    assert ConnectorSettings(verify=False).options.integrity == "none"


def test_address_that_hands_no_memory_over_is_refused() -> None:
    """An address that hands no memory over is refused: a daemon answers there, but an engine would find nothing."""
    elsewhere = ConnectorSettings.read({"socket": "http+unix:///run/http.sock"})
    local = ConnectorSettings.read({"socket": "/run/k.sock"})

    with pytest.raises(
        InvalidError, match=r"only through its local socket.*http.unix:///run/http.sock"
    ):
        _ = elsewhere.local_address
    assert local.local_address == "unix:///run/k.sock"


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        pytest.param("offload", [], id="offload"),
        pytest.param(
            "owned",
            ["pool_bytes", "host_bytes", "magazine_blocks", "stats", "write_policy"],
            id="owned",
        ),
        pytest.param("shared", ["pool_bytes", "host_bytes", "stats", "write_policy"], id="shared"),
    ],
)
def test_settings_that_do_nothing_in_a_mode_are_named_and_left_out(
    mode: str, names: list[str]
) -> None:
    """Settings without effect in a mode are named and left out, and all others stay as they were given."""
    settings = ConnectorSettings(
        tenant="a",
        pool_bytes=1,
        host_bytes=2,
        magazine_blocks=3,
        stats=False,
        write_policy="write-through",
    )

    left = settings.of_mode(mode)

    assert settings.without_effect(mode) == names
    assert left.without_effect(mode) == []
    defaults = {name: getattr(ConnectorSettings(), name) for name in names}
    assert left == settings.model_copy(update=defaults)
    assert ConnectorSettings().without_effect(mode) == []


@pytest.mark.parametrize("role", ["kv_both", "kv_consumer"])
def test_role_with_which_blocks_are_kept_back_is_accepted(role: str) -> None:
    """An engine that loads keeps blocks back until no step writes them."""
    require_role(role)


def test_role_with_which_blocks_are_freed_too_early_is_refused() -> None:
    """An engine that only produces is refused, with the role to set instead."""
    with pytest.raises(InvalidError, match=r"kv_role is kv_producer.*set it to kv_both"):
        require_role("kv_producer")


def test_policy_with_which_failed_loads_fail_requests_is_refused() -> None:
    """A MultiConnector with vLLM's own default is refused, with the policy to set and where."""
    require_recompute("recompute")
    with pytest.raises(InvalidError, match=r"is fail in MultiConnector's own.*set it to recompute"):
        require_recompute("fail")


@pytest.mark.parametrize(("blocks_per_chunk", "sizes"), [(1, [32, 128]), (4, [32, 32]), (4, [])])
def test_chunks_of_which_each_block_is_told_are_accepted(
    blocks_per_chunk: int, sizes: list[int]
) -> None:
    """A chunk may have several blocks if all groups' blocks are equally long."""
    require_chunks(blocks_per_chunk, sizes)


def test_chunks_that_a_load_could_begin_within_are_refused() -> None:
    """Chunks of several blocks are refused for a model with blocks of several sizes, with what to leave out."""
    with pytest.raises(InvalidError, match=r"has 2 blocks.*blocks of 32, 128 tokens; leave out"):
        require_chunks(2, [128, 32, 32])
