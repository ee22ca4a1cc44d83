"""HTTP as bytes on a socket, and the least of applications."""

import asyncio

from starlette.types import Receive, Scope, Send


async def exchange_bytes(port: int, data: bytes) -> bytes:
    """All that comes until the connection ends."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    """An answer of five bytes."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"hello"})
