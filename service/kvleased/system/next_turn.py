"""Own a pause between two pieces of work, in which the event loop reads what has arrived meanwhile."""

import asyncio
from collections.abc import Callable
from typing import TypeVarTuple

Arguments = TypeVarTuple("Arguments")


def in_next_turn(callback: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
    """Call a function after the loop has looked for input; `call_soon` alone would call it before that."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, callback, *arguments)
