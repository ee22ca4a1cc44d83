"""Scheduler and worker together: the core plans for an executor in the same process.

Every plan and every result goes over the wire format, so both sides' counts are held against each
other as in a deployment.
"""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.core import SchedulerCore
from services.scheduler.limits import CoreConfig
from services.scheduler.messages import SequenceEnd, SequenceSubmit, Submission
from services.scheduler.outlet import Outlet
from services.scheduler.worker_client import capacity_from_proto, plan_to_proto, result_from_proto
from services.worker.runner import StepExecutor
from services.worker.server import capacity_to_proto, plan_from_proto, result_to_proto
from shared.sampling import SamplingSpec, TokenLogprobs


@dataclass
class Stream:
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    wants_logprobs: bool = False
    end: SequenceEnd | None = None


class Pair:
    """A scheduler's core and a worker's executor."""

    def __init__(self, executor: StepExecutor, **config: int) -> None:
        self.executor = executor
        self.core = SchedulerCore(CoreConfig(**config))
        self.outlet = Outlet()
        self.streams: list[Stream] = []
        self.results: deque[Any] = deque()
        self.max_in_flight = 0
        executor.start_epoch(config.get("max_plans_in_flight", 1))
        self.core.worker_opened(capacity_from_proto(capacity_to_proto(executor.capacity, "")), 0.0)

    def add(self, prompt: Sequence[int], **sampling: Any) -> Stream:
        """A sequence with the number of its place in `streams`."""
        number = len(self.streams)
        entry = SequenceSubmit(
            stream_id=number,
            index=0,
            prompt_token_ids=array("I", prompt),
            output_token_ids=array("I"),
            seed=sampling.get("seed", 0),
        )
        submission = Submission(
            request_id=f"r{number}", sequences=(entry,), sampling=SamplingSpec(**sampling)
        )
        verdicts = self.core.submit(submission, self.outlet, 0.0)
        assert verdicts[0].refusal is None
        stream = Stream(list(prompt), wants_logprobs="num_logprobs" in sampling)
        self.streams.append(stream)
        return self.streams[-1]

    def step(self) -> None:
        while (plan := self.core.plan(0.0)) is not None:
            result = self.executor.execute(plan_from_proto(plan_to_proto(plan)), 0)
            assert result.failure is None
            self.results.append(result_from_proto(result_to_proto(result)))
            self.max_in_flight = max(self.max_in_flight, len(self.results))
        self.core.take_result(self.results.popleft(), 0.0)
        self.core.check()
        self._deliver()

    def run(self, preempt_every: int = 0) -> None:
        """Run to the end; push out the latest sequence at every so many steps."""
        steps = 0
        while self.core.num_live or self.results:
            self.step()
            steps += 1
            batch = self.core._replicas[0].batch
            if preempt_every and steps % preempt_every == 0 and batch and batch.running:
                batch._preempt(next(reversed(batch.running)))
        assert all(one.end and one.end.finish_reason for one in self.streams)
        self.core.tidy()

    def _deliver(self) -> None:
        for _, delivery in self.core.take_deliveries():
            columns = delivery.tokens
            if columns is not None:
                ids, logprobs = columns.token_ids.tolist(), list(columns.logprobs)
                for number, count in zip(columns.stream_ids, columns.num_tokens, strict=True):
                    stream = self.streams[number]
                    stream.tokens += ids[:count]
                    del ids[:count]
                    if stream.wants_logprobs:
                        stream.logprobs += logprobs[:count]
                        del logprobs[:count]
                assert not ids
                assert not logprobs
            for end in delivery.ends:
                self.streams[end.stream_id].end = end
