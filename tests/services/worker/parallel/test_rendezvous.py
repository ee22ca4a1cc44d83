import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from services.worker.parallel.rendezvous import JoinError, gather, open_store
from shared.errors import ConfigError


@contextmanager
def free_port() -> Iterator[int]:
    """A port that nobody listens at, and that the system gives to nobody else meanwhile."""
    with socket.socket() as holder:
        # Who asks for the same, as rank 0 does, may listen at it all the same.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@pytest.mark.parametrize(
    "address", ["", "/tmp/x", "file://host/x", "file://", "tcp://host", "tcp://:80", "udp://h:1"]
)
def test_an_address_of_no_known_kind_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="--rendezvous"):
        open_store(address, rank=0, size=2, timeout_s=1)


def test_a_file_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/none is not a folder"):
        open_store(f"file://{tmp_path}/none/x", rank=0, size=2, timeout_s=1)


def test_ranks_meet_at_a_file(tmp_path: Path) -> None:
    first = open_store(f"file://{tmp_path}/x", rank=0, size=2, timeout_s=5)
    second = open_store(f"file://{tmp_path}/x", rank=1, size=2, timeout_s=5)
    first.set("greeting", "hello")
    assert second.get("greeting") == b"hello"


def test_a_rank_may_come_before_rank_0_listens() -> None:
    found: list[Any] = []

    def join(address: str) -> None:
        found.append(open_store(address, rank=1, size=2, timeout_s=20).get("greeting"))

    with free_port() as port:
        address = f"tcp://127.0.0.1:{port}"
        thread = threading.Thread(target=join, args=(address,))
        thread.start()
        time.sleep(0.2)
        store = open_store(address, rank=0, size=2, timeout_s=20)
        store.set("greeting", "hello")
        thread.join(20)
    assert found == [b"hello"]


def test_nobody_at_the_port_is_told() -> None:
    said = r"rank 0 does not answer at 127.0.0.1:\d+ after 0.2 s"
    with free_port() as port, pytest.raises(JoinError, match=said):
        open_store(f"tcp://127.0.0.1:{port}", rank=1, size=2, timeout_s=0.2)


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match="rank 0 cannot listen"):
            open_store(address, rank=0, size=2, timeout_s=1)


def test_texts_come_in_order_of_the_ranks() -> None:
    store, found = HashStore(), {}

    def tell(rank: int) -> None:
        found[rank] = gather(store, "topic", f"text {rank}", rank=rank, size=3, timeout_s=20)

    threads = [threading.Thread(target=tell, args=(rank,)) for rank in (2, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert list(found.values()) == [["text 0", "text 1", "text 2"]] * 3


def test_those_who_say_nothing_are_named() -> None:
    with pytest.raises(JoinError, match=r"ranks 0, 2 of 3 are missing after \d+\.\d s \(loaded\)"):
        gather(HashStore(), "loaded", "", rank=1, size=3, timeout_s=0.1)


def test_a_rank_that_is_to_stop_does_not_wait() -> None:
    with pytest.raises(JoinError):
        gather(HashStore(), "x", "", rank=0, size=2, timeout_s=60, is_stopping=lambda: True)
