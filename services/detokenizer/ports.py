"""What the core of this service needs from outside, as it sees it."""

from collections.abc import Sequence
from typing import Protocol

from services.detokenizer.messages import SequenceFinished, TokenSubmit
from shared.endings import AbortReason
from shared.errors import RequestError
from shared.sampling import SequenceStats, TokenLogprobs


class TokenListener(Protocol):
    """Who wants to know about the sequences of one submit; `position` counts them."""

    def on_verdict(self, position: int, refusal: RequestError | None) -> None:
        """Admitted, or refused for good."""

    def on_start(self, position: int, stats: SequenceStats) -> None:
        """What is known of a sequence when its first tokens come; told before them."""

    def on_drafts(self, position: int, num_drafted: int, num_accepted: int) -> None:
        """Its drafts so far, those of the tokens included that are told next."""

    def on_tokens(
        self,
        position: int,
        num_previous: int,
        ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None,
    ) -> None:
        """New tokens behind the first `num_previous` ones."""

    def on_prompt_logprobs(
        self, position: int, start: int, entries: Sequence[TokenLogprobs]
    ) -> None:
        """What the prompt's tokens from `start` on are worth; comes again if computed again."""

    def on_end(self, position: int, end: SequenceFinished | RequestError) -> None:
        """The one end; nothing comes after it."""

    def on_fault(self, error: RequestError) -> None:
        """The listener itself has failed; its request ends."""


class SequenceListener(TokenListener, Protocol):
    """A request: it hears nothing of schedulers, but that one took over from another."""

    def on_resumed(self, position: int, num_tokens: int) -> None:
        """Its scheduler was lost, and one goes on behind the first `num_tokens` tokens."""


class LossListener(TokenListener, Protocol):
    """Who knows that a scheduler can be lost."""

    def on_lost(self, position: int) -> None:
        """The connection broke before the end: nothing more is heard of the sequence."""


class Upstream(Protocol):
    """The schedulers, as one that is never lost for long."""

    def submit(self, submit: TokenSubmit, listener: SequenceListener) -> list[int]:
        """Send a request; returns a name for each sequence, never used again.

        Raises:
            RequestError: UPSTREAM_LOST, while there is no connection; or it cannot be sent.
        """

    def abort(self, name: int, reason: AbortReason, num_tokens_kept: int = 0) -> None:
        """End a sequence; nothing more is told of it. Idempotent."""

    async def reset_cache(self) -> int:
        """Ask all to share nothing that was computed so far; how many blocks that were.

        Raises:
            RequestError: One of them cannot be reached.
        """
        ...
