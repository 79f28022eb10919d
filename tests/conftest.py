"""Own how hypothesis runs: no example fails because the machine is busy."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvlease",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("kvlease")
