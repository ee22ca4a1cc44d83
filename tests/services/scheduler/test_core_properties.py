"""The core under any order of events: nothing lost, shared or doubled, every stream complete."""

import random
from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from services.scheduler.outlet import Outlet
from services.scheduler.plan import Capacity, FinishCode
from shared.endings import AbortReason, FinishReason
from shared.errors import FailureReason, RequestError
from tests.services.scheduler.harness import Harness

WHOLE = (FinishReason.STOP, FinishReason.LENGTH)

# What happens between two events, at every replica: a plan, a result, or as much as can be.
AHEAD = st.lists(st.sampled_from("psstt"), max_size=5)
SUBMIT: dict[str, Any] = {
    "num_prompts": st.lists(st.integers(1, 12), min_size=1, max_size=4),
    "num_resumed": st.sampled_from([0, 0, 0, 1, 2]),
    "max_tokens": st.sampled_from([1, 2, 5, 12, 24, 30, 36]),
    "early_end": st.sampled_from([0, 0, 0, 1, 2, 12]),
    "code": st.sampled_from([FinishCode.EOS, FinishCode.STOP_TOKEN]),
    "timeout_ms": st.sampled_from([0, 0, 0, 0, 0, 10]),
    "which": st.sampled_from([0, 1]),
    "num_logprobs": st.sampled_from([None, None, 0]),
    "tenant_id": st.sampled_from(["", "a", "b"]),
    "priority": st.sampled_from([0, 0, -1, 3]),
    "first_token_timeout_ms": st.sampled_from([0, 0, 0, 0, 0, 9]),
    "fork": st.sampled_from([0, 0, 0, 3, 8]),
    "cache_salt": st.sampled_from(["", "", "", "s"]),
    "reads_cache": st.sampled_from([True, True, True, False]),
    "ahead": AHEAD,
}


