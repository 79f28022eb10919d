"""Own what tests find in the environment, how hypothesis runs, and the notes with which a run ends."""

import os

import pytest
from hypothesis import HealthCheck, settings

from kvleased.api.grpc import environment as grpc_environment
from tests.surroundings import of_the_shell

# A shell in which somebody uses a daemon leads no test to that daemon, and sets up none that a test starts.
for name in of_the_shell(os.environ):
    del os.environ[name]
# Before any test has used gRPC, which reads it but once: what is tested is what the daemon has.
grpc_environment.prepare()
# No example fails because the machine is busy.
settings.register_profile(
    "kvlease",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
# What `make test` tries of each law; `make test-thorough`, the coverage gate and pytest alone try a hundred examples.
settings.register_profile("quick", settings.get_profile("kvlease"), max_examples=30)
settings.load_profile("kvlease")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell which known seeds show their bugs no more; they cost time and prove nothing less, so no test fails."""
    reports = [one for key in ("passed", "failed") for one in terminalreporter.getreports(key)]
    stale = [text for one in reports for kind, text in one.user_properties if kind == "stale seed"]
    if stale:
        terminalreporter.section("known seeds that show their bugs no more")
        terminalreporter.line("\n".join(map(str, stale)))
        terminalreporter.line("renew them: python -m tests.laws.known_seeds")
