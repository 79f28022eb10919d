"""Laws of the digests of tenants in a pool."""

import numpy as np

from kvleased.core.blocks.tenant_digests import TenantDigests


def test_spoken_of_is_noted_once_and_written_whole() -> None:
    """A digest that is set in a column is there in all of its 64 bits, and its tenant is noted once."""
    digests, column = TenantDigests(), np.zeros(2, np.uint64)

    column[:] = digests[2**64 - 1]

    assert column.tolist() == [2**64 - 1] * 2
    assert digests.keys() == {2**64 - 1}


def test_noting_some_again_adds_the_others_alone() -> None:
    """A second note of a tenant changes nothing, and each new tenant is noted once."""
    digests = TenantDigests()
    known = digests[7]

    digests.note([7, 8, 8])

    assert digests[7] is known
    assert digests.keys() == {7, 8}
