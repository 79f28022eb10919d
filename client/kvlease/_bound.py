"""Own the refusal to pickle or copy what belongs to one process: connections, workers and what they hold."""

from typing import NoReturn


class Bound:
    """An object that cannot be moved to another process or copied: two copies would both take the leases for theirs."""

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            TypeError: always; the message says what to do instead.
        """
        message = (
            f"a kvlease {type(self).__name__} can neither be pickled nor copied; open a client in each process, and "
            "attach and reserve there"
        )
        raise TypeError(message)
