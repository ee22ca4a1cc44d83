"""Waits for what no event tells."""

import asyncio
from collections.abc import Callable


async def until(is_so: Callable[[], object]) -> None:
    """Wait for a fact, half a minute at most."""
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # told by no event
            await asyncio.sleep(0.005)
