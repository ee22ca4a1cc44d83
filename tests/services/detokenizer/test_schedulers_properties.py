"""Schedulers under any order of losses, returns, good-byes, refusals and aborts."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.messages import SequenceFinished
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from tests.services.detokenizer.fake_client import MAX_TOKENS, Asker, Fleet, ask


@settings(deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 3))
def test_whatever_is_lost_when_no_token_is_missing_and_none_comes_twice(
    seed: int, count: int
) -> None:
    """Losses, returns, good-byes, refusals and aborts in any order; then the schedulers stay."""
    rng = random.Random(seed)
    fleet = Fleet(count, max_losses=1_000, wait_s=1_000.0)
    asked: list[tuple[Asker, list[int], set[int]]] = []
    for number in range(60):
        event, where = rng.randrange(8), rng.randrange(count)
        client = fleet.clients[where]
        fleet.time += rng.random()
        if event == 0 and fleet.schedulers.is_reached:
            seeds = [rng.randrange(100) for _ in range(rng.randint(1, 3))]
            prompt = [rng.randrange(3)] * rng.randint(1, 9)
            asked.append((*ask(fleet, seeds, name=str(number), prompt=prompt), set()))
        elif event == 1 and client.is_connected:
            fleet.lose(where)
        elif event == 2 and not client.is_connected:
            fleet.start(where, is_worker_ready=rng.random() < 0.7)
        elif event == 3 and client.is_connected:
            fleet.tell(where, num_running=len(client.running))
        elif event == 4 and client.is_connected:
            client.fail_all(RequestError(FailureReason.DRAINING, "stopping"))
        elif event == 5 and asked:
            asker, names, aborted = rng.choice(asked)
            position = rng.randrange(len(names))
            if position not in asker.ends:
                fleet.schedulers.abort(names[position], AbortReason.CANCELLED)
                aborted.add(position)
        elif event == 6:
            full = RequestError(FailureReason.QUEUE_FULL, "full")
            # What is new and refused by all ends: only what was lost meets refusals here.
            specs = [spec for _, _, submit in client.waiting for spec in submit.sequences]
            has_new = any(not spec.output_token_ids for spec in specs)
            client.refusal = None if has_new or client.refusal else full
            client.answer()
            client.refusal = None
        else:
            fleet.step(rng.randint(1, 3))
    for number, client in enumerate(fleet.clients):
        if not client.is_connected:
            fleet.start(number)
        fleet.tell(number)
    for _ in range(60):
        fleet.time += 2.5
        fleet.step()
    assert not fleet.num_live
    for asker, names, aborted in asked:
        for position in range(len(names)):
            if position in aborted:
                assert position not in asker.ends
            else:
                assert isinstance(asker.ends[position], SequenceFinished), asker.ends[position]
                assert len(asker.tokens[position]) == MAX_TOKENS
