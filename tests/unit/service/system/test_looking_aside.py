"""A file system that hangs costs one thread, however often it is asked, and each caller only its time limit."""

import asyncio
import errno
import gc
import queue
import subprocess
import sys
import threading

import pytest

from kvleased.system.looking_aside import LookingAside


async def test_answers_and_errors_come_through() -> None:
    """A question is asked anew once the previous one is answered, and answers and errors reach the caller."""
    answers = iter([7, OSError(errno.EIO, "broken"), 8])

    def look() -> int:
        found = next(answers)
        if isinstance(found, OSError):
            raise found
        return found

    aside = LookingAside(look, seconds_max=60.0)

    assert await aside.answer() == 7
    with pytest.raises(OSError, match="broken"):
        await aside.answer()
    assert await aside.answer() == 8


async def test_question_that_hangs_is_asked_once() -> None:
    """Callers time out while the question hangs; its late answer goes to whoever waits at that time."""
    asked: list[int] = []
    answers: queue.Queue[int] = queue.Queue()

    def look() -> int:
        asked.append(1)
        return answers.get()

    aside = LookingAside(look, seconds_max=0.05)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await aside.answer()

    aside._seconds_max = 60.0
    waiting = asyncio.ensure_future(aside.answer())
    answers.put(5)

    assert await waiting == 5
    assert len(asked) == 1


async def test_error_that_comes_late_is_no_complaint() -> None:
    """An error after the caller has timed out is not logged as a lost exception."""
    complaints: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, one: complaints.append(one))
    goes_on = threading.Event()

    def look() -> int:
        goes_on.wait(60)
        raise OSError(errno.EIO, "broken")

    aside = LookingAside(look, seconds_max=0.01)
    with pytest.raises(TimeoutError):
        await aside.answer()
    pending = aside._pending
    assert pending is not None
    goes_on.set()
    await asyncio.wait([pending])
    aside._pending = pending = None
    gc.collect()

    assert complaints == []


def test_question_that_hangs_does_not_keep_the_process() -> None:
    """A process ends although its question to the file system never returns."""
    code = """
import asyncio, contextlib, threading
from kvleased.system.looking_aside import LookingAside
async def main():
    with contextlib.suppress(TimeoutError):
        await LookingAside(lambda: threading.Event().wait(), 0.01).answer()
asyncio.run(main())
print("over")
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )

    assert ended.stdout == "over\n"
