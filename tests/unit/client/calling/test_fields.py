"""Laws of arguments: a caller's value is refused in the words of its own bounds."""

from collections.abc import Callable

import pytest

from kvlease import InvalidError
from kvlease._calling import calls
from kvlease._calling.fields import from_zero, given


@pytest.mark.parametrize("num_tokens", [0, 1, 4_096])
def test_number_of_tokens_may_be_none(num_tokens: int) -> None:
    """A commit or a trim may be of no tokens."""
    assert from_zero(num_tokens) == num_tokens


@pytest.mark.parametrize("num_tokens", [-1, -(2**40)])
def test_negative_number_of_tokens_is_told_that_none_may_be(num_tokens: int) -> None:
    """A negative number of tokens is refused with the bound of a commit, which begins at 0, not that of a reserve."""
    with pytest.raises(
        InvalidError, match=rf"^num_tokens must be from 0 to 2147483647, not {num_tokens}"
    ):
        from_zero(num_tokens)


@pytest.mark.parametrize("num_tokens", [2**31, 0.0, True, "5"])
def test_what_is_no_number_of_tokens_is_refused(num_tokens: object) -> None:
    """A value that only equals a number of tokens is refused."""
    with pytest.raises(InvalidError, match="num_tokens"):
        from_zero(num_tokens)


@pytest.mark.parametrize(
    ("name", "number", "wanted"),
    [
        ("after_sequence", -1, "0 or more"),
        ("after_sequence", 2**53, f"from 0 to {2**53 - 1}"),
        ("after_sequence", 2**63, f"from 0 to {2**53 - 1}"),
        ("after_id", -1, "0 or more"),
        ("after_id", 2**63, f"from 0 to {2**63 - 1}"),
    ],
)
def test_number_behind_which_a_list_begins_is_refused(name: str, number: int, wanted: str) -> None:
    """A number above what the wire carries is refused with its bounds, which begin at 0."""
    with pytest.raises(InvalidError, match=rf"^{name} must be {wanted}, not {number}$"):
        given(**{name: number})


@pytest.mark.parametrize(
    ("cache", "told"),
    [
        pytest.param(None, "cache must be given, not None", id="none"),
        pytest.param(5, "cache must be a string, not 5", id="number"),
        pytest.param(b"demo", "cache must be a string, not b'demo'", id="bytes"),
        pytest.param("\ud800", "cache must be text that UTF-8 can encode", id="surrogate"),
    ],
)
@pytest.mark.parametrize(
    "asking",
    [
        pytest.param(lambda cache: calls.lookup(b"", cache), id="lookup"),
        pytest.param(lambda cache: calls.pin(b"", cache), id="pin"),
        pytest.param(lambda cache: calls.unpin(1, cache), id="unpin"),
        pytest.param(lambda cache: calls.evict(num_blocks=1, cache=cache), id="evict"),
        pytest.param(lambda cache: calls.reload_keys(b"", 0, cache), id="reload"),
    ],
)
def test_cache_that_an_operator_names_is_text(
    asking: Callable[[object], object], cache: object, told: str
) -> None:
    """The name of a cache that travels beside the request is refused like one that is a field of it."""
    with pytest.raises(InvalidError, match=f"^{told}"):
        asking(cache)
