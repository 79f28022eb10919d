"""Own how the mapped pool is pinned for an engine's GPU: only pinned memory is copied in the background."""

import logging
from threading import Thread
from typing import Any, Final

from kvlease.integrations.vllm.offload.copies import Rows

_PORTABLE: Final = 1
"""The flag that makes pinned memory count as pinned in every context of the process."""

_logger: Final = logging.getLogger(__name__)


class Pinning:
    """The pool that is pinned, by a thread: a large pool takes seconds, and no step of an engine may wait for it."""

    def __init__(self, torch: Any, device: Any) -> None:
        """Take the GPU; nothing is pinned yet."""
        self._torch = torch
        self._device = device
        self._pinned: Rows | None = None
        self._thread: Thread | None = None
        self._wanted: Rows | None = None

    def __repr__(self) -> str:
        """Show life: what is pinned."""
        return f"<Pinning {self._pinned}, wanted {self._wanted}>"

    @property
    def wanted(self) -> Rows | None:
        """The pool that is pinned, or is being pinned."""
        return self._wanted

    def has(self, rows: Rows) -> bool:
        """Tell whether a pool is pinned."""
        return self._pinned is rows

    def begin(self, rows: Rows) -> None:
        """Begin to pin a pool in place of the previous one, which no copy may use any more."""
        self.end()
        self._wanted = rows
        self._thread = Thread(
            target=self._pin, args=(rows,), name="kvlease-offload-pinning", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Unpin the pool; no copy may use it any more."""
        if self._thread is not None:
            self._thread.join()
        pinned, self._pinned, self._wanted = self._pinned, None, None
        if pinned is not None:
            self._torch.cuda.cudart().cudaHostUnregister(pinned.address)

    def _pin(self, rows: Rows) -> None:
        cuda = self._torch.cuda
        try:
            cuda.set_device(self._device)
            result = cuda.cudart().cudaHostRegister(rows.address, len(rows.region), _PORTABLE)
            cuda.check_error(int(result))
        except RuntimeError as error:
            _logger.warning(
                "The kvlease pool of %d bytes could not be pinned for %s, so nothing is stored or loaded: %s. Make the "
                "pool smaller, or raise the limit on locked memory.",
                len(rows.region),
                self._device,
                error,
                extra={"action": "pin"},
            )
            return
        self._pinned = rows
