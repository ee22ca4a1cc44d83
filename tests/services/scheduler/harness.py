"""Clients, a worker and a clock around one core; holds every event against the contract.

Streams are compared with an undisturbed run, plans with what earlier plans still use, and the core
checks its own laws after every event.
"""

from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.scheduler.cache_events import CachedBlock
from services.scheduler.core import MAX_LOSSES, SchedulerCore
from services.scheduler.limits import CoreConfig
from services.scheduler.messages import Delivery, SequenceEnd, SequenceSubmit, Submission, Verdict
from services.scheduler.outlet import Outlet
from services.scheduler.plan import Capacity, StepPlan, StepResult
from services.scheduler.ticks import plan_step
from shared.block_hashes import BlockHashes, root_hash
from shared.endings import AbortReason
from shared.errors import FailureReason, RequestError
from shared.sampling import ReplayScript, SamplingSpec, SequenceStats
from tests.services.scheduler.simulated_worker import SimulatedWorker, expected_token

SALTS = ("", "s")
LOST = RequestError(FailureReason.UPSTREAM_LOST, "lost")


@dataclass
class Stream:
    """What a client knows of one sequence."""

    seed: int
    num_prompt: int
    outlet: Outlet
    request_id: str
    wants_logprobs: bool
    tokens: list[int] = field(default_factory=list)
    end: SequenceEnd | None = None
    is_forgotten: bool = False
    # Tokens that were compared with an undisturbed run.
    num_checked: int = 0
    num_resumed: int = 0
    # Told with the tokens.
    start: SequenceStats | None = None
    drafts: tuple[int, int] = (0, 0)


@dataclass
class InFlight:
    """What a plan without a result still uses."""

    rows: set[int]
    blocks: dict[int, set[int]]


