"""What the supervisor keeps, and how it hands it over."""

import asyncio
import fcntl
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvlease.errors import PoolFullError
from kvleased.config.settings import Settings
from kvleased.supervision import keeper
from kvleased.supervision.keeper import Store
from kvleased.supervision.keeper_link import HandoverError, KeeperLink
from kvleased.system.descriptors import DescriptorsLostError, receive_packet
from tests.unit.service.descriptors import descriptors_left

FDS_FOR_A_LIFE = 100
"""Descriptors that a control process may have; it needs fewer than half of them to begin."""


def _create(store: Store, name: str, num_bytes: int = 4096) -> int:
    message = {
        "op": "create",
        "number": 1,
        "name": name,
        "bytes": num_bytes,
        "metadata": {"of": name},
    }
    ((reply, (fd,)),) = store.act(message, [])
    assert reply == {"op": "created", "number": 1}
    return fd


def _note(store: Store, name: str, **metadata: object) -> None:
    assert store.act({"op": "note", "name": name, "metadata": metadata}, []) == []


def test_region_cannot_change_its_length() -> None:
    """Nobody who has a region's descriptor can cut it short or make it longer."""
    store = Store()
    fd = _create(store, "a")

    for num_bytes in (0, 8192):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, num_bytes)

    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == keeper.SEALS
    store.close()


def test_handover_splits_by_descriptors_and_bytes() -> None:
    """However much is kept, each message stays within what a packet takes, and nothing is left out."""
    store = Store()
    fd = os.open(os.devnull, os.O_RDONLY)
    for number in range(500):
        text = "x" * (60_000 if number < 10 else 10)
        store.act({"op": "keep", "name": str(number), "metadata": {"text": text}}, [os.dup(fd)])

    messages = list(store.handover())

    assert sum(len(message["entries"]) for message, _ in messages) == 500
    assert all(len(fds) == len(message["entries"]) <= 200 for message, fds in messages)
    assert all(len(keeper.encode(message)) <= keeper.MESSAGE_BYTES_MAX for message, _ in messages)
    store.close()
    os.close(fd)


def test_keeping_under_a_name_replaces_what_was_there() -> None:
    """A name stands for one descriptor; keeping another under it closes the earlier one."""
    store = Store()
    first = _create(store, "a")

    store.act({"op": "keep", "name": "a", "metadata": {}}, [os.open(os.devnull, os.O_RDONLY)])

    assert len(store) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(first)
    store.close()


def test_notes_take_no_descriptor_of_a_message() -> None:
    """Descriptors and notes travel together: each message keeps to the limits, and counts only what it carries."""
    store = Store()
    fd = os.open(os.devnull, os.O_RDONLY)
    for number in range(500):
        _note(store, f"note/{number}", text="x" * (60_000 if number < 10 else 10))
        store.act({"op": "keep", "name": str(number), "metadata": {}}, [os.dup(fd)])

    messages = list(store.handover())

    entries = [entry for message, _ in messages for entry in message["entries"]]
    assert [entry["has_descriptor"] for entry in entries] == 500 * [False, True]
    for message, fds in messages:
        assert len(fds) == sum(entry["has_descriptor"] for entry in message["entries"])
        assert len(fds) <= keeper.FDS_A_MESSAGE
        assert len(keeper.encode(message)) <= keeper.MESSAGE_BYTES_MAX
    assert max(len(message["entries"]) for message, _ in messages) > keeper.FDS_A_MESSAGE
    store.close()
    os.close(fd)


def test_each_descriptor_is_taken_over_under_its_own_name() -> None:
    """Notes between descriptors do not move them to other names."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    store = Store()
    for number in range(1, 300):
        if number % 3:
            _note(store, f"note/{number}", number=number)
        else:
            _create(store, str(number), number)

    with ours, theirs:
        _hand_over(store, ours)
        epoch, kept, notes = KeeperLink(theirs).take_over()

    assert epoch == 7
    assert [(note.name, note.metadata["number"]) for note in notes] == [
        (f"note/{number}", number) for number in range(1, 300) if number % 3
    ]
    assert [item.name for item in kept] == [str(number) for number in range(3, 300, 3)]
    for item in kept:
        assert int(item.name) == item.num_bytes == os.fstat(item.fd).st_size
        os.close(item.fd)
    store.close()


def test_notes_are_taken_over_with_hardly_any_descriptor() -> None:
    """Notes cost no descriptor on either side, so their number is not bounded by the limit on descriptors."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    store, link = Store(), KeeperLink(theirs)

    with ours, theirs, descriptors_left(8):
        for number in range(300):
            link.note(str(number), {"number": number})
            _answer(store, ours)
        _hand_over(store, ours)
        _, kept, notes = link.take_over()

    assert (kept, [note.metadata["number"] for note in notes]) == ([], [*range(300)])


