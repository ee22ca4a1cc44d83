"""Garbage collection, kept out of the steps and measured.

A collection that starts by itself starts in the middle of a step, and one of all generations looks
at every sequence. So only the youngest objects are collected by themselves, and rarely; the rest
is collected between steps, while the device works or nothing does. Objects of the start are
frozen: no collection looks at them.
"""

import gc
import time
from typing import Final

# New objects before the youngest are collected amid whatever runs: hundreds of steps make as many.
_YOUNG: Final = 50_000
# Never reached: these generations are collected by `rest` alone.
_NEVER: Final = 1_000_000
# Seconds between collections of the middle generation, and of all objects.
_MIDDLE_S: Final = 1.0
_FULL_S: Final = 30.0


class Collector:
    """Takes over the collector of the process until `stop`."""

    def __init__(self) -> None:
        """Not in charge yet."""
        self.pause_s = 0.0
        self.longest_s = 0.0
        self._began_at = 0.0
        self._middle_at = self._full_at = time.monotonic()
        self._thresholds = gc.get_threshold()

    def start(self) -> None:
        """Freeze what lives, take over."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, _NEVER, _NEVER)
        gc.callbacks.append(self._measure)
        self._middle_at = self._full_at = time.monotonic()

    def stop(self) -> None:
        """Give it back."""
        gc.callbacks.remove(self._measure)
        gc.set_threshold(*self._thresholds)

    def rest(self) -> None:
        """Nothing waits for this process now: collect what is due."""
        now = time.monotonic()
        if now - self._full_at >= _FULL_S:
            self._full_at = self._middle_at = now
            gc.collect()
        elif now - self._middle_at >= _MIDDLE_S:
            self._middle_at = now
            gc.collect(1)

    def _measure(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._began_at = time.perf_counter()
            return
        seconds = time.perf_counter() - self._began_at
        self.pause_s += seconds
        self.longest_s = max(self.longest_s, seconds)
