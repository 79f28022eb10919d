"""Own the checks of packed keys that name a chain of blocks, for every call that has keys."""

import numpy as np

from kvlease.errors import InvalidError
from kvlease.ids import BYTES_PER_KEY
from kvleased.core import ids
from kvleased.core.blocks.marks import WORDS_PER_KEY
from kvleased.core.state import split_keys


def check_keys(keys: bytes) -> None:
    """Refuse packed keys if the last one is cut off."""
    if len(keys) % BYTES_PER_KEY:
        msg = f"keys has {len(keys)} bytes, which is not a multiple of {BYTES_PER_KEY}"
        raise InvalidError(msg, resource="keys")


def check_distinct(keys: bytes) -> None:
    """Refuse packed keys if a key is there twice."""
    if are_distinct(keys):
        return
    one_by_one = split_keys(keys)
    firsts = {key: at for at, key in reversed([*enumerate(one_by_one)])}
    again = min(at for at, key in enumerate(one_by_one) if firsts[key] != at)
    first = firsts[one_by_one[again]]
    msg = f"keys names a block twice: key {again} is the same as key {first}; all keys of a chain must differ"
    raise InvalidError(msg, resource="keys", rule="repeated_key")


def are_distinct(keys: bytes) -> bool:
    """Tell whether no key is there twice."""
    if ids.are_distinct(np.frombuffer(keys, np.intp)[::WORDS_PER_KEY]):
        return True
    one_by_one = split_keys(keys)
    return len(set(one_by_one)) == len(one_by_one)


def asking_for(num_tokens: int, num_keys: int, hash_tokens: int) -> str:
    """Return the arguments with which a call that has so many keys asks for so many tokens, with no key too many."""
    if num_keys * hash_tokens < num_tokens + hash_tokens:
        return f"num_tokens={num_tokens}"
    return f"num_tokens={num_tokens} num_keys={num_tokens // hash_tokens}"
