import socket
from collections.abc import Iterator

import pytest

from services.worker.parallel.line import Line


@pytest.fixture
def ends() -> Iterator[tuple[Line, socket.socket]]:
    ours, theirs = socket.socketpair()
    line = Line(ours)
    yield line, theirs
    line.close()
    theirs.close()


def test_messages_come_whole_however_they_are_cut(ends: tuple[Line, socket.socket]) -> None:
    line, peer = ends
    assert line.receive() == ([], False)
    peer.sendall(b'{"a": 1}\n{"b"')
    assert line.receive() == ([{"a": 1}], False)
    peer.sendall(b": 2}\n")
    assert line.receive() == ([{"b": 2}], False)


def test_what_is_no_object_is_dropped(ends: tuple[Line, socket.socket]) -> None:
    line, peer = ends
    peer.sendall(b'GET / HTTP/1.1\n\n[1]\n"x"\n\xff\xfe\n{"a": 1}\n')
    assert line.receive() == ([{"a": 1}], False)


def test_the_end_is_told_behind_the_last_message(ends: tuple[Line, socket.socket]) -> None:
    line, peer = ends
    peer.sendall(b'{"a": 1}\n{"half"')
    peer.shutdown(socket.SHUT_WR)
    assert line.receive() == ([{"a": 1}], False)
    assert line.receive() == ([], True)


def test_a_peer_that_reads_nothing_holds_nobody_up(ends: tuple[Line, socket.socket]) -> None:
    line, _ = ends
    for _ in range(20_000):
        line.send(position={"step": 1, "meeting": "x" * 50})


def test_sending_to_a_peer_that_is_gone_is_no_error(ends: tuple[Line, socket.socket]) -> None:
    line, peer = ends
    peer.close()
    line.send(a=1)
    assert line.receive() == ([], True)
