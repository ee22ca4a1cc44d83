"""Output without structure: the text of a completion."""

from services.detokenizer.delta import Delta
from services.detokenizer.stops import StopMatcher
from services.detokenizer.text import IncrementalDecoder
from shared.glm.tokenizer import Vocabulary


class PlainText:
    """One choice, with the same face as `OutputMachine`; all text is content."""

    is_reasoning = False
    is_content = True
    num_reasoning_tokens = 0
    num_calls = 0
    num_dropped_calls = 0
    num_unreadable_calls = 0

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        skips_special_tokens: bool,
        stops: StopMatcher | None = None,
    ) -> None:
        """Start with an empty text."""
        self._skipped = vocabulary.special_ids if skips_special_tokens else frozenset()
        self._decoder = IncrementalDecoder(vocabulary)
        self._stops = stops
        # Characters so far, those behind a stop string and those held back included.
        self.num_decoded_chars = 0
        self.delta = Delta()

    @property
    def pending(self) -> bytes:
        """Bytes of an incomplete character."""
        return self._decoder.pending

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.matched if self._stops is not None else None

    def arm(self) -> None:
        """Let stop strings match from now on."""
        if self._stops is not None:
            self._stops.is_armed = True

    def push(self, token: int) -> None:
        """One token of the output."""
        if token in self._skipped:
            return
        text = self._decoder.push(token)
        if text:
            self.num_decoded_chars += len(text)
            self._emit(text if self._stops is None else self._stops.push(text))

    def finish(self, *, is_cut: bool) -> None:
        """The output is over."""
        del is_cut  # a text has no structure that could be cut
        text = self._decoder.flush()
        if self._stops is None:
            self._emit(text)
        else:
            self._emit(self._stops.push(text) + self._stops.flush())

    def take(self) -> Delta:
        """What came since the last take."""
        delta, self.delta = self.delta, Delta()
        return delta

    def _emit(self, text: str) -> None:
        if text:
            self.delta.content.append(text)
