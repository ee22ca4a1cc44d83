"""The real scheduler core in simulated time, between conversations and replicas.

The scheduler is one server: what the core, and the conversion of its messages, takes of this
machine's CPU is measured event by event and charged, times `cost_factor`. Everything else is
simulated: requests, devices, the way of a message, and what handing one to gRPC, or taking one
from it, costs the scheduler's process.
"""

import heapq
import itertools
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.scheduler_step import encoded
from benchmarks.simulate.device_time import DeviceModel
from benchmarks.simulate.hardware import MESSAGE_CPU_S, MESSAGE_S, TICK_S
from benchmarks.simulate.traces import Conversation, tokens
from benchmarks.simulate.worker import SimulatedReplica, SimulatedWorld, output_token
from protos.glm.v1 import worker_pb2
from services.scheduler.core import SchedulerCore
from services.scheduler.limits import CoreConfig
from services.scheduler.messages import SequenceEnd, SequenceSubmit, Submission
from services.scheduler.outlet import Outlet
from services.scheduler.plan import StepPlan, StepResult
from services.scheduler.server import delivery_to_proto
from services.scheduler.ticks import plan_step
from services.scheduler.worker_client import plan_to_proto, result_from_proto
from shared.sampling import LoadSnapshot, SamplingSpec

# What clients allow; answers end before, where the trace says so.
MAX_TOKENS = 16_384


@dataclass(slots=True)
class Served:
    """One request: when it came, what it got. Times are seconds of the simulation."""

    tenant_id: str
    priority: int
    arrived_at: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    first_token_at: float | None = None
    ended_at: float | None = None
    is_refused: bool = False


@dataclass(slots=True)
class _Asked:
    """A request on its way."""

    conversation: Conversation
    number: int
    prompt: "array[int]"
    seed: int
    served: Served


