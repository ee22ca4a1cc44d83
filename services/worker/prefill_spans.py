"""One span `worker.prefill` per traced request: first plan to first token, with token counts.

Nothing is recorded per token, and nothing at all when tracing is off.
"""

import time
from dataclasses import dataclass

from services.worker.plan import NewSequence, StepPlan, StepResult
from shared import tracing


@dataclass(slots=True)
class _Prefill:
    """A traced sequence whose first token is awaited."""

    new: NewSequence
    start_ns: int
    num_chunks: int = 0


class PrefillSpans:
    """Watches plans and results go by, on the event loop."""

    def __init__(self) -> None:
        self._is_enabled = tracing.is_enabled()
        self._open: dict[int, _Prefill] = {}

    def clear(self) -> None:
        """Forget every open span: the epoch is over."""
        self._open.clear()

    def see_plan(self, plan: StepPlan) -> None:
        """Note traced sequences that start."""
        if not self._is_enabled:
            return
        for new in plan.new_sequences:
            self._open.pop(new.row, None)
            if new.traceparent:
                self._open[new.row] = _Prefill(new=new, start_ns=time.time_ns())

    def see_result(self, result: StepResult) -> None:
        """End the spans of the rows that got their first token or failed."""
        if not self._open:
            return
        failed = {entry.row for entry in result.row_failures}
        counts = result.num_sampled_tokens.tolist()
        for row, num_sampled in zip(result.rows.tolist(), counts, strict=True):
            if row not in self._open:
                continue
            self._open[row].num_chunks += 1
            if num_sampled or row in failed:
                _record(self._open.pop(row), is_failed=row in failed)


def _record(prefill: _Prefill, *, is_failed: bool) -> None:
    new = prefill.new
    span = tracing.start_span(
        "worker.prefill",
        traceparent=new.traceparent,
        attributes={
            "request_id": new.request_id,
            "num_prompt_tokens": len(new.prompt_token_ids),
            "num_output_tokens": len(new.output_token_ids),
            "num_cached_tokens": new.num_computed_tokens,
            "num_chunks": prefill.num_chunks,
            "is_failed": is_failed,
        },
        start_ns=prefill.start_ns,
    )
    span.end()
