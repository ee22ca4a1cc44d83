"""Clocks that show what a test wants."""

from services.frontend.quota import Clock


def at(now: float) -> Clock:
    """A clock that stands still."""
    return lambda: now
