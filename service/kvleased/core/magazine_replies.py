"""Own what the core answers to the verbs on magazines."""

from kvleased.core.message import message


@message
class Exchanged:
    """Answer Exchange; the first three columns have one byte for each entry, 1 where it was done."""

    published: bytes = b""
    """2 where another block has the key, 3 where the block is not a private one of the magazine."""
    retracted: bytes = b""
    """2 where others hold the block, 3 where it is not a findable one of the magazine."""
    dropped: bytes = b""
    """3 where the block is not in the magazine."""
    held_blocks: bytes = b""
    """Packed int32, a block for each key; -1 if the key is cached nowhere, -2 if it is cached but not held."""
    held_all_blocks: bytes = b""
    held_all_keys: bytes = b""
    taken_blocks: bytes = b""
    num_taken_running: int = 0
    num_available: int
    num_magazines: int


@message
class Inventoried:
    """Answer Inventory."""

    blocks: bytes
    """Packed int32, ascending."""
    keys: bytes
    """One for each block; zeros for a private one."""
    sequence: int
