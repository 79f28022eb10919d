"""Own the digests of tenants as arrays: setting a column to one takes half the time that a plain number takes."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class TenantDigests(dict[int, NDArray[np.uint64]]):
    """The tenants that were ever looked up or noted, by digest; looking one up adds it."""

    def __missing__(self, digest: int) -> NDArray[np.uint64]:
        """Add a tenant."""
        column = self[digest] = np.array(digest, np.uint64)
        return column

    def note(self, digests: Iterable[int]) -> None:
        """Add several tenants."""
        for digest in set(digests).difference(self):
            self[digest] = np.array(digest, np.uint64)