class Side:
    """One replica: its worker, and the plans and results on their way."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.worker = SimulatedWorker(capacity)
        self.results: deque[StepResult] = deque()
        self.in_flight: deque[InFlight] = deque()
        self.is_open = False
        # Names of contents, by weights and content.
        self.names: dict[tuple[int, int], set[bytes]] = {}

    def forget(self) -> None:
        self.in_flight.clear()
        self.results.clear()
        self.names.clear()


class Harness:
    """One core with everything around it; seeds and stream_ids are the same numbers.

    Args:
        capacity: Of every replica.
        run_length: Tokens per result of a row.
        num_replicas: How many.
        num_blocks: Of each replica, where they differ.
        is_joint: The replicas are one world: they step, end and start together.
        config: Settings of the core.
    """

    def __init__(
        self,
        capacity: Capacity,
        run_length: int = 1,
        *,
        num_replicas: int = 1,
        num_blocks: Sequence[int] = (),
        is_joint: bool = False,
        **config: Any,
    ) -> None:
        self.now = 0.0
        self.capacity = capacity
        self.run_length = run_length
        self.window = config.get("max_plans_in_flight", 1)
        self.core = SchedulerCore(CoreConfig(**config), num_replicas=num_replicas)
        self.is_joint = is_joint
        sizes = num_blocks or [capacity.num_blocks] * num_replicas
        self.sides = [Side(replace(capacity, num_blocks=size)) for size in sizes]
        self.ends_at: dict[int, tuple[int, int]] = {}
        self.streams: dict[int, Stream] = {}
        self.plans: list[StepPlan] = []
        self.num_submitted = 0
        # Times that a stream ran when its worker was lost.
        self.num_losses: Counter[int] = Counter()
        self.prompts: dict[int, array[int]] = {}
        self.next_prompt: array[int] | None = None
        for replica in range(1 if is_joint else num_replicas):
            self.open_epoch(replica)

    @property
    def worker(self) -> SimulatedWorker:
        return self.sides[0].worker

    @property
    def results(self) -> deque[StepResult]:
        return self.sides[0].results

    @property
    def in_flight(self) -> deque[InFlight]:
        return self.sides[0].in_flight

    def open_epoch(self, replica: int = 0) -> None:
        for number in self.world_of(replica):
            side = self.sides[number]
            side.forget()
            self.core.worker_opened(side.capacity, self.now, number)
            side.worker = SimulatedWorker(side.capacity)
            side.worker.run_length = self.run_length
            side.worker.end_at = self.ends_at
            side.is_open = True
        self.check()

    def lose_worker(self, *, can_resume: bool = True, replica: int = 0) -> None:
        for number in self.world_of(replica):
            batch = self.core._replicas[number].batch
            self.num_losses.update(s.stream_id for s in (batch.running if batch else ()))
            self.core.worker_lost(LOST, self.now, can_resume=can_resume, replica=number)
            self.sides[number].forget()
            self.sides[number].is_open = False
        self.check()

    def world_of(self, replica: int) -> Sequence[int]:
        """The replicas that step, end and start together with this one."""
        return range(len(self.sides)) if self.is_joint else [replica]

    @property
    def is_open(self) -> bool:
        return self.core.load().is_worker_ready

    def submit(
        self,
        outlet: Outlet,
        num_prompts: Sequence[int],
        *,
        num_resumed: int = 0,
        max_tokens: int = 8,
        num_logprobs: int | None = None,
        num_prompt_logprobs: int | None = None,
        fork: int | None = None,
        reads_cache: bool = True,
        **options: object,
    ) -> list[Verdict]:
        """One request; the entry of a refused sequence is dropped.

        Prompts with a `fork` begin alike; those with the same one are alike to their ends, others
        differ from token `fork` on. Prompts without one share nothing.
        """
        request_id = str(options.pop("request_id", f"r{self.num_submitted}"))
        entries = []
        for num_prompt in num_prompts:
            stream_id = self.num_submitted
            self.num_submitted += 1
            first = [expected_token(stream_id, num_prompt + n) for n in range(num_resumed)]
            entries.append(
                SequenceSubmit(
                    stream_id=stream_id,
                    index=0,
                    prompt_token_ids=self._prompt(num_prompt, fork, stream_id),
                    output_token_ids=array("I", first),
                    seed=stream_id,
                    replay=ReplayScript(token_ids=(1,)) if self.capacity.is_replay else None,
                )
            )
            self.streams[stream_id] = Stream(
                seed=stream_id,
                num_prompt=num_prompt,
                outlet=outlet,
                request_id=request_id,
                wants_logprobs=num_logprobs is not None,
                tokens=first,
                num_resumed=num_resumed,
            )
        submission = Submission(
            request_id=request_id,
            sequences=tuple(entries),
            sampling=SamplingSpec(
                max_tokens=max_tokens,
                eos_token_ids=(7,),
                num_logprobs=num_logprobs,
                num_prompt_logprobs=num_prompt_logprobs,
                skip_reading_prefix_cache=not reads_cache,
            ),
            **options,
        )
        verdicts = self.core.submit(submission, outlet, self.now)
        assert [v.stream_id for v in verdicts] == [e.stream_id for e in entries]
        for verdict in verdicts:
            if verdict.refusal is not None:
                del self.streams[verdict.stream_id]
        self.check()
        return verdicts

    def resubmit(self, stream_id: int, outlet: Outlet, *, num_more: int) -> int:
        """The next turn of a conversation: the text so far and some more; returns its stream."""
        earlier = self.prompts[stream_id] + array("I", self.streams[stream_id].tokens)
        self.next_prompt = earlier + array("I", range(40_000, 40_000 + num_more))
        self.submit(outlet, [len(self.next_prompt)])
        return self.num_submitted - 1

    def _prompt(self, num_prompt: int, fork: int | None, stream_id: int) -> "array[int]":
        given, self.next_prompt = self.next_prompt, None
        if given is None:
            given = (
                prompt(num_prompt, family=1 + stream_id)
                if fork is None
                else prompt(num_prompt, fork)
            )
        self.prompts[stream_id] = given
        return given

    def abort(
        self, stream_id: int, reason: AbortReason = AbortReason.CANCELLED, kept: int = 0
    ) -> None:
        stream = self.streams[stream_id]
        self.core.abort(stream.outlet, stream_id, reason, kept, self.now)
        self.check()
        assert stream.end or stream.is_forgotten, "an abort ends the sequence at once"

    def close(self, outlet: Outlet) -> None:
        self.deliver()
        self.core.close_outlet(outlet, self.now)
        for stream in self.streams.values():
            if stream.outlet is outlet and not stream.end:
                stream.is_forgotten = True
        assert not outlet.sequences
        assert outlet.take() is None
        self.check()

    def plan(self, replica: int = 0) -> StepPlan | None:
        """The next plan, run by the worker at once; its result waits."""
        num_live = self.core.num_live_at(replica)
        if len(self.sides) == 1:
            num_live = len(self.live())
        is_idle = self.core.num_in_flight_at(replica) == 0 and self.sides[replica].is_open
        plan = self.core.plan(self.now, replica)
        assert plan or not (is_idle and num_live), "work waits and nothing is planned"
        if plan is not None:
            self._run(plan, replica)
        self.check()
        return plan

    def tick(self) -> bool:
        """A step of all replicas as one world; their results wait."""
        if not all(side.is_open for side in self.sides):
            return False
        num_live = sum(self.core.num_live_at(replica) for replica in range(len(self.sides)))
        is_idle = self.core.num_in_flight_at(0) == 0
        plans = plan_step(self.core, 0, [side.capacity for side in self.sides], self.now)
        assert plans or not (is_idle and num_live), "work waits and nothing is planned"
        for replica, plan in enumerate(plans or ()):
            self._run(plan, replica)
        self.check()
        return plans is not None

    def take_result(self, replica: int = 0) -> StepResult:
        """The oldest result reaches the core."""
        self.now += 0.001
        side = self.sides[replica]
        side.in_flight.popleft()
        result = side.results.popleft()
        self.core.take_result(result, self.now, replica)
        self.check()
        if result.step % 3 == 0:
            self.check_names()
        return result

    def take_tick(self) -> None:
        """The oldest result of each replica of a world reaches the core."""
        for replica, side in enumerate(self.sides):
            if side.results:
                self.take_result(replica)

    def step(self) -> None:
        """What an engine does: fill the windows, take one result of each replica."""
        if self.is_joint:
            while self.tick():
                pass
            self.take_tick()
            return
        for replica, side in enumerate(self.sides):
            while self.plan(replica) is not None:
                pass
            if side.results:
                self.take_result(replica)

    def run_to_end(self, limit: int = 5000) -> None:
        """Step until nothing is live; everything must be free again."""
        for _ in range(limit):
            self.step()
            if not self.live() and not any(side.results for side in self.sides):
                break
        assert not self.live(), "a sequence never ended"
        load = self.core.load()
        assert load.num_free_blocks == load.num_total_blocks
        assert (load.num_running, load.num_waiting, load.num_waiting_tokens) == (0, 0, 0)

    def reset_cache(self) -> None:
        """New weights: what was computed before is of no use for those who come now."""
        self.core.reset_prefix_cache()
        for side in self.sides:
            side.worker.weights += 1
        self.check()
        assert not self.core.load().num_cached_blocks

    def check_names(self) -> None:
        """Each block that can be found holds what its name says, computed and confirmed."""
        last = self.capacity.block_size_tokens - 1
        found = self.core.cache_log.read(None).snapshot or ()
        for block in found:
            side = self.sides[block.replica]
            names = self._names_of(side, side.worker.kv[block.block, last])
            assert block.block_hash in names, "a block under a wrong name"
        self._check_holders(found)

    def _check_holders(self, found: Sequence[CachedBlock]) -> None:
        """Placement knows the same blocks at the same replicas."""
        holders, count = self.core._replicas.placer._holders, len(self.sides)
        if holders is None:
            assert count == 1
            return
        assert len(holders) == len({block.block_hash for block in found})
        for block in found:
            assert holders.num_hits([block.block_hash], count)[block.replica] == 1

    def _names_of(self, side: Side, content: int) -> set[bytes]:
        """Names of a block that ends with this content, under the weights of now."""
        worker = side.worker
        key = (worker.weights, content)
        if key not in side.names:
            weights, tokens = worker.text(content)
            size = self.capacity.block_size_tokens
            chains = [BlockHashes(root_hash("", size, salt), size) for salt in SALTS]
            for chain in chains:
                chain.extend(len(tokens) // size, array("I", tokens), array("I"))
            is_new = weights == worker.weights
            side.names[key] = {chain.known[-1] for chain in chains} if is_new else set()
        return side.names[key]

    def live(self) -> list[Stream]:
        return [s for s in self.streams.values() if not s.end and not s.is_forgotten]

    def check(self) -> None:
        self.core.check()
        self.deliver()
        for stream in self.streams.values():
            first, count = stream.num_checked, len(stream.tokens)
            if first != count:
                position = stream.num_prompt + first
                assert stream.tokens[first:] == expected(stream.seed, position, count - first)
                stream.num_checked = count
        assert self.core.num_live == len(self.live())
        tried = max((self.num_losses[stream.seed] for stream in self.live()), default=0)
        assert tried < MAX_LOSSES, "it may be what kills the workers"

    def deliver(self) -> None:
        for outlet, delivery in self.core.take_deliveries():
            self._take_tokens(outlet, delivery)
            for end in delivery.ends:
                stream = self.streams[end.stream_id]
                assert stream.outlet is outlet
                assert stream.end is None, "two ends"
                assert (end.finish_reason is None) != (end.failure is None)
                stream.end = end
                _check_told(stream, end.stats)

    def _take_tokens(self, outlet: Outlet, delivery: Delivery) -> None:
        columns = delivery.tokens
        if columns is None:
            return
        assert len(set(columns.stream_ids)) == len(columns.stream_ids)
        runs = cut(columns.token_ids, columns.num_tokens)
        num_logprobs = 0
        for stream_id, previous, run in zip(
            columns.stream_ids, columns.num_previous_tokens, runs, strict=True
        ):
            stream = self.streams[stream_id]
            assert stream.outlet is outlet
            assert not stream.end, "tokens after the end"
            assert len(stream.tokens) == previous, "a gap"
            stream.tokens += run
            if stream.wants_logprobs:
                entries = columns.logprobs[num_logprobs : num_logprobs + len(run)]
                assert [-entry.logprob for entry in entries] == run
                num_logprobs += len(run)
        assert num_logprobs == len(columns.logprobs)
        for stream_id, stats in columns.starts:
            stream = self.streams[stream_id]
            assert stream_id in columns.stream_ids, "a start without tokens"
            assert stream.start is None, "two starts"
            stream.start = stats
        if self.capacity.num_speculative_tokens:
            drafts = zip(columns.num_drafted_tokens, columns.num_accepted_tokens, strict=True)
            for stream_id, pair in zip(columns.stream_ids, drafts, strict=True):
                self.streams[stream_id].drafts = pair
        else:
            assert not columns.num_drafted_tokens + columns.num_accepted_tokens

    def _run(self, plan: StepPlan, replica: int = 0) -> None:
        """Run a plan; it may use nothing that a plan before it still uses."""
        side = self.sides[replica]
        size = self.capacity.block_size_tokens
        # Blocks that a new row begins with because they hold its start already.
        num_hit = {new.row: new.num_computed_tokens // size for new in plan.new_sequences}
        new_rows = num_hit.keys()
        for row, blocks in zip(plan.rows, cut(plan.new_blocks, plan.num_new_blocks), strict=True):
            taken = set(blocks[num_hit.get(row, 0) :])
            for earlier in side.in_flight:
                assert row not in new_rows or row not in earlier.rows, "row reused too early"
                for other, used in earlier.blocks.items():
                    assert other == row or not used & taken, "block reused too early"
        side.worker.last_read_step = plan.step - len(side.results) - 1
        result = side.worker.run(plan)
        used_blocks = {row: set(side.worker.rows[row].blocks) for row in plan.rows}
        side.in_flight.append(InFlight({*plan.rows, *plan.freed_rows}, used_blocks))
        side.results.append(result)
        self.plans.append(plan)
        assert len(side.results) <= self.window


def _check_told(stream: Stream, stats: SequenceStats) -> None:
    """Whoever had ended the sequence by itself at the last token would have told the same."""
    assert (stream.start is not None) == (len(stream.tokens) > stream.num_resumed)
    assert stream.drafts == (stats.num_drafted_tokens, stats.num_accepted_tokens)
    if stream.start is not None:
        for name in ("num_prompt_tokens", "num_cached_tokens", "queue_us", "prefill_us"):
            assert getattr(stream.start, name) == getattr(stats, name), name


def prompt(num_tokens: int, fork: int = 0, family: int = 0) -> "array[int]":
    """A prompt of a family that is like others of it up to token `fork`; 0 is to the end."""
    return array(
        "I",
        (n + 100 * family + (1000 * fork if n > fork > 0 else 0) for n in range(1, num_tokens + 1)),
    )


def expected(seed: int, num_prompt: int, count: int) -> list[int]:
    """The tokens of an undisturbed run."""
    return [expected_token(seed, num_prompt + n) for n in range(count)]


def cut(ids: "array[int]", counts: list[int]) -> Iterator[list[int]]:
    """Pieces of `ids`, as long as `counts` says."""
    start = 0
    for count in counts:
        yield ids[start : start + count].tolist()
        start += count
    assert start == len(ids)
