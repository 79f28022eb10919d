"""Laws of keys made from vLLM's hashes: equal where everything is equal, and else different."""

import pytest

from kvlease.ids import BYTES_PER_KEY
from kvlease.integrations.vllm.identity.rekey import Rekeyer, RememberedKeys

TENANT_KEY = bytes(range(32))
DIGEST = b"d" * 32
HASHES = [bytes([number]) * 32 for number in range(40)]


def split(keys: bytes) -> list[bytes]:
    """Return packed keys one by one."""
    return [keys[at : at + BYTES_PER_KEY] for at in range(0, len(keys), BYTES_PER_KEY)]


def test_key_depends_on_every_part_of_its_context() -> None:
    """Another tenant, identity, era, group or hash makes another key."""
    contexts = [
        (TENANT_KEY, DIGEST, b"", 0),
        (bytes(32), DIGEST, b"", 0),
        (TENANT_KEY, bytes(32), b"", 0),
        (TENANT_KEY, DIGEST, b"era", 0),
        (TENANT_KEY, DIGEST, b"", 1),
    ]

    keys = [
        key
        for tenant_key, digest, era, group in contexts
        for key in Rekeyer(tenant_key, digest, era).each(HASHES[:2], group)
    ]

    assert len(set(keys)) == 10
    assert {len(key) for key in keys} == {BYTES_PER_KEY}


def test_equal_contexts_make_equal_keys_whatever_came_before() -> None:
    """Two engines make the same key, whichever keys they made before."""
    one, other = Rekeyer(TENANT_KEY, DIGEST), Rekeyer(TENANT_KEY, DIGEST)
    other.keys(HASHES[::-1], group=3)

    assert one.keys(HASHES, 3) == other.keys(HASHES, 3) == b"".join(other.each(HASHES, 3))


def test_key_of_this_version() -> None:
    """Keys outlive upgrades, so the way they are made must not change by accident."""
    key = Rekeyer(TENANT_KEY, DIGEST, b"era").key(HASHES[7] + (2).to_bytes(4, "big"))

    assert key.hex() == "7cb9aef48541837745f492a187a802d5b55631a4f4a3f351b906f394c0475e8e"


@pytest.mark.parametrize("num_bytes", [16, 32], ids=["xxhash", "sha256"])
def test_key_of_a_hash_with_its_group_is_that_of_the_two(num_bytes: int) -> None:
    """A hash from vLLM's pool, with the group at its end, has the same key as hash and group given apart."""
    rekeyer = Rekeyer(TENANT_KEY, DIGEST)
    block_hash = HASHES[1][:num_bytes]

    key = rekeyer.key(block_hash + (5).to_bytes(4, "big"))

    assert key == rekeyer.keys([block_hash], 5)


@pytest.mark.parametrize("groups", [(), (3, 3, 3), (0, 1, 1, 0)], ids=["none", "one", "several"])
def test_keys_of_names_of_any_groups_keep_their_order(groups: tuple[int, ...]) -> None:
    """Names of several groups, in any order, give the same keys as each name alone."""
    rekeyer = Rekeyer(b"t" * 32, b"d" * 32)
    names = [bytes([at]) * 32 + group.to_bytes(4, "big") for at, group in enumerate(groups)]

    assert rekeyer.of_names(names) == [rekeyer.key(name) for name in names]


@pytest.mark.parametrize("kept_max", [1, 100], ids=["forgotten", "remembered"])
def test_remembered_keys_are_those_of_the_rekeyer(kept_max: int) -> None:
    """A remembered name gives the same key as a new one, and the keys of another rekeyer are never given."""
    remembered = RememberedKeys(kept_max)
    first, second = Rekeyer(TENANT_KEY, DIGEST), Rekeyer(TENANT_KEY, DIGEST, b"era")
    names = [one + (at % 3).to_bytes(4, "big") for at, one in enumerate(HASHES)]

    for rekeyer in (first, first, second, first):
        for asked in (names[:7], names[3:20], names, names[::-1]):
            assert remembered.of_names(rekeyer, asked) == [rekeyer.key(name) for name in asked]
