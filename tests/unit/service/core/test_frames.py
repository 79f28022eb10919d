"""Laws of refusals that are kept as answers: they keep nothing of the command that raised them."""

import gc

from kvlease.errors import KVLeaseError, PoolFullError, WrongStateError
from kvleased.core.frames import without_frames
from tests.unit.service.core.builders import assert_holds_no_frame


class Held:
    """Something that a frame holds."""


def refused_amid_another() -> KVLeaseError:
    """Return a refusal that was raised while another one was being handled."""
    try:
        refuse(PoolFullError)
    except PoolFullError:
        try:
            refuse(WrongStateError)
        except WrongStateError as error:
            return error
    raise AssertionError


def refuse(kind: type[KVLeaseError]) -> None:
    """Raise an error out of a frame that holds something."""
    held = Held()
    if held:
        raise kind("it says this")


def test_kept_error_lets_go_of_all_frames() -> None:
    """A kept error holds neither its own frames nor those of the error before it, and its message stays."""
    met = refused_amid_another()
    assert any(type(one) is Held for one in gc.get_objects())

    kept = without_frames(met)

    assert_holds_no_frame(kept)
    assert kept is met
    assert kept.message == "it says this"
    assert not any(type(one) is Held for one in gc.get_objects())
