"""Prefix caches over real channels: a picture that stays true, and a reset."""

import asyncio

import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos.glm.v1 import scheduler_pb2, scheduler_pb2_grpc
from services.scheduler import server
from services.scheduler.cache_events import CacheChange, CachedBlock, CacheEvent, CacheUpdate
from services.scheduler.server import cache_parts
from shared.block_hashes import HASH_BYTES, BlockHashes, root_hash
from shared.rpc import open_channel
from shared.wire import unpack_ids
from tests.services.scheduler.conftest import LIMIT_S, Running, sequence, submit

Held = set[tuple[int, bytes]]


class Follower:
    """Keeps the picture of a scheduler's caches by the contract alone."""

    def __init__(self, running: Running) -> None:
        self.stub = scheduler_pb2_grpc.PrefixCacheServiceStub(running.channel)
        self.held: Held = set()
        self.number = 0
        self.instance_id = ""
        self.naming = ("", 0)
        self.num_snapshots = 0
        self._watch()

    def _watch(self) -> None:
        request = scheduler_pb2.WatchCacheRequest(instance_id=self.instance_id, number=self.number)
        self.call = self.stub.WatchCache(request)

    async def read(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            message = await self.call.read()
        assert message is not grpc.aio.EOF
        self.instance_id = message.instance_id
        self.naming = (message.model_digest, message.block_size_tokens)
        if message.WhichOneof("part") == "snapshot":
            self._take_snapshot(message.snapshot)
        else:
            self._take_events(message.events)

    async def until(self, num_held: int) -> None:
        while len(self.held) != num_held:
            await self.read()

    def hang_up(self) -> None:
        self.call.cancel()

    def come_back(self) -> None:
        self._watch()

    def _take_snapshot(self, part: scheduler_pb2.CacheSnapshot) -> None:
        self.num_snapshots += part.is_first
        if part.is_first:
            self.held = set()
        self.held |= set(zip(part.replicas, cut(part.block_hashes), strict=True))
        if part.is_last:
            self.number = part.number

    def _take_events(self, part: scheduler_pb2.CacheEvents) -> None:
        assert part.first_number == self.number + 1, "a gap"
        for change, replica, name in zip(
            part.changes, part.replicas, cut(part.block_hashes), strict=True
        ):
            self.number += 1
            if change == scheduler_pb2.CACHE_CHANGE_STORED:
                self.held.add((replica, name))
            elif change == scheduler_pb2.CACHE_CHANGE_REMOVED:
                self.held.remove((replica, name))
            else:
                self.held = {entry for entry in self.held if entry[0] != replica}


def cut(hashes: bytes) -> list[bytes]:
    return [hashes[n : n + HASH_BYTES] for n in range(0, len(hashes), HASH_BYTES)]


def names_of_a_prompt(naming: tuple[str, int], num_prompt: int) -> list[bytes]:
    """As a router would make them."""
    digest, size = naming
    hashes = BlockHashes(root_hash(digest, size, ""), size)
    prompt = unpack_ids(sequence(0, num_prompt).prompt_token_ids, "prompt")
    hashes.extend(num_prompt // size, prompt, prompt[:0])
    return hashes.known


async def test_a_follower_can_tell_which_prompts_are_cached(running: Running) -> None:
    await running.start()
    follower, peer = Follower(running), running.peer()
    await follower.read()
    assert (follower.held, follower.naming) == (set(), ("", 4))
    await peer.submit(submit("a", sequence(0, 13), max_tokens=3))
    await peer.read_until_ended(0)
    await follower.until(3)
    assert [name for name in names_of_a_prompt(follower.naming, 13)] == names_of(follower.held)
    assert follower.num_snapshots == 1
    follower.hang_up()


def names_of(held: Held) -> list[bytes]:
    """Names in the order of the prompt of the tests."""
    known = names_of_a_prompt(("", 4), 60)
    return sorted((name for _, name in held), key=known.index)


async def test_a_follower_that_comes_back_gets_what_it_missed(running: Running) -> None:
    await running.start()
    follower, peer = Follower(running), running.peer()
    await follower.read()
    follower.hang_up()
    await peer.submit(submit("a", sequence(0, 9), max_tokens=1))
    await peer.read_until_ended(0)
    follower.come_back()
    await follower.until(2)
    assert follower.num_snapshots == 1, "nothing was lost, so there is no second one"
    # It knows another run of a scheduler: that tells nothing about this one.
    follower.hang_up()
    follower.instance_id = "other"
    follower.come_back()
    await follower.read()
    assert (len(follower.held), follower.num_snapshots) == (2, 2)
    follower.hang_up()


async def test_a_reset_is_told_and_what_runs_goes_on(running: Running) -> None:
    await running.start()
    follower, peer = Follower(running), running.peer()
    await peer.submit(submit("a", sequence(0, 13), max_tokens=3))
    await peer.read_until_ended(0)
    await follower.until(3)
    # After three tokens comes a step that tells the worker which row has ended.
    await running.wait_for_load(lambda load: load.num_steps_total == 4)
    running.worker.gate.clear()
    running.worker.plan_seen.clear()
    await peer.submit(submit("b", sequence(1, 13), max_tokens=3))
    async with asyncio.timeout(LIMIT_S):
        await running.worker.plan_seen.wait()
    answer = await follower.stub.ResetCache(scheduler_pb2.ResetCacheRequest())
    assert answer.num_blocks == 3
    await follower.until(0)
    running.worker.gate.set()
    await peer.read_until_ended(1)
    end = peer.received[1].end
    assert end is not None
    assert end.finished.stats.num_cached_tokens == 12
    assert (await follower.stub.ResetCache(scheduler_pb2.ResetCacheRequest())).num_blocks == 0
    load = await running.wait_until_idle()
    assert load.num_cached_blocks == 0
    assert (load.num_prefix_cache_queries_total, load.num_prefix_cache_hits_total) == (26, 12)
    follower.hang_up()


async def test_a_killed_worker_clears_the_picture(running: Running) -> None:
    await running.start(worker_grace_s=0.1)
    follower, peer = Follower(running), running.peer()
    await peer.submit(submit("a", sequence(0, 13), max_tokens=3))
    await peer.read_until_ended(0)
    await follower.until(3)
    await running.kill_worker()
    await follower.until(0)
    assert follower.num_snapshots == 1
    follower.hang_up()


async def test_without_caching_the_picture_stays_empty(running: Running) -> None:
    await running.start(enable_prefix_caching=False)
    follower, peer = Follower(running), running.peer()
    await peer.submit(submit("a", sequence(0, 13), sequence(1, 13), max_tokens=3))
    await peer.read_until_ended(0, 1)
    await follower.read()
    assert (follower.held, follower.number) == (set(), 0)
    end = peer.received[1].end
    assert end is not None
    assert end.finished.stats.num_cached_tokens == 0
    follower.hang_up()


async def test_reflection_shows_the_service_to_operators(running: Running) -> None:
    await running.start()
    async with open_channel(running.admin_address) as channel:
        await asyncio.wait_for(channel.channel_ready(), LIMIT_S)
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [one async for one in stub.ServerReflectionInfo(iter([request]), timeout=30)]
    names = {service.name for service in answers[0].list_services_response.service}
    assert {"glm.v1.SchedulerService", "glm.v1.PrefixCacheService"} <= names


def test_a_large_picture_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CACHE_ENTRIES", 2)
    blocks = [
        CachedBlock(replica=1, block=n, block_hash=bytes([n] * 32), parent_hash=bytes([n + 1] * 32))
        for n in range(5)
    ]
    parts = [part.snapshot for part in cache_parts(CacheUpdate(number=9, snapshot=blocks))]
    assert [(len(p.replicas), p.is_first, p.is_last, p.number) for p in parts] == [
        (2, True, False, 9),
        (2, False, False, 9),
        (1, False, True, 9),
    ]
    assert b"".join(p.parent_hashes for p in parts) == b"".join(b.parent_hash for b in blocks)
    events = [CacheEvent(number=n, replica=0, change=CacheChange.CLEARED) for n in (7, 8, 9)]
    pieces = [part.events for part in cache_parts(CacheUpdate(number=9, events=events))]
    assert [(p.first_number, list(p.changes)) for p in pieces] == [(7, [3, 3]), (9, [3])]
    assert pieces[1].block_hashes == bytes(32)
    (empty,) = cache_parts(CacheUpdate(number=0, snapshot=[]))
    assert empty.snapshot.is_first
    assert empty.snapshot.is_last
