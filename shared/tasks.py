"""Tasks that outlive whoever started them."""

import asyncio
from typing import Any


def hear(task: "asyncio.Future[Any]") -> None:
    """Take note of an error, should nobody else be there to; for `add_done_callback`."""
    if not task.cancelled():
        task.exception()
