"""What holds for all tests: a slow machine is no failure, and every run tries the same examples.

`--hypothesis-profile search` tries others each time, and prints what it finds as a line to put
before the test.
"""

from hypothesis import HealthCheck, settings

# By default an example may take 0.2 s, which a loaded machine takes for a garbage collection.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("house", _PATIENT, derandomize=True)
settings.register_profile("search", _PATIENT, derandomize=False, print_blob=True)
settings.load_profile("house")
