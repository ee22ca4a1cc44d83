"""Text events of one request, for internal clients that want no OpenAI objects."""

from dataclasses import dataclass

from services.detokenizer.choice import Choice, ChoiceEnd
from services.detokenizer.delivery import ReaderLimits, check_reader
from services.detokenizer.delta import ToolPiece
from services.detokenizer.messages import OutputSpec, TextEnd
from services.detokenizer.response import Response
from shared.sampling import SequenceStats


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaEvent:
    """New output of one choice."""

    index: int
    reasoning: str
    content: str
    tools: list[ToolPiece]
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEndEvent:
    """One choice ended well."""

    index: int
    finish_reason: str
    stop_reason: str | int | None
    stats: SequenceStats


Event = DeltaEvent | SequenceEndEvent | TextEnd


class EventWriter:
    """Collects what is new in a response; merges while the reader is busy."""

    def __init__(self, response: Response, spec: OutputSpec, limits: ReaderLimits) -> None:
        """Events as `spec` wants them."""
        self.response = response
        self._spec = spec
        self._limits = limits
        self._ended: set[int] = set()
        # Since when the reader has not taken a message; the caller keeps it.
        self.stalled_since: float | None = None

    def collect(self) -> list[Event]:
        """Everything new; the end of the request is the last event ever."""
        events: list[Event] = []
        for choice in self.response.choices:
            if choice.index in self._ended:
                continue
            delta = self._delta(choice)
            if delta is not None:
                events.append(delta)
            if choice.end is not None:
                self._ended.add(choice.index)
                events.append(_sequence_end(choice, choice.end))
        if self.response.end is not None:
            events.append(self.response.end)
        return events

    def tick(self, now: float) -> None:
        """Look at the clock: deadlines and slow readers."""
        self.response.check_deadline(now)
        if self.stalled_since is not None:
            check_reader(self.response, self.stalled_since, self._limits, now)

    def _delta(self, choice: Choice) -> DeltaEvent | None:
        if not choice.text.delta and not choice.token_ids:
            return None
        delta = choice.text.take()
        ids, choice.token_ids = choice.token_ids, []
        return DeltaEvent(
            index=choice.index,
            reasoning="".join(delta.reasoning) if self._spec.include_reasoning else "",
            content="".join(delta.content),
            tools=[
                piece
                for piece in delta.merged_tools()
                if self._spec.parallel_tool_calls or piece.index == 0
            ],
            token_ids=ids,
        )


def _sequence_end(choice: Choice, end: ChoiceEnd) -> SequenceEndEvent:
    return SequenceEndEvent(
        index=choice.index,
        finish_reason=end.finish_reason,
        stop_reason=end.stop_reason,
        stats=choice.full_stats(),
    )
