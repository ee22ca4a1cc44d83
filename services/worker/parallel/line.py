"""Small messages between processes over a socket."""

import json
import socket
from typing import Any


class Line:
    """A socket that carries one JSON object per line, neither side ever waiting for the other."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.socket = connection
        self._rest = b""

    def send(self, **message: object) -> None:
        """Send, or drop what a peer that reads nothing has no room for."""
        try:
            self.socket.send(json.dumps(message).encode() + b"\n")
        except OSError:
            return  # its end is noticed when it is read

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """What has come, and whether nothing more can; a line that is no object is dropped."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return [], False
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                messages.append(message)
        return messages, not data

    def close(self) -> None:
        """Close."""
        self.socket.close()
