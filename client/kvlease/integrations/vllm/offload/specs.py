"""Own the form in which a job names its rows on the way from the scheduler to the ranks."""

from vllm.v1.kv_offload.base import LoadStoreSpec

from kvlease.integrations.vllm.offload.books import Rows


class RowsSpec(LoadStoreSpec):
    """The pool's side of a job: rows, their keys, and the memory that the rows belong to."""

    def __init__(self, pool: bytes, rows: Rows, names: bytes) -> None:
        """Remember the rows and their keys; `names` has one packed key for each row."""
        self.pool = pool
        self.rows = rows
        self.names = names

    def __repr__(self) -> str:
        """Show life: how many rows."""
        return f"<RowsSpec {len(self.rows)} rows>"
