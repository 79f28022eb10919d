"""A law of the tests' own surroundings: what a shell has for kvlease leads no test astray."""

import os

from tests.surroundings import of_the_shell


def test_variables_of_kvlease_are_those_that_clients_and_daemons_read() -> None:
    """Addresses, credentials and settings are forgotten; what tests themselves are told by stays."""
    own = ["KVLEASE_ADDRESS", "KVLEASE_TOKEN_FILE", "KVLEASED_RUNTIME_DIR", "kvleased_max_leases"]

    assert of_the_shell([*own, "KVLEASE_TRACES", "KVLEASE_STANDIN_FAIL", "PATH"]) == own
    assert of_the_shell(os.environ) == []
