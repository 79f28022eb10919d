"""Own the refusal to pickle or copy what belongs to one process: connections, workers and what they hold."""

from typing import NoReturn


class Bound:
    """What cannot go to another process, nor be there twice: two would take the same leases for theirs."""

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            TypeError: always; it says what to do in its place.
        """
        message = (
            f"a kvlease {type(self).__name__} can neither be pickled nor copied; open a client in each process, and "
            "attach and reserve there"
        )
        raise TypeError(message)
