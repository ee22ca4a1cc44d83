"""Three spans per traced sequence, made when it ends: queue, prefill, decode.

Numbers stand at the end of a phase; nothing is recorded per step or token.
"""

import time
from collections.abc import Iterable

from services.scheduler.messages import SequenceEnd
from shared import tracing


def record_spans(ends: Iterable[SequenceEnd], now: float) -> None:
    """Record the phases of ended sequences; `now` is on the clock of their timelines."""
    epoch_ns = time.time_ns() - round(now * 1e9)
    for end in ends:
        if end.timeline.traceparent:
            _record(end, epoch_ns)


def _record(end: SequenceEnd, epoch_ns: int) -> None:
    line, stats = end.timeline, end.stats
    planned_at = line.ended_at if line.planned_at is None else line.planned_at
    phases = [("queue", line.arrived_at, planned_at)]
    if line.planned_at is not None:
        first_at = line.ended_at if line.first_token_at is None else line.first_token_at
        phases.append(("prefill", planned_at, first_at))
    if line.first_token_at is not None:
        phases.append(("decode", line.first_token_at, line.ended_at))
    attributes: dict[str, dict[str, tracing.AttributeValue]] = {
        "queue": {},
        "prefill": {
            "num_prompt_tokens": stats.num_prompt_tokens,
            "num_cached_tokens": stats.num_cached_tokens,
        },
        "decode": {
            "num_output_tokens": stats.num_output_tokens,
            "num_steps": stats.num_steps,
            "num_preemptions": stats.num_preemptions,
        },
    }
    for name, start, stop in phases:
        span = tracing.start_span(
            name,
            traceparent=line.traceparent,
            attributes={"request_id": line.request_id, **attributes[name]},
            start_ns=epoch_ns + round(start * 1e9),
        )
        if end.failure is not None and stop == line.ended_at:
            span.fail(end.failure.reason.name)
        span.end(epoch_ns + round(stop * 1e9))
