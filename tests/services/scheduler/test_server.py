"""The scheduler process over real channels, with a fake worker."""

from protos.glm.v1 import common_pb2
from tests.services.scheduler.conftest import (
    Running,
    expected,
    sequence,
    submit,
)


async def test_connect_streams_every_token_of_many_sequences(running: Running) -> None:
    await running.start()
    peer = running.peer()
    submits = [submit(f"r{n}", sequence(n, 3 + n), max_tokens=10) for n in range(20)]
    await peer.submit(*submits)
    await peer.read_until_ended(*range(20))
    for n in range(20):
        entry = peer.received[n]
        assert entry.tokens == expected(n, 3 + n, 10)
        assert entry.end.finished.reason == common_pb2.FINISH_REASON_LENGTH
        assert entry.end.finished.stats.num_prompt_tokens == 3 + n
        assert entry.end.finished.stats.num_output_tokens == 10
    load = await running.wait_until_idle()
    assert load.num_output_tokens_total == 200
    peer.call.cancel()
