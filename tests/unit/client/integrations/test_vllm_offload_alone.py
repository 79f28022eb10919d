"""Laws of an engine's offload connector: it is alone at its magazine."""

from dataclasses import replace

import pytest

from kvlease.errors import InvalidError
from kvlease.integrations.vllm.identity.namespace import FIELDS, Identity
from kvlease.integrations.vllm.offload.alone import open_alone
from kvlease.integrations.vllm.session.terms import Terms
from kvlease.integrations.vllm.settings import ConnectorSettings

TERMS = Terms(identity=Identity(FIELDS), inputs=None, cache="c", magazine="vllm-offload-m")


def settings(cache: str = "") -> ConnectorSettings:
    """Return settings of a daemon that is away."""
    return ConnectorSettings(socket="/nowhere.sock", start_seconds=0.01, cache=cache)


def test_a_second_connector_at_an_engines_magazine_is_refused() -> None:
    """Two offload connectors of one engine, as below MultiConnector, are refused; one at another pool is not."""
    first = open_alone(settings(), TERMS)

    with pytest.raises(InvalidError, match=r"two offload connectors.*KVLeaseOffloadingConnector"):
        open_alone(settings("c"), TERMS)
    others = [
        open_alone(settings("another"), TERMS),
        open_alone(settings(), replace(TERMS, magazine="vllm-offload-n")),
    ]

    for session in [first, *others]:
        session.close()


def test_a_connector_may_follow_one_that_is_closed() -> None:
    """An engine that starts again in the same process has the magazine's name, and is not refused."""
    open_alone(settings(), TERMS).close()

    session = open_alone(settings(), TERMS)

    session.close()
