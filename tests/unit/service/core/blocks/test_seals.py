"""Laws of the seal: it covers everything that a restart believes, and only that."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvleased.core.blocks.records import TIER_COLUMNS, TierRecords
from kvleased.core.blocks.seals import Seals
from kvleased.core.ids import Ids
from tests.unit.service.core.builders import as_ids

IDS = as_ids(range(4))


def seal(records: TierRecords, ids: Ids, layout_digest: int) -> NDArray[np.uint64]:
    """Return the seals that entries must have in a layout."""
    return Seals(records, layout_digest).of(ids)


def some_records() -> TierRecords:
    """Return four entries with different contents."""
    records = TierRecords.plain(4)
    records.key[:] = np.arange(128, dtype=np.uint8).reshape(4, 32)
    records.generation[:] = IDS
    return records


@pytest.mark.parametrize("column", ["generation", "tenant", "checksum", "position", "key"])
def test_seal_covers_column(column: str) -> None:
    """A change of a column that a restart believes changes the seal of its entry, and of no other."""
    records = some_records()
    before = seal(records, IDS, 99)

    getattr(records, column)[1] ^= 1

    assert (seal(records, IDS, 99) != before).tolist() == [False, True, False, False]


@pytest.mark.parametrize("column", ["state", "seal"])
def test_seal_does_not_cover_column(column: str) -> None:
    """The state is written after the seal, so it is not covered; neither is the seal itself."""
    records = some_records()
    before = seal(records, IDS, 99)

    getattr(records, column)[1] ^= 1

    assert (seal(records, IDS, 99) == before).all()


def test_seal_tells_layouts_apart() -> None:
    """An entry of another layout has another seal."""
    records = some_records()

    assert (seal(records, IDS, 99) != seal(records, IDS, 99 << 32)).all()


def test_unused_entry_is_not_sealed() -> None:
    """An entry of zeros is not sealed: no seal is ever zero."""
    assert seal(TierRecords.plain(4), IDS, 0).all()


def test_seal_tells_keys_with_swapped_words_apart() -> None:
    """Each word of an entry counts at its own place."""
    records = TierRecords.plain(2)
    records.key[0, 0] = 1
    records.key[1, 8] = 1

    first, second = seal(records, IDS[:2], 99)

    assert first != second


def test_columns_are_those_that_are_laid_out() -> None:
    """The layout in shared memory names every column of the records, in order and with its type."""
    records = TierRecords.plain(3)

    laid_out = [(name, np.dtype(dtype), 3 * count) for name, dtype, count in TIER_COLUMNS]

    assert laid_out == [
        (name, getattr(records, name).dtype, getattr(records, name).size)
        for name in TierRecords.__slots__
    ]


def test_seal_of_an_entry_does_not_depend_on_its_company() -> None:
    """The seal of an entry among many is the same as alone."""
    records, everything = TierRecords.plain(3_000), as_ids(range(3_000))
    records.generation[:] = everything

    together = seal(records, everything, 99)

    assert together.tolist() == [
        int(seal(records, everything[at : at + 1], 99)[0]) for at in everything
    ]
