"""The connection to the detokenizer, against a fake one on a real socket."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protos.glm.v1 import common_pb2, detokenizer_pb2
from services.frontend.detokenizer_client import MAX_SUBMIT_BYTES, DetokenizerClient
from services.frontend.submission import ObjectKind, OutputPlan, SequencePlan, Submission
from shared.errors import FailureReason, RequestError
from shared.sampling import ReplayScript, SamplingSpec
from tests.services.frontend.fake_detokenizer import Behaviour, FakeDetokenizer
from tests.services.frontend.waits import until


def submission(request_id: str = "r", *, num_tokens: int = 3, n: int = 1) -> Submission:
    ids = list(range(num_tokens))
    return Submission(
        request_id=request_id,
        sequences=tuple(
            SequencePlan(index=i, prompt_token_ids=ids, seed=i, replay=ReplayScript(token_ids=(7,)))
            for i in range(n)
        ),
        sampling=SamplingSpec(seed=5),
        output=OutputPlan(
            object_kind=ObjectKind.CHAT_COMPLETION,
            response_id=request_id,
            model="m",
            created_s=1,
            is_stream=True,
        ),
        traceparent="tp",
        timeout_ms=9,
        cache_salt="s",
        tenant_id="t",
    )


@pytest.fixture
async def fake(run_dir: Path) -> AsyncIterator[FakeDetokenizer]:
    fake = FakeDetokenizer(f"unix:{run_dir}/d.sock")
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def client(fake: FakeDetokenizer) -> AsyncIterator[DetokenizerClient]:
    client = DetokenizerClient(fake.address, credit_bytes=1000)
    task = asyncio.create_task(client.run())
    await until(lambda: client.load.is_worker_ready)
    yield client
    task.cancel()
    await asyncio.wait({task})


async def test_a_submit_carries_everything(
    client: DetokenizerClient, fake: FakeDetokenizer
) -> None:
    await client.submit(submission(n=2)).wait_for_verdict()
    message = fake.submits[0]
    assert message.initial_credit_bytes == 1000
    submit = message.submit
    assert (submit.request_id, submit.traceparent, submit.timeout_ms) == ("r", "tp", 9)
    assert (submit.cache_salt, submit.tenant_id, submit.sampling.seed) == ("s", "t", 5)
    assert [s.prompt_token_ids for s in submit.sequences] == [b"\0\0\0\0\1\0\0\0\2\0\0\0"] * 2
    assert submit.sequences[1].replay.token_ids == b"\7\0\0\0"
    assert submit.output.object_kind == detokenizer_pb2.OBJECT_KIND_CHAT_COMPLETION


async def test_without_a_connection_nothing_is_submitted(run_dir: Path) -> None:
    client = DetokenizerClient(f"unix:{run_dir}/none.sock", credit_bytes=1)
    with pytest.raises(RequestError) as caught:
        client.submit(submission())
    assert caught.value.reason is FailureReason.UPSTREAM_LOST
    assert client.num_open == 0


async def test_a_request_larger_than_a_message_is_refused_here(client: DetokenizerClient) -> None:
    num_tokens = MAX_SUBMIT_BYTES // 4 // 8
    with pytest.raises(RequestError, match="fewer choices"):
        client.submit(submission(num_tokens=num_tokens, n=9))
    assert client.num_open == 0
    await client.submit(submission(num_tokens=num_tokens, n=7)).wait_for_verdict()


async def test_large_submits_at_once_are_cut_into_messages_that_fit(
    client: DetokenizerClient, fake: FakeDetokenizer
) -> None:
    size = MAX_SUBMIT_BYTES // 4 // 2
    exchanges = [client.submit(submission(f"r{i}", num_tokens=size)) for i in range(5)]
    client.close(exchanges[4])
    for exchange in exchanges[:4]:
        await exchange.wait_for_verdict()
    await fake.wait_until(lambda: fake.aborted == [exchanges[4].stream_id])
    assert [s.submit.request_id for s in fake.submits] == [f"r{i}" for i in range(5)]
    assert fake.connections == 1


async def test_stream_ids_of_live_and_aborted_requests_are_not_reused(
    client: DetokenizerClient,
) -> None:
    first, second = client.submit(submission("a")), client.submit(submission("b"))
    client.close(second)
    client._ids._last = first.stream_id - 1
    third = client.submit(submission("c"))
    assert third.stream_id not in {first.stream_id, second.stream_id}


async def test_a_closed_request_is_aborted_once_and_hears_no_more(
    client: DetokenizerClient, fake: FakeDetokenizer
) -> None:
    fake.behaviour = Behaviour(pause_s=0.01)
    exchange = client.submit(submission())
    await exchange.wait_for_verdict()
    client.close(exchange)
    client.close(exchange)
    await fake.wait_until(lambda: fake.aborted)
    assert fake.aborted == [exchange.stream_id]
    assert client.num_open == 0
    assert not exchange.is_ended
    await until(lambda: not client._aborted)


async def test_credits_are_collected_and_sent_rarely(
    client: DetokenizerClient, fake: FakeDetokenizer
) -> None:
    fake.behaviour = Behaviour(silent_after=0)
    first, second = client.submit(submission("a")), client.submit(submission("b"))
    await second.wait_for_verdict()
    for _ in range(100):
        client.give_credit(first, 1)
        client.give_credit(second, 2)
    client.give_credit(first, 0)
    await fake.wait_until(lambda: fake.credits)
    assert fake.credits == {first.stream_id: 100, second.stream_id: 200}
    assert fake.credit_messages == 1


async def test_a_lost_connection_fails_everything_and_comes_back(
    client: DetokenizerClient, fake: FakeDetokenizer
) -> None:
    fake.behaviour = Behaviour(silent_after=1)
    exchange = client.submit(submission())
    await exchange.wait_for_verdict()
    await fake.stop()
    with pytest.raises(RequestError) as caught:
        await exchange.wait_for_end()
    assert caught.value.reason is FailureReason.UPSTREAM_LOST
    assert not client.is_connected
    assert not client.load.is_worker_ready
    await fake.start()
    await until(lambda: client.is_connected)
    fake.behaviour = Behaviour()
    assert b"[DONE]" in await client.submit(submission("again")).wait_for_end()


async def test_state_changes_are_told(fake: FakeDetokenizer) -> None:
    told: list[tuple[bool, bool]] = []
    client = DetokenizerClient(
        fake.address,
        credit_bytes=1,
        on_change=lambda: told.append((client.is_connected, client.is_ready)),
    )
    task = asyncio.create_task(client.run())
    await until(lambda: told == [(True, False), (True, True)])
    fake.drain()
    await until(lambda: told[2:] == [(True, False)])
    await fake.stop()
    await until(lambda: told[3:] == [(False, False)])
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


async def test_a_message_that_breaks_the_contract_costs_the_connection_only(
    client: DetokenizerClient, fake: FakeDetokenizer
) -> None:
    good = client.take_message
    client.take_message = lambda _: (_ for _ in ()).throw(ValueError("columns"))  # type: ignore[method-assign]
    exchange = client.submit(submission())
    with pytest.raises(RequestError):
        await exchange.wait_for_verdict()
    client.take_message = good  # type: ignore[method-assign]
    await until(lambda: client.is_connected)
    await client.submit(submission("again")).wait_for_verdict()
    assert fake.connections >= 2


async def test_stats_and_reason_of_the_end_arrive(client: DetokenizerClient) -> None:
    exchange = client.submit(submission())
    await exchange.wait_for_end()
    assert exchange.finish_reason == "stop"
    assert exchange.stats is not None
    assert exchange.stats.num_output_tokens == 4


async def test_what_was_odd_in_the_output_arrives_with_the_end(
    client: DetokenizerClient, fake: FakeDetokenizer
) -> None:
    fake.behaviour = Behaviour(
        oddities=detokenizer_pb2.OutputOddities(num_unclosed_reasoning=2, num_unreadable_calls=1)
    )
    exchange = client.submit(submission())
    await exchange.wait_for_end()
    assert exchange.oddities == {"num_unclosed_reasoning": 2, "num_unreadable_calls": 1}


async def test_an_unknown_failure_reason_counts_as_internal(
    client: DetokenizerClient, fake: FakeDetokenizer
) -> None:
    fake.behaviour = Behaviour(refusal=common_pb2.Failure(reason=99, message="new"))
    with pytest.raises(RequestError) as caught:
        await client.submit(submission()).wait_for_verdict()
    assert caught.value.reason is FailureReason.INTERNAL


async def test_an_operators_reset_is_passed_on(
    client: DetokenizerClient, fake: FakeDetokenizer
) -> None:
    assert await client.reset_cache() == 12
    await fake.stop()
    with pytest.raises(RequestError) as caught:
        await client.reset_cache()
    assert caught.value.reason is FailureReason.UPSTREAM_LOST


async def test_an_operators_abort_is_passed_on(
    client: DetokenizerClient, fake: FakeDetokenizer
) -> None:
    await client.submit(submission("known")).wait_for_verdict()
    assert (await client.abort("known"), await client.abort("unknown")) == (1, 0)
    assert fake.aborted_request_ids == ["known", "unknown"]


async def test_a_call_whose_channel_is_closed_under_it_tells_the_loss(
    client: DetokenizerClient, fake: FakeDetokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_asked = asyncio.Event()

    async def never(request: object, context: object) -> None:
        is_asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(fake, "abort", never)
    asking = asyncio.create_task(client.abort("known"))
    await is_asked.wait()
    assert client._link.channel is not None
    await client._link.channel.close()
    with pytest.raises(RequestError) as caught:
        await asking
    assert caught.value.reason is FailureReason.UPSTREAM_LOST