class CoreMachine(RuleBasedStateMachine):
    """Any order of events; `Harness` checks after each of them.

    Events come between steps: most rules go on for a few steps, so that there is something running
    for the next one to hit.
    """

    harness: Harness
    counts: ClassVar[Counter[str]] = Counter()

    @initialize(
        window=st.sampled_from([1, 2]),
        num_blocks=st.lists(st.integers(5, 16), min_size=1, max_size=3),
        is_uneven=st.booleans(),
        is_joint=st.booleans(),
        block_size=st.sampled_from([1, 2, 3, 4, 4]),
        max_num_seqs=st.sampled_from([1, 2, 4, 6]),
        max_num_batched_tokens=st.integers(1, 24),
        max_model_len=st.sampled_from([3, 9, 20, 40, 40, 40]),
        run_length=st.sampled_from([1, 1, 1, 3]),
        enable_prefix_caching=st.sampled_from([True, True, True, False]),
        num_drafts=st.sampled_from([3, 0, 1, 5]),
        policy=st.sampled_from(["fcfs", "priority"]),
        watermark=st.sampled_from([0.0, 0.2]),
        num_long_tokens=st.sampled_from([0, 2, 8]),
    )
    def open(
        self,
        window: int,
        num_blocks: list[int],
        is_uneven: bool,
        is_joint: bool,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        run_length: int,
        num_drafts: int,
        policy: str,
        watermark: float,
        num_long_tokens: int,
        enable_prefix_caching: bool,
    ) -> None:
        capacity = Capacity(
            num_blocks=num_blocks[0],
            block_size_tokens=block_size,
            num_rows=2 * max_num_seqs,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            vocab_size=50_000,
            is_replay=run_length > 1,
            num_speculative_tokens=num_drafts if run_length == 1 else 0,
            moe_methods=((8, 3), (64, 1)),
            captured_num_seqs=(1, 4),
        )
        self.harness = Harness(
            capacity,
            run_length,
            num_replicas=len(num_blocks),
            num_blocks=num_blocks if is_uneven else (),
            is_joint=is_joint and len(num_blocks) > 1,
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

    @invariant()
    def count(self) -> None:
        self.counts["events"] += 1

    # -- clients -------------------------------------------------------------------------------

    @rule(**SUBMIT)
    def submit(self, **request: Any) -> None:
        self._submit(**request)

    @rule(**SUBMIT)
    def submit_another(self, **request: Any) -> None:
        self._submit(**request)

    def _submit(
        self,
        num_prompts: list[int],
        num_resumed: int,
        early_end: int,
        code: FinishCode,
        which: int,
        priority: int,
        ahead: list[str],
        **options: Any,
    ) -> None:
        harness = self.harness
        if early_end:
            for number, num_prompt in enumerate(num_prompts, harness.num_submitted):
                harness.ends_at[number] = (num_prompt + num_resumed + early_end, code)
        harness.submit(
            self.outlets[which],
            num_prompts,
            num_resumed=num_resumed,
            priority=priority if self.is_priority else 0,
            **options,
        )
        self._go_on(ahead)

    @precondition(lambda self: self.harness.live())
    @rule(data=st.data(), reason=st.sampled_from(AbortReason), kept=st.integers(0, 5), ahead=AHEAD)
    def abort(self, data: st.DataObject, reason: AbortReason, kept: int, ahead: list[str]) -> None:
        live = [stream.seed for stream in self.harness.live()]
        self.harness.abort(data.draw(st.sampled_from(live)), reason, kept)
        self._go_on(ahead)

    @precondition(lambda self: len(self.harness.live()) > 2)
    @rule(data=st.data(), ahead=AHEAD)
    def abort_request(self, data: st.DataObject, ahead: list[str]) -> None:
        harness = self.harness
        request_id = data.draw(st.sampled_from([s.request_id for s in harness.live()]))
        live = [s for s in harness.live() if s.request_id == request_id]
        assert harness.core.abort_request(request_id, harness.now) == len(live)
        assert harness.core.abort_request(request_id, harness.now) == 0
        harness.check()
        self._go_on(ahead)

    @precondition(lambda self: len(self.harness.live()) > 3)
    @rule(which=st.sampled_from([0, 1]))
    def close_outlet(self, which: int) -> None:
        self.harness.close(self.outlets[which])
        self.outlets[which] = Outlet()

    @rule(ahead=AHEAD)
    def drain(self, ahead: list[str]) -> None:
        """Nothing enters meanwhile, and what lives goes on."""
        error = RequestError(FailureReason.DRAINING, "draining")
        self.harness.core.refuse_new(error)
        (verdict,) = self.harness.submit(self.outlets[0], [1])
        assert verdict.refusal is not None
        assert verdict.refusal.reason is FailureReason.DRAINING
        self._go_on(ahead)
        self.harness.core.refuse_new(None)

    # -- the caches, time ----------------------------------------------------------------------

    @rule()
    def tidy(self) -> None:
        self.harness.core.tidy()
        self.harness.check_names()

    @rule(ahead=AHEAD)
    def reset_cache(self, ahead: list[str]) -> None:
        self.harness.reset_cache()
        self._go_on(ahead)

    @rule(seconds=st.sampled_from([0.001, 0.001, 0.02]))
    def wait(self, seconds: float) -> None:
        self.harness.now += seconds
        self.harness.core.tick(self.harness.now)
        self.harness.check()

    # -- the workers ---------------------------------------------------------------------------

    @rule(ahead=st.lists(st.sampled_from("psst"), min_size=4, max_size=14))
    def go_on(self, ahead: list[str]) -> None:
        self._go_on(ahead)

    @precondition(lambda self: not self.harness.is_joint)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        self.harness.plan(self._any(data))

    @precondition(lambda self: any(len(side.results) == 1 for side in self.harness.sides))
    @rule(data=st.data(), dice=st.randoms(use_true_random=False))
    def fail_row(self, data: st.DataObject, dice: random.Random) -> None:
        sides = self.harness.sides
        ready = [n for n, side in enumerate(sides) if len(side.results) == 1]
        self.counts["rows failed"] += fail_one_row(
            self.harness, dice, data.draw(st.sampled_from(ready))
        )

    @precondition(lambda self: self._busy())
    @rule(
        data=st.data(),
        can_resume=st.sampled_from([True, True, True, False]),
        is_back=st.booleans(),
        ahead=AHEAD,
    )
    def lose_worker(
        self, data: st.DataObject, can_resume: bool, is_back: bool, ahead: list[str]
    ) -> None:
        replica = data.draw(st.sampled_from(self._busy()))
        self.harness.lose_worker(can_resume=can_resume, replica=replica)
        self.counts["losses"] += 1
        if is_back:
            self.harness.open_epoch(replica)
        self._go_on(ahead)

    @precondition(lambda self: not all(side.is_open for side in self.harness.sides))
    @rule(data=st.data(), ahead=AHEAD)
    def open_worker(self, data: st.DataObject, ahead: list[str]) -> None:
        lost = [n for n, side in enumerate(self.harness.sides) if not side.is_open]
        self.harness.open_epoch(data.draw(st.sampled_from(lost)))
        self._go_on(ahead)

    @precondition(lambda self: len(self.harness.sides) > 1)
    @rule(data=st.data(), is_draining=st.booleans(), ahead=AHEAD)
    def drain_replica(self, data: st.DataObject, is_draining: bool, ahead: list[str]) -> None:
        harness = self.harness
        try:
            harness.core.drain_replica(self._any(data), harness.now, is_draining=is_draining)
        except RequestError:
            num_draining = sum(r.is_draining for r in harness.core.load().replicas)
            assert num_draining == len(harness.sides) - 1, "refused though another takes requests"
        harness.check()
        self._go_on(ahead)

    def _busy(self) -> list[int]:
        """Replicas at which something runs."""
        loads = self.harness.core.load().replicas
        return [number for number, load in enumerate(loads) if load.num_running]

    def _go_on(self, ahead: list[str]) -> None:
        harness = self.harness
        for what in ahead:
            if what == "s":
                harness.step()
            elif harness.is_joint:
                harness.tick() if what == "p" else harness.take_tick()
            else:
                for replica, side in enumerate(harness.sides):
                    if what == "p":
                        harness.plan(replica)
                    elif side.results:
                        harness.take_result(replica)

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
        self._count_run()

    def _count_run(self) -> None:
        load, streams = self.harness.core.load(), self.harness.streams.values()
        ends = [stream.end for stream in streams if stream.end]
        self.counts.update(
            {
                "joint": self.harness.is_joint,
                "steps": load.num_steps_total,
                "preemptions": load.num_preemptions_total,
                "drafts kept": sum(load.num_accepted_tokens_per_position),
                "hits": load.num_prefix_cache_hits_total,
                "whole": sum(end.finish_reason in WHOLE for end in ends),
                "lost": sum(end.failure is not None and "lost" in str(end.failure) for end in ends),
            }
        )


def run_machine(num_runs: int, *, is_random: bool) -> Counter[str]:
    """Runs of up to fifty events each; what happened in all of them."""
    CoreMachine.counts.clear()
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=num_runs,
            stateful_step_count=50,
            deadline=None,
            derandomize=not is_random,
            database=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
    return CoreMachine.counts


KINDS = (
    *("joint", "preemptions", "drafts kept", "hits", "whole", "losses", "lost", "rows failed"),
)


def check_counts(counts: Counter[str], num_events: int) -> None:
    """So many events, and each kind of trouble among them."""
    assert counts["events"] >= num_events
    # Which events are drawn depends on more than the seed: the order of sets, for one.
    missing = [name for name in KINDS if not counts[name]]
    assert not missing, f"of {counts}"


@pytest.mark.timeout(600)  # half a minute of computing where nothing else runs
def test_every_law_holds_after_each_of_ten_thousand_events() -> None:
    check_counts(run_machine(340, is_random=False), 10_000)


@pytest.mark.soak
def test_every_law_holds_after_each_of_a_hundred_thousand_other_events() -> None:
    check_counts(run_machine(3400, is_random=True), 100_000)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("seed", range(6))
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


def fail_one_row(harness: Harness, dice: random.Random, replica: int = 0) -> bool:
    """The waiting result becomes one in which a row failed alone, if one can."""
    side = harness.sides[replica]
    result = side.results[0]
    if not result.rows:
        return False
    entry = dice.randrange(len(result.rows))
    row = side.worker.rows.get(result.rows[entry])
    if row is None or row.new.sampling.num_logprobs is not None:
        return False
    start = sum(result.num_sampled_tokens[:entry])
    del result.token_ids[start : start + result.num_sampled_tokens[entry]]
    result.num_sampled_tokens[entry] = 0
    result.finish_codes[entry] = 0
    if result.num_accepted_tokens:
        result.num_accepted_tokens[entry] = 0
    side.worker.spoil(row, result.num_computed_tokens[entry])
    result.row_failures[result.rows[entry]] = RequestError(FailureReason.NUMERICAL_ERROR, "nan")
    row.is_over = True
    return True
