"""Laws of what a layer keeps, and of numbers that come from outside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.spec import BYTES_PER_ELEMENT, FullAttention
from kvlease.units import BYTES_MAX, checked_count, parse_bytes, show_bytes


def layer(**changes: object) -> FullAttention:
    """Return a valid layer with some fields changed."""
    fields = {"name": "0", "num_kv_heads": 2, "head_size": 32, "dtype": "float16"} | changes
    return FullAttention(**fields)  # type: ignore[arg-type]  # tests pass wrong values on purpose


def test_bytes_per_token_counts_k_and_v() -> None:
    """A token takes heads * (head_size + head_size_v) elements; V is as K where nothing else is said."""
    assert layer().bytes_per_token == 2 * (32 + 32) * 2
    assert layer(head_size_v=16).bytes_per_token == 2 * (32 + 16) * 2


@pytest.mark.parametrize("head_size_v", [0, 16, 32])
def test_explicit_layer_means_the_same(head_size_v: int) -> None:
    """Writing a default out changes no number, and doing it twice changes nothing."""
    spec = layer(head_size_v=head_size_v)

    assert spec.explicit().bytes_per_token == spec.bytes_per_token
    assert spec.explicit().explicit() == spec.explicit()
    assert spec.explicit().head_size_v > 0


@pytest.mark.parametrize("dtype", BYTES_PER_ELEMENT)
def test_known_dtypes_pass(dtype: str) -> None:
    """Every dtype of the table can be laid out."""
    layer(dtype=dtype).check()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        pytest.param("name", "", id="empty name"),
        pytest.param("name", "x" * 257, id="long name"),
        pytest.param("name", "a\nb", id="unprintable name"),
        pytest.param("num_kv_heads", 0, id="no heads"),
        pytest.param("num_kv_heads", 2**17, id="too many heads"),
        pytest.param("num_kv_heads", True, id="a bool for a number"),
        pytest.param("head_size", -1, id="negative head"),
        pytest.param("head_size_v", -1, id="negative V head"),
        pytest.param("head_size", 1.5, id="half an element"),
        pytest.param("dtype", "int7", id="unknown dtype"),
    ],
)
def test_malformed_layer_is_refused_by_name(field: str, value: object) -> None:
    """A layer that cannot be laid out is refused, and the refusal names the field."""
    with pytest.raises(InvalidError) as refusal:
        layer(**{field: value}).check()

    assert refusal.value.resource == field


def test_count_out_of_range_carries_both_numbers() -> None:
    """A refused count says what it was and what there can be; what int64 cannot carry is left out."""
    with pytest.raises(InvalidError) as refusal:
        checked_count("blocks", 9, most=8)
    with pytest.raises(InvalidError) as beyond:
        checked_count("blocks", 2**70, most=8)

    assert (refusal.value.need, refusal.value.limit) == (9, 8)
    assert beyond.value.need is None


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("8GiB", 8 * 2**30),
        ("1.5 GiB", 3 * 2**29),
        ("500MB", 500 * 10**6),
        (" 2kib ", 2048),
        ("0.5TiB", 2**39),
    ],
)
def test_bytes_are_read_as_people_write_them(written: str, num_bytes: int) -> None:
    """Binary and decimal units, fractions and spaces mean what they say."""
    assert parse_bytes(written) == num_bytes


@pytest.mark.parametrize("written", ["", "GiB", "-1", "1.1B", "8 gigs", "1e9", "9999999TiB", "٣"])
def test_unclear_bytes_are_refused(written: str) -> None:
    """What is not a whole, possible number of bytes is refused, never guessed."""
    with pytest.raises(InvalidError):
        parse_bytes(written)


@given(st.integers(0, BYTES_MAX))
def test_shown_bytes_never_promise_more(num_bytes: int) -> None:
    """Bytes as shown are never more than there are, and short by less than a hundredth of the unit."""
    number, unit = show_bytes(num_bytes).split()
    hundredths = int(number.replace(".", "")) if "." in number else int(number) * 100
    unit_bytes = parse_bytes(f"1{unit}")

    assert 0 <= num_bytes * 100 - hundredths * unit_bytes < unit_bytes
