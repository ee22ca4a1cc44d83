"""Errors of tasks that nobody waits for."""

import asyncio
import gc
from typing import Any

import pytest

from shared.tasks import hear


@pytest.mark.parametrize("is_heard", [True, False])
async def test_an_error_that_was_heard_is_not_told_as_one_that_was_missed(
    *, is_heard: bool
) -> None:
    missed: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: missed.append(context))

    async def fail() -> None:
        raise ValueError("nobody asked")

    task = loop.create_task(fail())
    if is_heard:
        task.add_done_callback(hear)
    await asyncio.wait({task})
    await asyncio.sleep(0)
    del task
    gc.collect()
    assert bool(missed) is not is_heard


async def test_a_task_that_was_cancelled_has_no_error() -> None:
    task = asyncio.get_running_loop().create_task(asyncio.sleep(60))
    task.add_done_callback(hear)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
