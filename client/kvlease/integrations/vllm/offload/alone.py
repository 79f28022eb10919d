"""Own that an engine's scheduler opens one session at a magazine: the exchanges of two would disorder each other's.

As with `session.outages`, two connectors of an engine can find each other only by a name that both make: the place of
their sessions. A session is known here as long as somebody else holds it.
"""

from typing import Final
from weakref import WeakValueDictionary

from kvlease.errors import InvalidError
from kvlease.integrations.vllm.session.session import EngineSession, Terms
from kvlease.integrations.vllm.settings import ConnectorSettings

_opened: Final[WeakValueDictionary[tuple[str, str, str], EngineSession]] = WeakValueDictionary()


def open_alone(settings: ConnectorSettings, terms: Terms) -> EngineSession:
    """Open the session of the scheduler's half of an engine's only offload connector.

    Raises:
        InvalidError: another offload connector of the engine has the same magazine; the message says what to remove.
    """
    cache = settings.cache or terms.cache
    place = (settings.address, cache, terms.magazine)
    other = _opened.get(place)
    if other is not None and not other.is_closed:
        message = (
            f"the engine has two offload connectors at the cache {cache}, which would disorder each other's exchanges; "
            "name KVLeaseOffloadingConnector only once in MultiConnector's settings"
        )
        raise InvalidError(message, resource="connectors")
    session = _opened[place] = EngineSession.open(settings, terms)
    return session
