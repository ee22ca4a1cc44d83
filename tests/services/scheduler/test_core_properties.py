"""The core under any order of events: nothing lost, shared or doubled, every stream complete."""

import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.scheduler.outlet import Outlet
from services.scheduler.plan import Capacity, FinishCode
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from tests.services.scheduler.harness import Harness


class CoreMachine(RuleBasedStateMachine):
    """Any order of events; `Harness` checks after each of them."""

    harness: Harness

    @initialize(
        window=st.sampled_from([1, 2]),
        num_blocks=st.integers(4, 16),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.integers(1, 24),
        max_model_len=st.sampled_from([2, 3, 9, 20, 40, 40]),
        run_length=st.sampled_from([1, 1, 1, 3]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        num_drafts=st.sampled_from([3, 0, 1, 5]),
        num_replicas=st.sampled_from([1, 2, 2]),
        policy=st.sampled_from(["fcfs", "priority"]),
        watermark=st.sampled_from([0.0, 0.2]),
        num_long_tokens=st.sampled_from([0, 2, 8]),
    )
    def open(
        self,
        window: int,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        run_length: int,
        num_drafts: int,
        num_replicas: int,
        policy: str,
        watermark: float,
        num_long_tokens: int,
        enable_prefix_caching: bool,
    ) -> None:
        capacity = Capacity(
            num_blocks=num_blocks,
            block_size_tokens=block_size,
            num_rows=2 * max_num_seqs,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=50_000,
            is_replay=run_length > 1,
            num_speculative_tokens=num_drafts if run_length == 1 else 0,
        )
        self.harness = Harness(
            capacity,
            run_length,
            num_replicas=num_replicas,
            enable_prefix_caching=enable_prefix_caching,
            max_plans_in_flight=window,
            max_queued_requests=12,
            max_queued_tokens=300,
            policy=policy,
            priority_ageing_s=0.01,
            watermark=watermark,
            long_prefill_token_threshold=num_long_tokens,
            max_num_partial_prefills=2,
            max_long_partial_prefills=1,
        )
        self.is_priority = policy == "priority"
        self.outlets = [Outlet(), Outlet()]

    @rule(
        num_prompts=st.lists(st.integers(1, 30), min_size=1, max_size=3),
        num_resumed=st.integers(0, 2),
        max_tokens=st.integers(1, 40),
        early_end=st.sampled_from([0, 0, 0, 1, 2, 12]),
        code=st.sampled_from([FinishCode.EOS, FinishCode.STOP_TOKEN]),
        timeout_ms=st.sampled_from([0, 0, 3, 10]),
        which=st.sampled_from([0, 1]),
        num_logprobs=st.sampled_from([None, None, 0]),
        tenant_id=st.sampled_from(["", "a", "b"]),
        priority=st.sampled_from([0, 0, -1, 3]),
        first_token_timeout_ms=st.sampled_from([0, 0, 2, 9]),
        fork=st.sampled_from([0, 0, 0, 3, 8]),
        cache_salt=st.sampled_from(["", "", "", "s"]),
        reads_cache=st.sampled_from([True, True, True, False]),
    )
    def submit(
        self,
        num_prompts: list[int],
        num_resumed: int,
        max_tokens: int,
        early_end: int,
        code: FinishCode,
        timeout_ms: int,
        which: int,
        num_logprobs: int | None,
        tenant_id: str,
        priority: int,
        first_token_timeout_ms: int,
        fork: int,
        cache_salt: str,
        reads_cache: bool,
    ) -> None:
        harness = self.harness
        if early_end:
            for number, num_prompt in enumerate(num_prompts, harness.num_submitted):
                harness.ends_at[number] = (num_prompt + num_resumed + early_end, code)
        harness.submit(
            self.outlets[which],
            num_prompts,
            num_resumed=num_resumed,
            max_tokens=max_tokens,
            timeout_ms=timeout_ms,
            num_logprobs=num_logprobs,
            tenant_id=tenant_id,
            priority=priority if self.is_priority else 0,
            first_token_timeout_ms=first_token_timeout_ms,
            fork=fork,
            cache_salt=cache_salt,
            reads_cache=reads_cache,
        )

    @rule()
    def tidy(self) -> None:
        self.harness.core.tidy()
        self.harness.check_names()

    @rule()
    def reset_cache(self) -> None:
        self.harness.reset_cache()

    @rule(data=st.data(), reason=st.sampled_from(AbortReason), kept=st.integers(0, 5))
    @precondition(lambda self: self.harness.streams)
    def abort(self, data: st.DataObject, reason: AbortReason, kept: int) -> None:
        self.harness.abort(data.draw(st.sampled_from(sorted(self.harness.streams))), reason, kept)

    @rule(data=st.data())
    @precondition(lambda self: self.harness.streams)
    def abort_request(self, data: st.DataObject) -> None:
        harness = self.harness
        stream = harness.streams[data.draw(st.sampled_from(sorted(harness.streams)))]
        live = [s for s in harness.live() if s.request_id == stream.request_id]
        assert harness.core.abort_request(stream.request_id, harness.now) == len(live)
        harness.check()

    @rule(which=st.sampled_from([0, 1]))
    def close_outlet(self, which: int) -> None:
        self.harness.close(self.outlets[which])
        self.outlets[which] = Outlet()

    @rule(seconds=st.sampled_from([0.001, 0.02]))
    def wait(self, seconds: float) -> None:
        self.harness.now += seconds
        self.harness.core.tick(self.harness.now)
        self.harness.check()

    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        self.harness.plan(self._any(data))

    @rule(data=st.data())
    def take_result(self, data: st.DataObject) -> None:
        replica = self._any(data)
        if self.harness.sides[replica].results:
            self.harness.take_result(replica)

    @rule(count=st.integers(1, 12))
    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.harness.step()

    @rule(data=st.data(), can_resume=st.booleans(), is_back=st.booleans())
    def lose_worker(self, data: st.DataObject, can_resume: bool, is_back: bool) -> None:
        replica = self._any(data)
        if self.harness.sides[replica].is_open:
            self.harness.lose_worker(can_resume=can_resume, replica=replica)
        if is_back:
            self.harness.open_epoch(replica)

    @rule(data=st.data(), is_draining=st.booleans())
    def drain_replica(self, data: st.DataObject, is_draining: bool) -> None:
        harness = self.harness
        try:
            harness.core.drain_replica(self._any(data), harness.now, is_draining=is_draining)
        except RequestError:
            num_draining = sum(r.is_draining for r in harness.core.load().replicas)
            assert num_draining == len(harness.sides) - 1, "refused though another takes requests"
        harness.check()

    def _any(self, data: st.DataObject) -> int:
        """Number of a replica."""
        most = len(self.harness.sides) - 1
        return data.draw(st.integers(0, most)) if most else 0

    def teardown(self) -> None:
        """Whatever happened, everything ends and nothing is left behind."""
        if not hasattr(self, "harness"):
            return
        for replica, side in enumerate(self.harness.sides):
            if not side.is_open:
                self.harness.open_epoch(replica)
        self.harness.run_to_end()


CoreMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestAnyOrderOfEvents = CoreMachine.TestCase


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("seed", range(12))
def test_streams_survive_a_pool_that_is_far_too_small(
    window: int, seed: int, num_drafts: int
) -> None:
    """Long outputs, few blocks: preemption all the time, with aborts, losses and row failures."""
    dice = random.Random(seed)
    capacity = Capacity(
        num_blocks=dice.randint(12, 24),
        block_size_tokens=dice.choice([1, 2, 4]),
        num_rows=16,
        max_num_seqs=8,
        max_num_batched_tokens=dice.choice([8, 11, 64]) * (1 + num_drafts),
        max_model_len=40,
        is_replay=seed % 4 == 3,
        num_speculative_tokens=0 if seed % 4 == 3 else num_drafts,
    )
    harness = Harness(
        capacity,
        run_length=3 if capacity.is_replay else 1,
        max_plans_in_flight=window,
    )
    outlets = [Outlet() for _ in range(3)]
    for _ in range(800 if num_drafts else 400):
        _disturb(harness, dice, outlets)
        harness.step()
    harness.run_to_end()
    load = harness.core.load()
    assert load.num_preemptions_total > 10
    complete = [s for s in harness.streams.values() if s.end and s.end.finish_reason]
    assert len(complete) > 40


def _disturb(harness: Harness, dice: random.Random, outlets: list[Outlet]) -> None:
    if len(harness.live()) < 12:
        max_tokens = dice.randint(1, 30)
        num_logprobs = dice.choice([None, 0])
        harness.submit(
            dice.choice(outlets),
            [dice.randint(1, 9)],
            max_tokens=max_tokens,
            num_logprobs=num_logprobs,
            fork=dice.choice([None, 0, 3]),
        )
    live = [s.seed for s in harness.live()]
    if live and dice.random() < 0.05:
        harness.abort(dice.choice(live), dice.choice(list(AbortReason)), kept=2)
    if dice.random() < 0.02:
        which = dice.randrange(len(outlets))
        harness.close(outlets[which])
        outlets[which] = Outlet()
    if dice.random() < 0.02:
        harness.lose_worker(can_resume=dice.random() < 0.8)
        harness.open_epoch()
    if len(harness.results) == 1 and dice.random() < 0.1:
        fail_one_row(harness, dice)


def fail_one_row(harness: Harness, dice: random.Random) -> None:
    """The waiting result becomes one in which a row failed alone."""
    result = harness.results[0]
    entry = dice.randrange(len(result.rows))
    row = harness.worker.rows.get(result.rows[entry])
    if row is None or row.new.sampling.num_logprobs is not None:
        return
    start = sum(result.num_sampled_tokens[:entry])
    del result.token_ids[start : start + result.num_sampled_tokens[entry]]
    result.num_sampled_tokens[entry] = 0
    result.finish_codes[entry] = 0
    if result.num_accepted_tokens:
        result.num_accepted_tokens[entry] = 0
    result.row_failures[result.rows[entry]] = RequestError(FailureReason.NUMERICAL_ERROR, "nan")
    row.is_over = True