def test_note_and_descriptor_replace_each_other() -> None:
    """A name stands for one note or one descriptor; whatever comes later is what is kept, until it is dropped."""
    store = Store()
    fd = _create(store, "a")
    _note(store, "a", turn=1)
    _note(store, "a", turn=2)

    ((noted, no_fds),) = store.handover()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    again = _create(store, "a")
    ((created, fds),) = store.handover()
    _note(store, "a")
    store.act({"op": "drop", "name": "a"}, [])

    entry = {"name": "a", "metadata": {"turn": 2}, "has_descriptor": False}
    assert (noted["entries"], no_fds) == ([entry], [])
    assert [entry["has_descriptor"] for entry in created["entries"]] == [True]
    assert fds == [again]
    assert len(store) == 0


def test_memory_that_cannot_be_had_is_refused() -> None:
    """A region larger than the kernel can give is refused with the kernel's reason, and nothing is kept."""
    store = Store()

    message = {"op": "create", "number": 7, "name": "a" * 250, "bytes": 1, "metadata": {}}
    ((reply, fds),) = store.act(message, [])

    assert (reply["op"], reply["number"], fds, len(store)) == ("refused", 7, [], 0)


def test_region_above_the_limit_of_files_is_refused_with_the_limit_and_leaves_no_descriptor() -> (
    None
):
    """Memory is a file to the kernel, so its limit on files' bytes holds; each refusal would else cost a descriptor."""
    store = Store()
    message = {"op": "create", "number": 7, "name": "a", "bytes": 1 << 20, "metadata": {}}
    num_fds = len(list(Path("/proc/self/fd").iterdir()))

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        ((reply, fds),) = store.act(message, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert (reply["op"], fds, len(store)) == ("refused", [], 0)
    assert "ulimit -f" in reply["message"]
    assert len(list(Path("/proc/self/fd").iterdir())) == num_fds


def test_descriptors_arrive_closed_on_exec() -> None:
    """A received descriptor is not inherited by children, and receiving without waiting is possible."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        with pytest.raises(BlockingIOError):
            receive_packet(other, 100, 1, socket.MSG_DONTWAIT)
        socket.send_fds(one, [json.dumps({}).encode()], [one.fileno()])

        _, (fd,) = receive_packet(other, 100, 1)

        assert not os.get_inheritable(fd)
        os.close(fd)


def test_descriptors_without_room_are_told_of() -> None:
    """A process without room for a packet's descriptors still gets the packet, with no descriptors."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, other:
        socket.send_fds(one, [b"packet"], [one.fileno(), one.fileno()])

        with descriptors_left(0), pytest.raises(DescriptorsLostError) as lost:
            receive_packet(other, 100, 2)

    assert lost.value.packet == b"packet"


def test_keep_whose_descriptor_was_lost_is_passed_over(capfd: pytest.CaptureFixture[str]) -> None:
    """If a keep message has lost its descriptor, the supervisor says so and goes on."""
    store = Store()

    assert store.act({"op": "keep", "name": "worker/1", "metadata": {}}, []) == []

    assert len(store) == 0
    assert "descriptor_not_kept" in capfd.readouterr().err


def test_nothing_is_taken_over_in_part() -> None:
    """If descriptors are lost on the way, the error says how many, and nothing is taken over."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, kept(2) as store:
        for number in range(3):
            _note(store, f"note/{number}")
        _hand_over(store, ours)

        with (
            descriptors_left(0),
            pytest.raises(HandoverError, match="2 entries were lost, after 0 of 5"),
        ):
            KeeperLink(theirs).take_over()


def test_life_without_room_for_what_was_kept_ends_with_the_reason(tmp_path: Path) -> None:
    """A control process without room for what is kept serves nothing, says what to raise, and leaves it to the next."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    settings_fd = os.memfd_create("settings")
    os.write(settings_fd, Settings(runtime_dir=tmp_path).model_dump_json().encode())
    fds = [settings_fd, theirs.fileno()]
    command = [sys.executable, "-m", "kvleased", "control", "--parent", str(os.getpid())]
    command += ["--settings-fd", str(fds[0]), "--keeper-fd", str(fds[1])]
    with ours, kept(keeper.FDS_A_MESSAGE) as store:
        _hand_over(store, ours)

        with theirs:
            ended = subprocess.run(
                ["sh", "-c", f'ulimit -Sn {FDS_FOR_A_LIFE} && exec "$@"', "sh", *command],
                pass_fds=fds,
                capture_output=True,
                check=False,
                timeout=60,
            )
        assert ended.returncode == os.EX_CONFIG, ended.stderr
        (line,) = [json.loads(line) for line in ended.stderr.splitlines()]
        assert (line["event"], line["level"]) == ("cannot_take_over", "error")
        assert "ulimit -n" in line["advice"]
        assert len(store) == keeper.FDS_A_MESSAGE
    os.close(settings_fd)


@contextmanager
def kept(count: int) -> Iterator[Store]:
    """Keep some descriptors."""
    store = Store()
    for number in range(count):
        fd = os.open(os.devnull, os.O_RDONLY)
        store.act({"op": "keep", "name": str(number), "metadata": {}}, [fd])
    yield store
    store.close()


def _hand_over(store: Store, link: socket.socket) -> None:
    """Send what is kept as the supervisor does when a life begins."""
    hello = {"op": "hello", "epoch": 7, "num_kept": len(store)}
    for message, fds in [(hello, []), *store.handover()]:
        socket.send_fds(link, [keeper.encode(message)], fds)


class Movers:
    """Note the movers that came."""

    def __init__(self) -> None:
        self.generations: list[int] = []

    def mover_came(self, role: str, sock: socket.socket, generation: int) -> None:
        """Note a mover's generation."""
        assert role == "mover"
        sock.close()
        self.generations.append(generation)

    def mover_died(self, role: str, generation: int) -> None:
        """Ignore it: no mover dies here."""


async def test_region_without_a_descriptor_is_refused_and_the_next_one_made() -> None:
    """If this process can open no descriptor, making memory is refused at once and does not wait for ever."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = KeeperLink(theirs)
    link.start(Movers())
    store = Store()

    with ours:
        refused = asyncio.create_task(link.create("a", 4096, {}))
        await asyncio.sleep(0)
        _answer(store, ours)
        with descriptors_left(0), pytest.raises(PoolFullError, match="ulimit -n") as error:
            await asyncio.wait_for(refused, 10)
        _answer(store, ours)
        made = asyncio.create_task(link.create("b", 8192, {}))
        await asyncio.sleep(0)
        _answer(store, ours)
        fd = await asyncio.wait_for(made, 10)

    assert error.value.resource == "descriptors"
    assert os.fstat(fd).st_size == 8192
    assert len(store) == 1
    os.close(fd)
    store.close()
    link.close()


@pytest.mark.parametrize("is_made", [False, True], ids=["before", "just after"])
async def test_region_whose_caller_leaves_is_kept_by_nobody(*, is_made: bool) -> None:
    """If the caller leaves before its region is made or as its descriptor arrives, neither side keeps the memory."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = KeeperLink(theirs)
    link.start(Movers())
    store = Store()

    with ours:
        ours.settimeout(10)
        making = asyncio.create_task(link.create("left", 4096, {}))
        await asyncio.sleep(0)
        if is_made:
            _answer(store, ours)
            link._read()
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        if not is_made:
            _answer(store, ours)
            link._read()
        _answer(store, ours)

    assert len(store) == 0
    assert not [one for one in _own_descriptors() if "kvlease:left" in one]
    store.close()
    link.close()


async def test_mover_without_a_descriptor_is_replaced() -> None:
    """A mover whose socket found no free descriptor is of no use, so the control process asks for another mover."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = KeeperLink(theirs)
    movers = Movers()
    link.start(movers)

    with ours:
        for generation in (1, 2):
            message = {"op": "mover", "role": "mover", "generation": generation}
            socket.send_fds(ours, [keeper.encode(message)], [ours.fileno()])
            if generation == 1:
                with descriptors_left(0):
                    link._read()
        link._read()
        asked = json.loads(ours.recv(1000))

    assert asked == {"op": "recycle_mover", "role": "mover", "generation": 1}
    assert movers.generations == [2]
    link.close()


def _answer(store: Store, link: socket.socket) -> None:
    """Carry out one message of the control process, and answer it."""
    received = keeper.receive(link)
    assert received is not None
    for reply, fds in store.act(*received):
        socket.send_fds(link, [keeper.encode(reply)], fds)


def _own_descriptors() -> list[str]:
    """Return the descriptors that this process has open."""
    links = list(Path("/proc/self/fd").iterdir())
    return [str(link.readlink()) for link in links if link.is_symlink()]
