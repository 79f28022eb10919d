"""Run the demo: a real model generates through the daemon while its processes are preempted and killed."""

import asyncio
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    # Importing what the demo is made of takes seconds on a busy machine.
    print(
        "the demo starts: a daemon, two workers with a model, and plain Transformers beside them",
        flush=True,
    )
    try:
        runpy.run_path(str(Path(__file__).with_name("demo")), run_name="__main__")
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit("the demo was interrupted; its processes have ended")
