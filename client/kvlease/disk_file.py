"""Own the size of a disk store's file, both for its planner and for its writer.

headers = round_up((1 + num_slots) * 128, 4096): one for the store, and one for each slot
file    = headers + num_slots * round_up(bytes_per_slot, 4096)
"""

from kvlease.geometry import round_up
from kvlease.units import BYTES_PER_DISK_HEADER, BYTES_PER_SECTOR


def stride_bytes(bytes_per_slot: int) -> int:
    """Return the bytes from one slot to the next: whole sectors."""
    return round_up(bytes_per_slot, BYTES_PER_SECTOR)


def payload_offset_bytes(num_slots: int) -> int:
    """Return where the bytes of slot 0 start: behind all headers."""
    return round_up((1 + num_slots) * BYTES_PER_DISK_HEADER, BYTES_PER_SECTOR)


def file_bytes(num_slots: int, bytes_per_slot: int) -> int:
    """Return the bytes of the whole file, at most num_slots * bytes_per_charged_slot + a sector."""
    return payload_offset_bytes(num_slots) + num_slots * stride_bytes(bytes_per_slot)


def bytes_per_charged_slot(bytes_per_slot: int) -> int:
    """Return the bytes of the file that each slot takes, with its header; the store's own takes up to a sector more."""
    return stride_bytes(bytes_per_slot) + BYTES_PER_DISK_HEADER
