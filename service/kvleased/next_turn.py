"""Own the pause between two things that the event loop does: one in which it hears what has come meanwhile."""

import asyncio
from collections.abc import Callable
from typing import TypeVarTuple

Arguments = TypeVarTuple("Arguments")


def in_next_turn(callback: Callable[[*Arguments], object], *arguments: *Arguments) -> None:
    """Have something done after the loop has looked for what has come; `call_soon` alone has it done before."""
    loop = asyncio.get_running_loop()
    loop.call_soon(loop.call_soon, callback, *arguments)
