"""A value passes only as the bytes of the block that it was made from."""

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvleased.core.tier.labels import LABEL
from kvleased.movers.cpu import checksum
from kvleased.movers.remote.value import HEADER_BYTES, BlockName, ValueForm, blocks_of

SLOT_BYTES = 96
BLOCK = BlockName(key=b"k" * 32, tenant=2**63 + 7, position=2**32 - 1)
SLOT = np.random.default_rng(1).integers(0, 256, SLOT_BYTES, np.uint8).tobytes()


def _form(fingerprint: bytes = b"f" * 32, slot_bytes: int = SLOT_BYTES) -> ValueForm:
    return ValueForm(fingerprint=fingerprint, slot_bytes=slot_bytes)


def _value(slot: bytes = SLOT, block: BlockName = BLOCK, form: ValueForm | None = None) -> bytes:
    view = memoryview(slot)
    return b"".join((form or _form()).encode(block, view, checksum(view)))


def test_value_has_the_bytes_of_its_slot() -> None:
    """An encoded slot comes back with its checksum, from any kind of buffer."""
    for kind in (bytes, bytearray, memoryview):
        decoded = _form().decode(BLOCK, kind(_value()))

        assert decoded is not None
        assert bytes(decoded[0]) == SLOT
        assert decoded[1] == checksum(memoryview(SLOT))
    assert len(_value()) == _form().value_bytes == HEADER_BYTES + SLOT_BYTES


def test_every_flipped_bit_is_noticed() -> None:
    """A change of any bit of header or slot refuses the value."""
    value = _value()
    for bit in range(8 * len(value)):
        flipped = bytearray(value)
        flipped[bit // 8] ^= 1 << bit % 8

        assert _form().decode(BLOCK, flipped) is None


@pytest.mark.parametrize(
    "length", [*range(HEADER_BYTES + SLOT_BYTES), HEADER_BYTES + SLOT_BYTES + 1]
)
def test_any_other_length_is_refused(length: int) -> None:
    """A value that is cut off or too long is refused."""
    assert _form().decode(BLOCK, (_value() + b"\0")[:length]) is None


@given(st.binary(max_size=2 * (HEADER_BYTES + SLOT_BYTES)))
def test_foreign_bytes_are_refused(foreign: bytes) -> None:
    """Foreign bytes are refused, whatever their length."""
    assert _form().decode(BLOCK, foreign) is None
    assert (
        _form().decode(
            BLOCK, foreign.ljust(HEADER_BYTES + SLOT_BYTES, b"\0")[: HEADER_BYTES + SLOT_BYTES]
        )
        is None
    )


@pytest.mark.parametrize(
    ("block", "form"),
    [
        pytest.param(BLOCK._replace(key=b"j" * 32), _form(), id="key"),
        pytest.param(BLOCK._replace(tenant=7), _form(), id="tenant"),
        pytest.param(BLOCK._replace(position=0), _form(), id="position"),
        pytest.param(BLOCK, _form(fingerprint=b"g" * 32), id="layout"),
        pytest.param(BLOCK, _form(slot_bytes=SLOT_BYTES + 8), id="bytes"),
    ],
)
def test_value_of_another_block_is_refused(block: BlockName, form: ValueForm) -> None:
    """A whole value under another block's name is refused."""
    assert form.decode(block, _value()) is None


def test_slots_are_told_apart_by_their_bytes_alone() -> None:
    """A header with the slot of another value of the same block is refused."""
    other = _value(slot=bytes(SLOT_BYTES))

    assert _form().decode(BLOCK, _value()[:HEADER_BYTES] + other[HEADER_BYTES:]) is None


def test_names_differ_where_blocks_do() -> None:
    """Key, tenant and layout are in a name; the position is not, as the key decides it."""
    names = {
        _form().name(BLOCK),
        _form().name(BLOCK._replace(key=b"j" * 32)),
        _form().name(BLOCK._replace(tenant=7)),
        _form(fingerprint=b"g" * 32).name(BLOCK),
    }

    assert len(names) == 4
    assert all(name.isascii() and len(name) == len("kvlease:1:") + 64 for name in names)


def test_names_stay_as_they_are() -> None:
    """Names stay as they are, so that nodes of different versions find each other's values."""
    digest = blake3(BLOCK.key + BLOCK.tenant.to_bytes(8, "little") + b"f" * 32).hexdigest()

    assert _form().name(BLOCK) == f"kvlease:1:{digest}"


def test_labels_are_read_as_the_core_writes_them() -> None:
    """Each label names one block, whatever its generation and spare bytes."""
    packed = np.zeros(2, LABEL)
    packed["key"] = [BLOCK.key, b"\0" * 32]
    packed["tenant"] = [BLOCK.tenant, 1]
    packed["generation"] = 99
    packed["position"] = [BLOCK.position, 3]

    assert blocks_of(packed.tobytes()) == [BLOCK, BlockName(b"\0" * 32, 1, 3)]


@pytest.mark.parametrize(
    ("fingerprint", "slot_bytes"),
    [
        pytest.param("", 64, id="none"),
        pytest.param("xy" * 32, 64, id="no hex"),
        pytest.param("ab" * 31, 64, id="too short"),
        pytest.param("ab" * 32, 0, id="no bytes"),
    ],
)
def test_cache_that_is_not_known_has_no_form(fingerprint: str, slot_bytes: int) -> None:
    """A cache without a known layout has no form of values."""
    assert ValueForm.of(fingerprint, slot_bytes) is None


def test_form_comes_of_the_hex_of_a_fingerprint() -> None:
    """A form takes the fingerprint's bytes from its hex."""
    assert ValueForm.of("66" * 32, SLOT_BYTES) == _form()
