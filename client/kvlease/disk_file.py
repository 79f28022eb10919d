"""Own how many bytes the file of a disk store has, for those who plan it and those who write it.

headers = round_up((1 + num_slots) * 128, 4096): one of the store, and one of each slot
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
    """Return what each slot takes of the file, with its header; the store's own, rounded up, takes a sector more."""
    return stride_bytes(bytes_per_slot) + BYTES_PER_DISK_HEADER
