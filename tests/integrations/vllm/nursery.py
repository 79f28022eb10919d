"""Own the start of lives, each a process of its own, from one process that has already imported the engine.

Importing the engine takes seconds, forking takes none. Runs with the reference engine's Python: `nursery.py SOCKET`. A
connection brings three descriptors, an environment and, instead of a life, perhaps a script with its arguments; it is
told the process id and, in the end, the status.
"""

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

_BYTES_MAX = 1 << 20
_IMPORTED = (
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.llama",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.utils.cpu_triton_utils",
    "kvlease.integrations.vllm.offload.connector",
    "kvlease.integrations.vllm.owned.connector",
    "kvlease.integrations.vllm.shared.connector",
)
"""The modules that nearly every life needs."""


def serve(path: Path) -> None:
    """Start a life for every connection until standard input ends; then kill the remaining lives."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # Whoever waits for the name must find a listener behind it.
    half = path.with_suffix(".half")
    listener.bind(str(half))
    listener.listen(64)
    half.rename(path)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is listener:
                    _bear(listener, selector)
                elif key.fileobj == 0:
                    _end_all(selector)
                    return
                else:
                    _bury(key, selector)


def _bear(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    connection, _ = listener.accept()
    words, descriptors, _, _ = socket.recv_fds(connection, _BYTES_MAX, 3)
    awaited, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        # This comes before anybody knows of the life, because it is killed by its session.
        os.setsid()
        os.close(awaited)
        os.close(told)
        _close_all(selector, listener, connection)
        _live(descriptors, json.loads(words))
    for descriptor in (*descriptors, told):
        os.close(descriptor)
    os.read(awaited, 1)
    os.close(awaited)
    connection.send(str(pid).encode())
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))


def _close_all(
    selector: selectors.BaseSelector, listener: socket.socket, connection: socket.socket
) -> None:
    """Close all that the nursery has open, except what the imports opened."""
    for key in list(selector.get_map().values()):
        if key.data is not None:
            key.data[1].close()
            os.close(key.fd)
    selector.close()
    listener.close()
    connection.close()


def _live(descriptors: list[int], words: dict[str, Any]) -> None:
    """Become a life, or run a script."""
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    # A background process of a shell may ignore SIGINT, but a life must not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment = words["environment"]
    os.environ.clear()
    os.environ.update(environment)
    sys.path[1:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.stdin = os.fdopen(0)
    status = 1
    try:
        if words["script"]:
            sys.argv = [words["script"], *words["arguments"]]
            runpy.run_path(words["script"], run_name="__main__")
        else:
            import life  # noqa: PLC0415  # beside this file

            life.main()
        status = 0
    except BaseException:  # noqa: BLE001  # whatever ends a life is told on its standard error
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _bury(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    pid, connection = key.data
    _, status = os.waitpid(pid, 0)
    selector.unregister(key.fileobj)
    os.close(key.fd)
    with contextlib.suppress(OSError):
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())
    connection.close()


def _end_all(selector: selectors.BaseSelector) -> None:
    for key in selector.get_map().values():
        if key.data is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(key.data[0], signal.SIGKILL)


def main() -> None:
    """Import the slow modules, and serve."""
    from vllm import LLM, SamplingParams  # noqa: F401, PLC0415  # for those who are born here

    for name in _IMPORTED:
        import_module(name)
    # Imported objects are never garbage: no life need scan them, nor copy the pages they lie in.
    gc.collect()
    gc.freeze()
    gc.unfreeze = lambda: None  # type: ignore[method-assign,assignment]  # an engine does so as it ends
    serve(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
