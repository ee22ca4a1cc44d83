"""Output in the order in which it came: runs of reasoning, of content and of tool calls.

Chats show each kind joined, so a `Delta` keeps a list per kind. Objects that are lists need
the order as well. It is found token by token, so the grouping of tokens cannot change it.
"""

import enum
from dataclasses import dataclass, field

from services.detokenizer.delta import Delta
from services.detokenizer.machine import OutputMachine

_MAX_PIECES = 1024


class Kind(enum.Enum):
    """What a run is."""

    REASONING = enum.auto()
    CONTENT = enum.auto()
    CALL = enum.auto()


@dataclass(slots=True)
class Run:
    """Text of one kind; of a call these are its arguments.

    `is_new` is false for the rest of a run whose beginning was taken before. `index` counts calls.
    `tokens` are those whose text a run of content has, counted over the content of the output.
    """

    kind: Kind
    is_new: bool
    index: int = 0
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(self.pieces)


@dataclass(slots=True)
class OrderedDelta(Delta):
    """A delta whose news stand in `runs` alone."""

    runs: list[Run] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.runs)

    @property
    def num_chars(self) -> int:
        """Size, to bound what is kept for a slow reader."""
        return sum(len(run.name) + sum(map(len, run.pieces)) for run in self.runs)

    def compact(self) -> None:
        """Join what waits."""
        for run in self.runs:
            if len(run.pieces) > _MAX_PIECES:
                run.pieces[:] = ["".join(run.pieces)]


class OrderedText:
    """An output machine whose deltas are runs.

    Args:
        machine: Gets the tokens.
        shows_reasoning: Whether reasoning is kept.
        shows_all_calls: Whether calls behind the first one are kept.
        tells_tokens: Whether runs of content tell their tokens.
    """

    num_decoded_chars = 0  # offsets are told for completions only

    def __init__(
        self,
        machine: OutputMachine,
        *,
        shows_reasoning: bool,
        shows_all_calls: bool,
        tells_tokens: bool = False,
    ) -> None:
        """Start with nothing shown."""
        self._machine = machine
        self._shows_reasoning = shows_reasoning
        self._shows_all_calls = shows_all_calls
        self._tells_tokens = tells_tokens
        self._num_tokens = 0
        # Tokens of content whose text has not been shown yet.
        self._held_tokens: list[int] = []
        self._last: tuple[Kind, int] | None = None
        self.delta = OrderedDelta()

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens inside think blocks so far."""
        return self._machine.num_reasoning_tokens

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._machine.is_reasoning

    @property
    def is_content(self) -> bool:
        """Whether the next text is content."""
        return self._machine.is_content

    @property
    def pending(self) -> bytes:
        """Bytes of an incomplete character."""
        return self._machine.pending

    @property
    def matched(self) -> str | None:
        """The stop string that ended the content."""
        return self._machine.matched

    @property
    def num_calls(self) -> int:
        """Complete calls so far."""
        return self._machine.num_calls

    @property
    def num_dropped_calls(self) -> int:
        """Calls that were read and not shown."""
        return self._machine.num_dropped_calls

    @property
    def num_unreadable_calls(self) -> int:
        """Texts behind a call's opening tag that were no call."""
        return self._machine.num_unreadable_calls

    def arm(self) -> None:
        """Let stop strings match from now on."""
        self._machine.arm()

    def push(self, token: int) -> None:
        """One token of the output."""
        if self._tells_tokens and self._machine.reads_as_content(token):
            self._held_tokens.append(self._num_tokens)
            self._num_tokens += 1
        self._machine.push(token)
        if self._machine.delta:
            self._sort(self._machine.take())

    def finish(self, *, is_cut: bool) -> None:
        """The output is over."""
        self._machine.finish(is_cut=is_cut)
        self._sort(self._machine.take())

    def take(self) -> OrderedDelta:
        """What came since the last take."""
        delta, self.delta = self.delta, OrderedDelta()
        return delta

    def _sort(self, delta: Delta) -> None:
        """What one token has brought: the end of a field stands before the next one's beginning."""
        if self._shows_reasoning:
            for text in delta.reasoning:
                self._run(Kind.REASONING).pieces.append(text)
        for text in delta.content:
            run = self._run(Kind.CONTENT)
            run.pieces.append(text)
            run.tokens += self._held_tokens
            self._held_tokens = []
        for piece in delta.tools:
            if piece.call_id:  # what is held in front of a call is never shown
                self._held_tokens = []
            if piece.index == 0 or self._shows_all_calls:
                run = self._run(Kind.CALL, piece.index)
                run.call_id = run.call_id or piece.call_id
                run.name = run.name or piece.name
                run.pieces.append(piece.arguments)

    def _run(self, kind: Kind, index: int = 0) -> Run:
        """The run that text of a kind belongs to."""
        runs, key = self.delta.runs, (kind, index)
        if key == self._last and runs:
            return runs[-1]
        runs.append(Run(kind, is_new=key != self._last, index=index))
        self._last = key
        return runs[-1]
