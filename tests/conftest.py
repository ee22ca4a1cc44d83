"""What holds for all tests: a slow machine is no failure."""

from hypothesis import HealthCheck, settings

# By default an example may take 0.2 s, which a loaded machine takes for a garbage collection.
settings.register_profile("house", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
