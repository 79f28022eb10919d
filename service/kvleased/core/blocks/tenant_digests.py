"""Own the digests of tenants as columns are set to them: as arrays, in half the time that plain numbers take."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class TenantDigests(dict[int, NDArray[np.uint64]]):
    """The tenants that were ever spoken of, by digest; whoever is spoken of is one of them from then on."""

    def __missing__(self, digest: int) -> NDArray[np.uint64]:
        """Take note of a tenant."""
        column = self[digest] = np.array(digest, np.uint64)
        return column

    def note(self, digests: Iterable[int]) -> None:
        """Take note of several tenants."""
        for digest in set(digests).difference(self):
            self[digest] = np.array(digest, np.uint64)
