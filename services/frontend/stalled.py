"""Clients that do not take the end of their answer.

An answer is handed to the connection, and then nobody waits for it any more: whole answers, the
last bytes of streams, answers that wait behind them. A client that leaves them lying for too long
loses its connection. Streams under way are the business of their keeper.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from services.frontend.http_protocol import GatewayProtocol, reset
from shared.log import get_logger

LOOK_S: Final = 1.0

_logger = get_logger(__name__)


@dataclass(slots=True)
class _Rest:
    num_bytes: int
    since: float


class StallWatch:
    """Looks at all connections of a server, once a second: that costs nothing per answer."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s` is how long a client may take no bytes."""
        self._limit_s = limit_s
        self._rests: dict[GatewayProtocol, _Rest] = {}

    async def run(self, connections: Iterable[GatewayProtocol]) -> None:
        """Look until cancelled; `connections` are the open ones, whoever they are then."""
        while True:
            await asyncio.sleep(min(LOOK_S, self._limit_s / 2))
            self.look(connections, time.monotonic())

    def look(self, connections: Iterable[GatewayProtocol], now: float) -> None:
        """One round."""
        known, self._rests = self._rests, {}
        for connection in tuple(connections):
            num_bytes = connection.num_unsent_bytes
            if not num_bytes or connection.is_streaming:
                continue
            rest = known.get(connection)
            if rest is None or rest.num_bytes != num_bytes:
                self._rests[connection] = _Rest(num_bytes, now)
            elif now - rest.since < self._limit_s:
                self._rests[connection] = rest
            else:
                _logger.info("client cut off", extra={"num_unsent_bytes": num_bytes})
                reset(connection.transport)