@dataclass(frozen=True, slots=True)
class _Answer:
    """The results of a world's step on their way."""

    world: int
    results: Sequence[StepResult]
    encoded: Sequence[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The state ten times per simulated second."""

    at: float
    num_running: int
    num_waiting: int
    num_output_tokens: int


@dataclass(slots=True)
class Outcome:
    """All that a run tells."""

    served: list[Served] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds between the ends of two steps of a replica, and how many rows decoded in both."""
    samples: list[Sample] = field(default_factory=list)
    load: LoadSnapshot = field(default_factory=LoadSnapshot)
    ended_at: float = 0.0
    scheduler_s: float = 0.0
    device_s: float = 0.0
    num_steps: int = 0


class World:
    """One run.

    Args:
        config: Settings of the core.
        device: Of every replica.
        num_replicas: How many.
        cost_factor: What the scheduler's own cost counts; 0 makes it free.
        message_s: The way of a plan or a result.
        message_cpu_s: What sending or receiving one takes of the scheduler's process.
        world_size: Replicas that share experts, and so step together.
        acceptance: As `SimulatedReplica`.
    """

    def __init__(
        self,
        config: CoreConfig,
        device: DeviceModel,
        num_replicas: int = 1,
        cost_factor: float = 1.0,
        message_s: float = MESSAGE_S,
        message_cpu_s: float = MESSAGE_CPU_S,
        world_size: int = 1,
        acceptance: Sequence[float] = (),
    ) -> None:
        """Every replica has an epoch, nothing was asked yet."""
        self._core = SchedulerCore(config, num_replicas=num_replicas)
        self._has_priorities = config.policy == "priority"
        self._wanted: dict[int, int] = {}
        self._capacities = [device.capacity] * world_size
        self._worlds = [
            SimulatedWorld(
                device, [SimulatedReplica(self._wanted, acceptance) for _ in range(world_size)]
            )
            for _ in range(num_replicas // world_size)
        ]
        for number in range(num_replicas):
            self._core.worker_opened(device.capacity, 0.0, number)
        self._outlet = Outlet()
        self._cost_factor = cost_factor
        self._message_s = message_s
        self._message_cpu_s = message_cpu_s
        self._num_messages = 0
        self._free_at = 0.0
        self._events: list[tuple[float, int, object]] = []
        self._order = itertools.count()
        self._seeds = itertools.count(1)
        self._asked: dict[int, _Asked] = {}
        self._last_step: list[tuple[float, int]] = [(0.0, 0)] * num_replicas
        self._num_pending = 0
        # A row with more tokens in a step computes its prompt.
        self._num_decode_tokens = 1 + device.capacity.num_speculative_tokens
        self.outcome = Outcome()

    def run(self, conversations: list[Conversation], until_s: float = float("inf")) -> Outcome:
        """Serve all of it, or what is served until then."""
        for conversation in conversations:
            self._ask(conversation, 0, conversation.prefix, conversation.arrives_at)
        self._push(0.0, None)
        while self._events and self._num_pending:
            at, _, event = heapq.heappop(self._events)
            if at > until_s:
                break
            self._handle(at, event)
        return self._close()

    def _close(self) -> Outcome:
        outcome = self.outcome
        outcome.load = self._core.load()
        outcome.ended_at = max((s.ended_at or 0.0 for s in outcome.served), default=0.0)
        outcome.device_s = sum(world.busy_s for world in self._worlds) * len(self._capacities)
        return outcome

    def _push(self, at: float, event: object) -> None:
        heapq.heappush(self._events, (at, next(self._order), event))

    def _ask(self, conversation: Conversation, number: int, said: "array[int]", at: float) -> None:
        turn, seed = conversation.turns[number], next(self._seeds)
        prompt = said + tokens(seed, turn.num_new_tokens)
        self._wanted[seed] = turn.num_output_tokens
        served = Served(conversation.tenant_id, conversation.priority, at, len(prompt))
        self.outcome.served.append(served)
        self._num_pending += 1
        self._push(at, _Asked(conversation, number, prompt, seed, served))

    # -- the scheduler's own time ------------------------------------------------------------

    def _handle(self, at: float, event: object) -> None:
        """One event; the scheduler takes it when it is free, and is busy for what it costs."""
        now = max(at, self._free_at)
        self._num_messages = 0
        before = time.thread_time_ns()
        ends = self._tell(now, event)
        steps = self._plan(now)
        cost_s = (time.thread_time_ns() - before) * 1e-9 + self._num_messages * self._message_cpu_s
        cost_s *= self._cost_factor
        if isinstance(event, _Answer):
            self._core.tidy()  # while the devices work
        self._free_at = now + cost_s
        self.outcome.scheduler_s += cost_s
        for number, plans in steps:
            world = self._worlds[number]
            done_at, results = world.run(plans, self._free_at + self._message_s)
            answer = _Answer(number, results, [encoded(result) for result in results])
            self._push(done_at + self._message_s, answer)
            for place, plan in enumerate(plans):
                self._note_step(number * len(plans) + place, plan, done_at)
        for end in ends:
            self._note_end(end, self._free_at)
        if event is None:
            self._sample(at)

    def _tell(self, now: float, event: object) -> list[SequenceEnd]:
        """Hand the event to the core; what ended."""
        if isinstance(event, _Asked):
            self._submit(event, now)
            self._num_messages += 1
        elif isinstance(event, _Answer):
            first = event.world * len(self._capacities)
            for replica, (result, data) in enumerate(
                zip(event.results, event.encoded, strict=True), first
            ):
                result_from_proto(worker_pb2.RunStepsResponse.FromString(data).result)
                self._core.take_result(result, now, replica)
            self._num_messages += len(event.results)
        else:
            self._core.tick(now)
        ends = []
        for _, delivery in self._core.take_deliveries():
            delivery_to_proto(delivery).SerializeToString()
            self._num_messages += 1
            ends += delivery.ends
        return ends

    def _plan(self, now: float) -> list[tuple[int, list[StepPlan]]]:
        """What an event may allow: further steps, for any world."""
        steps, size = [], len(self._capacities)
        for number in range(len(self._worlds)):
            while plans := plan_step(self._core, number * size, self._capacities, now):
                for plan in plans:
                    plan_to_proto(plan).SerializeToString()
                self._num_messages += size
                steps.append((number, plans))
        return steps

    def _submit(self, asked: _Asked, now: float) -> None:
        entry = SequenceSubmit(
            stream_id=asked.seed,
            index=0,
            prompt_token_ids=asked.prompt,
            output_token_ids=array("I"),
            seed=asked.seed,
        )
        submission = Submission(
            request_id=f"r{asked.seed}",
            sequences=(entry,),
            sampling=SamplingSpec(max_tokens=MAX_TOKENS, seed=asked.seed),
            tenant_id=asked.conversation.tenant_id,
            priority=asked.conversation.priority if self._has_priorities else 0,
        )
        (verdict,) = self._core.submit(submission, self._outlet, now)
        if verdict.refusal is None:
            self._asked[asked.seed] = asked
        else:
            asked.served.is_refused = True
            self._num_pending -= 1

    # -- what is noted ---------------------------------------------------------------------------

    def _note_end(self, end: SequenceEnd, at: float) -> None:
        asked = self._asked.pop(end.stream_id)
        served, stats = asked.served, end.stats
        served.ended_at = at
        served.first_token_at = end.timeline.first_token_at
        served.num_output_tokens = stats.num_output_tokens
        served.num_cached_tokens = stats.num_cached_tokens
        served.num_preemptions = stats.num_preemptions
        self._num_pending -= 1
        conversation, following = asked.conversation, asked.number + 1
        if following < len(conversation.turns):
            start = len(asked.prompt)
            answer = (output_token(asked.seed, start + n) for n in range(stats.num_output_tokens))
            said = asked.prompt + array("I", answer)
            pause_s = conversation.turns[following].pause_s
            if conversation.forgets:
                said = conversation.prefix
            self._ask(conversation, following, said, at + pause_s)

    def _note_step(self, number: int, plan: StepPlan, done_at: float) -> None:
        last_at, num_before = self._last_step[number]
        num_decoding = sum(map(self._num_decode_tokens.__ge__, plan.num_scheduled_tokens))
        if num_before and num_decoding:
            self.outcome.gaps.append((done_at - last_at, min(num_before, num_decoding)))
        self._last_step[number] = (done_at, num_decoding)
        self.outcome.num_steps += 1

    def _sample(self, at: float) -> None:
        load = self._core.load()
        self.outcome.samples.append(
            Sample(
                at=at,
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_output_tokens=load.num_output_tokens_total,
            )
        )
        self._push(at + TICK_S, None)
